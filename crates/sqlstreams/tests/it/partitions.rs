//! Partitions of the log: made ahead, by any number of makers, whatever is in the way.

use std::time::Duration;

use futures_util::future::try_join_all;
use sqlstreams::{Client, Outgoing};

use crate::support::{client, client_at, connect, count, database, eventually};

type Db = tokio_postgres::Client;

/// The leaves of stream 1 that are attached, by their numbers, as the catalogue has them; they agree with our own.
async fn partitions(db: &Db) -> Vec<i64> {
    let attached = "SELECT coalesce(array_agg(substring(c.relname FROM '_p(\\d+)$')::bigint ORDER BY 1), '{}') FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
                    WHERE i.inhparent = 'sqlstreams.message_log_1'::regclass";
    let rows = "SELECT coalesce(array_agg(number ORDER BY number), '{}') FROM sqlstreams.log_partition WHERE stream_id = 1";
    // One snapshot for both.
    let both = format!("SELECT ({attached}), ({rows})");
    let row = db.query_one(&both, &[]).await.unwrap();
    let mut attached: Vec<i64> = row.get(0);
    attached.sort_unstable();
    assert_eq!(attached, row.get::<_, Vec<i64>>(1));
    attached
}

/// Tables that were prepared and are not attached.
const PREPARED: &str = "SELECT count(*) FROM pg_class WHERE relname LIKE '%\\_next\\_%'";

/// As many ids as that are drawn.
async fn draw(db: &Db, upto: i64) {
    db.query("SELECT setval('sqlstreams.message_log_1_id_seq', $1)", &[&upto]).await.unwrap();
    // Not in a moment.
    let sql = format!("UPDATE sqlstreams.stream_pace SET head = {upto} WHERE stream_id = 1");
    db.batch_execute(&sql).await.unwrap();
}

/// A step of the maintenance: how many partitions it made, whether there are more to make, and what keeps it from that.
async fn step(db: &Db) -> (i32, bool, Option<String>) {
    let sql = "SELECT made, more, trouble FROM sqlstreams.maintain_partitions(1)";
    let row = db.query_one(sql, &[]).await.unwrap();
    (row.get(0), row.get(1), row.get(2))
}

/// What an ANALYZE of the whole log holds as long as it takes.
async fn analyze(db: &Db) {
    let sql = "BEGIN; LOCK TABLE ONLY sqlstreams.message_log_1 IN SHARE UPDATE EXCLUSIVE MODE";
    db.batch_execute(sql).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn tb_026_twenty_makers_at_the_boundary_make_each_partition_once() {
    const MAKERS: usize = 20;
    let url = database().await;
    let (client, db) = client_at(&url).await;
    client.stream::<u64>("s").partition_size(1_000).create().await.unwrap();
    let mut makers = Vec::new();
    for _ in 0..MAKERS {
        makers.push(connect(&url).await);
    }
    let mut had = partitions(&db).await;
    for round in 1..=12 {
        // The head passes the last partition, or jumps ahead of it.
        draw(&db, round * 4_000 - 1).await;
        let sql = "SELECT made FROM sqlstreams.maintain_partitions(1)";
        let made = try_join_all(makers.iter().map(|maker| maker.query_one(sql, &[]))).await;
        let made: i32 = made.unwrap().iter().map(|row| row.get::<_, i32>(0)).sum();
        let now = partitions(&db).await;
        assert_eq!(now.len(), had.len() + made as usize, "round {round}");
        assert_eq!(now, (0..now.len() as i64).collect::<Vec<_>>());
        assert_eq!(now.last(), Some(&(round * 4 - 1 + 3)));
        had = now;
    }
    assert_eq!(count(&db, PREPARED).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn tb_025_a_burst_beyond_all_partitions_fails_no_send_and_maintenance_heals() {
    let url = database().await;
    let (client, db) = client_at(&url).await;
    let stream = client.stream::<u64>("s").partition_size(1_000).create().await.unwrap();
    // It is known as a slow stream: one message a second, and partitions for far longer than ten minutes.
    let sql = "UPDATE sqlstreams.stream_pace SET rate = 1, rated_at = now(), seen_at = now()";
    db.batch_execute(sql).await.unwrap();
    assert_eq!(partitions(&db).await, [0, 1, 2, 3]);

    // A minute of a hundred times as much, several times over, while nobody does any maintenance.
    let crates = (0..4).map(|_| {
        let url = url.clone();
        tokio::spawn(async move {
            let client = Client::connect(&url).await.unwrap();
            let stream = client.stream::<u64>("s").open().await.unwrap();
            let producer = stream.producer();
            for batch in 0..10_u64 {
                let numbers: Vec<u64> = (batch * 500..(batch + 1) * 500).collect();
                producer.send_all(numbers.iter().map(Outgoing::new)).await.unwrap();
            }
        })
    });
    let plain = (0..4).map(|_| {
        let url = url.clone();
        tokio::spawn(async move {
            let db = connect(&url).await;
            for _ in 0..10 {
                let sql = "SELECT count(*) FROM generate_series(1, 300) AS n, LATERAL sqlstreams.produce('s', n::text)";
                // One transaction each; a partition that another is making is waited for.
                assert_eq!(count(&db, sql).await, 300);
            }
        })
    });
    let senders: Vec<_> = crates.chain(plain).collect();
    for sender in senders {
        sender.await.unwrap();
    }
    assert_eq!(count(&db, "SELECT count(*) FROM sqlstreams.message_log_1").await, 32_000);

    let done = client.maintenance().once().await.unwrap();
    assert!(done.held, "{done:?}");
    let head = stream.info().await.unwrap().head;
    assert!(*partitions(&db).await.last().unwrap() >= head / 1_000 + 3);
    assert!(client.maintenance().status().await.unwrap().failures.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_analyze_delays_partitions_and_nobody_who_has_one() {
    let url = database().await;
    let (client, db) = client_at(&url).await;
    let stream = client.stream::<u64>("s").partition_size(1_000).create().await.unwrap();
    let (analyzing, plain) = (connect(&url).await, connect(&url).await);
    analyze(&analyzing).await;
    draw(&db, 2_500).await;

    // It says what is in the way, and keeps what it has prepared.
    let (made, more, trouble) = step(&db).await;
    assert_eq!((made, more), (0, true));
    let pid = count(&analyzing, "SELECT pg_backend_pid()::bigint").await;
    let named = format!("session {pid} holds ShareUpdateExclusiveLock");
    assert!(trouble.as_ref().unwrap().contains(&named), "{trouble:?}");
    assert_eq!(count(&db, PREPARED).await, 1);
    assert_eq!(partitions(&db).await, [0, 1, 2, 3]);
    let oid = "SELECT oid::bigint FROM pg_class WHERE relname = 'message_log_1_next_4'";
    let prepared = count(&db, oid).await;

    // While a maker waits, others send and read.
    let maker = connect(&url).await;
    let waiting = tokio::spawn(async move {
        loop {
            let (made, _, _) = step(&maker).await;
            if made > 0 {
                return made;
            }
        }
    });
    let waits = "SELECT count(*) FROM pg_locks WHERE mode = 'ShareUpdateExclusiveLock' AND NOT granted AND relation = 'sqlstreams.message_log_1'::regclass";
    eventually(async || count(&plain, waits).await > 0).await;
    stream.producer().send(&1).await.unwrap();
    plain.batch_execute("SELECT * FROM sqlstreams.message_log_1").await.unwrap();

    // Who needs the partition that cannot be made yet has to wait, and does not fail.
    draw(&db, 3_999).await;
    let sending = tokio::spawn(async move { stream.producer().send(&2).await });
    let tried = "SELECT last_value FROM sqlstreams.message_log_1_id_seq";
    eventually(async || count(&plain, tried).await > 4_001).await;
    assert!(!sending.is_finished());
    analyzing.batch_execute("COMMIT").await.unwrap();
    sending.await.unwrap().unwrap();
    waiting.abort();
    eventually(async || !step(&db).await.1).await;
    // The prepared one was taken.
    let oid = oid.replace("next_4", "p4");
    assert_eq!(count(&db, &oid).await, prepared);
    assert_eq!(count(&db, PREPARED).await, 0);
}

/// Each way in which a maker may end between two of its steps, and what it leaves.
#[tokio::test(flavor = "multi_thread")]
async fn makers_that_die_between_two_steps_leave_nothing_in_the_way() {
    let url = database().await;
    let (client, db) = client_at(&url).await;
    let compacted = client.stream::<Option<u64>>("s").partition_size(1_000).compacted(true);
    compacted.create().await.unwrap();

    // Prepared, and no more; then the log has become another, so that it does not fit.
    let blocker = connect(&url).await;
    analyze(&blocker).await;
    draw(&db, 2_500).await;
    assert_eq!(step(&db).await.0, 0);
    blocker.batch_execute("COMMIT").await.unwrap();
    let change = "ALTER TABLE sqlstreams.message_log_1_next_4 ADD COLUMN other int";
    db.batch_execute(change).await.unwrap();
    assert_eq!(step(&db).await, (2, false, None));
    assert_eq!(partitions(&db).await, [0, 1, 2, 3, 4, 5]);

    // Killed where it waits to attach.
    for killed in 0..3 {
        analyze(&blocker).await;
        draw(&db, 6_000 + killed * 3_000).await;
        let maker = connect(&url).await;
        let pid = count(&maker, "SELECT pg_backend_pid()::bigint").await;
        let making = tokio::spawn(async move {
            let sql = "SET lock_timeout = 0; SELECT sqlstreams.maintain_partitions(1)";
            while maker.batch_execute(sql).await.is_ok() {}
        });
        let waits = format!("SELECT count(*) FROM pg_locks WHERE pid = {pid} AND NOT granted");
        eventually(async || count(&db, &waits).await > 0).await;
        db.query(&format!("SELECT pg_terminate_backend({pid})"), &[]).await.unwrap();
        making.await.unwrap();
        blocker.batch_execute("COMMIT").await.unwrap();
        eventually(async || !step(&db).await.1).await;
        assert_eq!(partitions(&db).await.last(), Some(&(6 + killed * 3 + 3)));
        assert_eq!(count(&db, PREPARED).await, 0);
    }
    // Each has what a partition has, the index over the keys and the guard included.
    let indexes = "SELECT count(*) FROM pg_index i JOIN pg_inherits h ON h.inhrelid = i.indexrelid JOIN pg_inherits l ON l.inhrelid = i.indrelid
                   WHERE l.inhparent = 'sqlstreams.message_log_1'::regclass";
    let guards = "SELECT count(*) FROM pg_trigger t JOIN pg_inherits l ON l.inhrelid = t.tgrelid
                  WHERE l.inhparent = 'sqlstreams.message_log_1'::regclass AND tgname = 'refuse_direct_write' AND tgenabled = 'A'";
    let leaves = partitions(&db).await.len() as i64;
    assert_eq!((count(&db, indexes).await, count(&db, guards).await), (leaves * 2, leaves));
}

#[tokio::test]
async fn headroom_follows_the_highest_rate_that_was_seen() {
    let (client, db) = client().await;
    client.stream::<u64>("s").partition_size(1_000).create().await.unwrap();
    let maintain = async || {
        client.maintenance().once().await.unwrap();
        *partitions(&db).await.last().unwrap()
    };
    let draw = async |upto: i64| {
        let sql = format!("SELECT setval('sqlstreams.message_log_1_id_seq', {upto})");
        db.batch_execute(&sql).await.unwrap();
    };
    let back = |seconds: u32| {
        format!(
            "UPDATE sqlstreams.stream_pace SET seen_at = seen_at - interval '{seconds} s', rated_at = rated_at - interval '{seconds} s'"
        )
    };
    assert_eq!(maintain().await, 3);
    db.batch_execute("SET search_path = sqlstreams").await.unwrap();
    // 20 a second: 12,000 in ten minutes, and in steps of 8 at most.
    db.batch_execute(&back(100)).await.unwrap();
    draw(2_000).await;
    let rate = "SELECT round(rate)::bigint FROM sqlstreams.stream_pace";
    assert_eq!(maintain().await, 2 + 12);
    assert!((18..=20).contains(&count(&db, rate).await));
    // A stream that rests stays what it is, and is not written again.
    let row = "SELECT (ctid::text::point)[0]::bigint * 1000 + (ctid::text::point)[1]::bigint FROM sqlstreams.stream_pace";
    let before = count(&db, row).await;
    assert_eq!(maintain().await, 14);
    assert_eq!(count(&db, row).await, before);
    // Slower now, which changes nothing; nor does a moment that is too short to measure in.
    db.batch_execute(&back(100)).await.unwrap();
    draw(2_100).await;
    assert_eq!(maintain().await, 14);
    draw(2_900).await;
    maintain().await;
    assert!(count(&db, rate).await <= 20);
    // Four days later a sixteenth of it counts.
    db.batch_execute(&back(4 * 86_400)).await.unwrap();
    let ahead = "SELECT sqlstreams.partitions_ahead(p, 1000, clock_timestamp())::bigint FROM sqlstreams.stream_pace AS p";
    assert_eq!(count(&db, ahead).await, 3);
}

#[tokio::test]
async fn a_partition_is_sealed_when_none_of_its_ids_can_come_any_more() {
    let url = database().await;
    let (client, db) = client_at(&url).await;
    let stream = client.stream::<u64>("s").partition_size(1_000).create().await.unwrap();
    let late = connect(&url).await;
    let sql = "BEGIN; INSERT INTO sqlstreams.message_log_1 (payload) VALUES ('1')";
    late.batch_execute(sql).await.unwrap();
    draw(&db, 1_500).await;
    stream.producer().send(&2).await.unwrap();
    let sealed = "SELECT count(*) FROM sqlstreams.log_partition WHERE sealed_at IS NOT NULL";
    let due = "UPDATE sqlstreams.maintenance_step SET next_due = NULL";
    for _ in 0..3 {
        db.batch_execute(due).await.unwrap();
        client.maintenance().once().await.unwrap();
        assert_eq!(count(&db, sealed).await, 0, "somebody writes to it");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    late.batch_execute("COMMIT").await.unwrap();
    eventually(async || {
        db.batch_execute(due).await.unwrap();
        client.maintenance().once().await.unwrap();
        count(&db, sealed).await == 1
    })
    .await;
    let first = "SELECT number FROM sqlstreams.log_partition WHERE sealed_at IS NOT NULL";
    assert_eq!(count(&db, first).await, 0);
    assert_eq!(count(&db, "SELECT count(*) FROM sqlstreams.message_log_1_p0").await, 1);
}

#[tokio::test]
async fn tb_030_streams_that_are_dropped_leave_nothing_behind() {
    let url = database().await;
    let (client, db) = client_at(&url).await;
    let tables = "SELECT count(*) FROM pg_class WHERE relnamespace = 'sqlstreams'::regnamespace";
    let before = count(&db, tables).await;
    let blocker = connect(&url).await;
    for n in 1..=20_i64 {
        let stream = client.stream::<u64>("s").partition_size(1_000).create().await.unwrap();
        assert_eq!(stream.id(), n);
        // Something was prepared, and something failed.
        let lock = format!(
            "BEGIN; LOCK TABLE ONLY sqlstreams.message_log_{n} IN SHARE UPDATE EXCLUSIVE MODE"
        );
        let sql = format!(
            "SELECT setval('sqlstreams.message_log_{n}_id_seq', 1500); SET lock_timeout = 1;
             SELECT sqlstreams.record_step('partitions', {n}, now(), 'x')"
        );
        db.batch_execute(&sql).await.unwrap();
        if n % 10 == 0 {
            blocker.batch_execute(&lock).await.unwrap();
            let sql = format!("SELECT sqlstreams.maintain_partitions({n})");
            db.batch_execute(&sql).await.unwrap();
            assert_eq!(count(&db, PREPARED).await, 1);
            blocker.batch_execute("COMMIT").await.unwrap();
        }
        stream.drop_stream().await.unwrap();
    }
    assert_eq!(count(&db, tables).await, before);
    for table in ["log_partition", "stream_pace", "maintenance_step"] {
        assert_eq!(count(&db, &format!("SELECT count(*) FROM sqlstreams.{table}")).await, 0);
    }
    client.maintenance().once().await.unwrap();
    assert!(client.maintenance().status().await.unwrap().failures.is_empty());
}
