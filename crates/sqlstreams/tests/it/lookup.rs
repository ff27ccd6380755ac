//! Finding a place in the log by time.

use std::time::{Duration, SystemTime};

use fastrand::Rng;
use sqlstreams::Start;
use tokio_postgres::Client as Db;

use crate::support::{client, count};

const SIZE: i64 = 1_000;

/// Messages at random times, neighbours swapped by up to 4 s, in partitions some of which are empty, with holes in others.
async fn random_log(db: &Db, random: &mut Rng) -> i64 {
    let stream: i64 = db
        .query_one("SELECT sqlstreams.create_stream('s' || random()::text, 'json', $1)", &[&SIZE])
        .await
        .unwrap()
        .get(0);
    let (mut next, mut second) = (1, 0.0);
    for _ in 0..random.u32(1..8) {
        // A stretch without messages: within a partition, or several of them.
        next += [0, 0, 37, 700, SIZE, 3 * SIZE, 12 * SIZE][random.usize(0..7)];
        let sql = format!(
            "SELECT setval('sqlstreams.message_log_{stream}_id_seq', $1), sqlstreams.ensure_partitions($2, 3)"
        );
        db.query(&sql, &[&next, &stream]).await.unwrap();
        let many = random.i64(1..900);
        let pace = [0.0, 0.001, 0.5, 40.0][random.usize(0..4)];
        let sql = format!(
            "INSERT INTO sqlstreams.message_log_{stream} (id, payload, produced_at) OVERRIDING SYSTEM VALUE
             SELECT id, '1', 'epoch'::timestamptz + make_interval(secs => $3::float8 + (id - $1::bigint) * $4::float8 + random() * 4)
             FROM generate_series($1::bigint, $2::bigint) AS id WHERE random() < 0.8"
        );
        db.execute(&sql, &[&next, &(next + many - 1), &second, &pace]).await.unwrap();
        next += many;
        second += many as f64 * pace + if random.bool() { 0.0 } else { 100.0 };
    }
    let sql = format!("SELECT setval('sqlstreams.message_log_{stream}_id_seq', $1)");
    db.query(&sql, &[&(next - 1)]).await.unwrap();
    stream
}

/// Both edges of many times, against a look at every message.
#[tokio::test]
async fn both_edges_of_a_time_are_found_whatever_the_log_looks_like() {
    let (_client, db) = client().await;
    let seed =
        std::env::var("SQLSTREAMS_SEED").map_or_else(|_| fastrand::u64(..), |s| s.parse().unwrap());
    println!("SQLSTREAMS_SEED={seed}");
    let mut random = Rng::with_seed(seed);
    db.batch_execute("SET search_path = sqlstreams").await.unwrap();
    let mut edges = 0;
    for _ in 0..12 {
        let stream = random_log(&db, &mut random).await;
        // Times of messages, just before and after them, and any others.
        let sql = format!(
            "WITH times AS (
                 SELECT produced_at + d * interval '1 microsecond' AS at FROM (SELECT produced_at FROM message_log_{stream} ORDER BY random() LIMIT 12) AS m, generate_series(-1, 1) AS d
                 UNION ALL SELECT 'epoch'::timestamptz + make_interval(secs => random() * 40000 - 10) FROM generate_series(1, 8)
                 UNION ALL VALUES ('-infinity'::timestamptz), (now()))
             SELECT t.at::text, e.first_from, e.last_before, position_at({stream}, t.at),
                    -- As a hole before it is as good a place as the message itself.
                    (SELECT min(id) FROM message_log_{stream} WHERE produced_at >= t.at),
                    (SELECT min(id) FROM message_log_{stream} WHERE id >= e.first_from),
                    (SELECT coalesce(max(id), 0) FROM message_log_{stream} WHERE produced_at < t.at)
             FROM times AS t, time_edge({stream}, t.at) AS e"
        );
        for row in db.query(&sql, &[]).await.unwrap() {
            let at: &str = row.get(0);
            let (first, last, position): (i64, i64, i64) = (row.get(1), row.get(2), row.get(3));
            let place = format!("{at} in stream {stream}, seed {seed}");
            assert_eq!(row.get::<_, Option<i64>>(5), row.get::<_, Option<i64>>(4), "{place}");
            assert_eq!((last, position), (row.get::<_, i64>(6), first - 1), "{place}");
            edges += 1;
        }
    }
    assert!(edges > 100);
}

/// Where the clock was set back by more than the margin, nothing of that time that comes after the place is passed over, and a look-up ends.
#[tokio::test]
async fn a_clock_that_was_set_back_does_not_confuse_a_look_up_for_ever() {
    let (_client, db) = client().await;
    db.batch_execute(
        "SELECT sqlstreams.create_stream('s', 'json', 1000);
         INSERT INTO sqlstreams.message_log_1 (payload, produced_at) SELECT '1', 'epoch'::timestamptz + make_interval(secs => i) FROM generate_series(1, 500) AS i;
         INSERT INTO sqlstreams.message_log_1 (payload, produced_at) SELECT '1', 'epoch'::timestamptz + make_interval(secs => i - 300) FROM generate_series(501, 1000) AS i",
    )
    .await
    .unwrap();
    // 1970-01-01 00:06:00 is at ids 360 and 660.
    let at = count(
        &db,
        "SELECT sqlstreams.position_at(1, 'epoch'::timestamptz + interval '360 seconds')",
    )
    .await;
    assert!(at == 359 || at == 659, "{at}");
}

/// A search touches about as much in a log of very many partitions as in a small one.
#[tokio::test]
async fn a_look_up_reads_little_however_long_the_log_is() {
    let (_client, db) = client().await;
    db.batch_execute("SELECT sqlstreams.create_stream('s', 'json', 1000)").await.unwrap();
    let mut reads = Vec::new();
    for upto in [2_000, 60_000] {
        db.batch_execute(&format!(
            "SELECT sqlstreams.ensure_partitions(1, 70);
             INSERT INTO sqlstreams.message_log_1 (payload, produced_at) SELECT '1', 'epoch'::timestamptz + make_interval(secs => i * 10) FROM generate_series(sqlstreams.stream_head(1) + 1, {upto}) AS i"
        ))
        .await
        .unwrap();
        let blocks = "SELECT sum(heap_blks_hit + heap_blks_read + idx_blks_hit + idx_blks_read)::bigint FROM pg_statio_user_tables WHERE relname LIKE 'message\\_log\\_1\\_p%'";
        db.batch_execute("SELECT pg_stat_force_next_flush()").await.unwrap();
        let before = count(&db, blocks).await;
        for i in 0..10 {
            let second = upto * i;
            let sql = format!(
                "SELECT sqlstreams.position_at(1, 'epoch'::timestamptz + make_interval(secs => {second}))"
            );
            let found = count(&db, &sql).await;
            assert_eq!(found, (second / 10 - 1).max(0));
        }
        db.batch_execute("SELECT pg_stat_force_next_flush()").await.unwrap();
        reads.push(count(&db, blocks).await - before);
    }
    println!("{reads:?} blocks for 10 look-ups");
    assert!(reads[1] < reads[0] * 3, "{reads:?}");
}

/// Messages that are not committed yet may be of that time, too: the place lies before them.
#[tokio::test]
async fn what_is_not_committed_yet_is_not_passed_over() {
    let url = crate::support::database().await;
    let plain = crate::plain::installed(&url).await;
    plain.produce(5).await;
    plain.db.batch_execute("UPDATE sqlstreams.message_log_1 SET produced_at = produced_at - interval '1 hour' WHERE id <= 3").await.unwrap();
    let writer = plain.again(&url).await;
    writer.db.batch_execute("BEGIN").await.unwrap();
    assert_eq!(writer.produce(1).await, [6]);
    plain.produce(2).await;
    let at = "(SELECT produced_at FROM sqlstreams.message_log_1 WHERE id = 7)";
    let position = format!("SELECT sqlstreams.position_at(1, {at})");
    assert_eq!(count(&plain.db, &position).await, 5);
    writer.db.batch_execute("COMMIT").await.unwrap();
    assert_eq!(count(&plain.db, &position).await, 6);
    // Nobody writes: a hole is a hole.
    plain.burn(1).await;
    plain.produce(1).await;
    let at = "(SELECT produced_at FROM sqlstreams.message_log_1 WHERE id = 10)";
    assert_eq!(count(&plain.db, &format!("SELECT sqlstreams.position_at(1, {at})")).await, 9);
}

/// A group begins where it is told by a time, by the server's clock.
#[tokio::test]
async fn a_group_begins_at_a_time() {
    let (client, db) = client().await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    for number in 0..10_u64 {
        stream.producer().send(&number).await.unwrap();
    }
    db.batch_execute("UPDATE sqlstreams.message_log_1 SET produced_at = now() - (100 - id) * interval '1 minute'").await.unwrap();
    let at = SystemTime::now() - Duration::from_secs(60 * 95 + 30);
    let group = stream.group("g").start(Start::Time(at)).create().await.unwrap();
    assert_eq!(group.status().await.unwrap().claimed, 4);
    let future =
        stream.group("h").start(Start::Time(SystemTime::now() + Duration::from_secs(3_600)));
    assert_eq!(future.create().await.unwrap_err().kind(), sqlstreams::ErrorKind::InvalidArgument);
}
