//! Giving the disk space of compacted partitions back.

use std::time::{Duration, Instant};

use sqlstreams::{Client, Left, Reclaimed, Stream};

use crate::support::{client_at, connect, count, database, eventually};

const NOTHING: Duration = Duration::ZERO;
/// Stream 1's first partition holds ids below it.
const SIZE: i64 = 10_000;
const LEAF: &str = "sqlstreams.message_log_1_p0";

/// More messages than a partition takes, of 100 keys.
async fn filled(url: &str) -> (Client, Stream<String>, tokio_postgres::Client) {
    let (client, db) = client_at(url).await;
    let stream = client.stream("s").compacted(true).partition_size(SIZE).create().await.unwrap();
    let fill = "INSERT INTO sqlstreams.message_log_1 (key, payload)
         SELECT 'k' || n % 100, to_json(repeat(md5(n::text), 10)) FROM generate_series(1, 12000) AS n";
    db.batch_execute(fill).await.unwrap();
    (client, stream, db)
}

/// Everything but the newest of each key goes; the partition keeps its size.
async fn compact<T>(stream: &Stream<T>, db: &tokio_postgres::Client) {
    let last = "SELECT max(id) FROM sqlstreams.message_log_1";
    eventually(async || {
        let done = stream.compact(NOTHING, NOTHING).await.unwrap();
        done.floor >= count(db, last).await
    })
    .await;
    assert_eq!(count(db, "SELECT count(*) FROM sqlstreams.message_log_1").await, 100);
}

async fn size(db: &tokio_postgres::Client) -> u64 {
    count(db, &format!("SELECT pg_table_size('{LEAF}')")).await.unsigned_abs()
}

/// Until somebody's snapshot, as that of an ANALYZE, keeps nothing any more.
async fn shrunk<T>(stream: &Stream<T>, most: u64) -> Reclaimed {
    let mut last = None;
    eventually(async || {
        last = stream.reclaim().await.unwrap().pop();
        last.as_ref().is_some_and(|done| done.left.is_none() && done.bytes_after < most)
    })
    .await;
    last.unwrap()
}

#[tokio::test]
async fn the_space_of_what_is_gone_comes_back() {
    let (_client, stream, db) = filled(&database().await).await;
    assert_eq!(stream.reclaim().await.unwrap(), []);
    compact(&stream, &db).await;
    let before = size(&db).await;
    let done = shrunk(&stream, 100_000).await;
    println!("{done:?}");
    assert_eq!((&*done.partition, done.bytes_after), (LEAF, size(&db).await));
    assert!(before > 3_000_000);
    // The other one is where producers are.
    assert_eq!(stream.reclaim().await.unwrap(), []);
    assert_eq!(stream.current(None, 1000).await.unwrap().messages.len(), 100);
}

#[tokio::test]
async fn an_older_snapshot_keeps_what_it_sees() {
    let url = database().await;
    let (_client, stream, db) = filled(&url).await;
    let old = connect(&url).await;
    old.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM pg_class")
        .await
        .unwrap();
    compact(&stream, &db).await;
    let done = stream.reclaim().await.unwrap();
    assert_eq!((done.len(), done[0].left), (1, None));
    assert_eq!(count(&old, "SELECT count(*) FROM sqlstreams.message_log_1").await, 12_000);
    // It holds a lock on the partition from now on, too.
    let started = Instant::now();
    assert_eq!(stream.reclaim().await.unwrap()[0].left, Some(Left::Busy));
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
    old.batch_execute("COMMIT").await.unwrap();
    shrunk(&stream, 100_000).await;
}

/// While a partition is written anew producers go on, and when that is interrupted everything is as it was. Before, while it waits for
/// somebody's lock, nobody waits behind it.
#[tokio::test(flavor = "multi_thread")]
async fn producers_go_on_and_a_kill_loses_nothing() {
    let url = database().await;
    let (_client, stream, db) = filled(&url).await;
    // Of half of the keys the newest message is in the first partition.
    db.batch_execute(
        "DELETE FROM sqlstreams.message_log_1 WHERE id >= 10000 AND key < 'k50';
         CREATE FUNCTION slow(bigint) RETURNS bigint LANGUAGE plpgsql IMMUTABLE AS $$ BEGIN PERFORM pg_sleep(0.05); RETURN 1; END $$",
    )
    .await
    .unwrap();
    let survivors = "SELECT count(*) FROM sqlstreams.message_log_1_p0";
    let head = "SELECT max(id) FROM sqlstreams.message_log_1";
    eventually(async || {
        stream.compact(NOTHING, NOTHING).await.unwrap().floor >= count(&db, head).await
    })
    .await;
    let rows = count(&db, survivors).await;
    assert!((30..100).contains(&rows), "{rows}");
    db.batch_execute("CREATE INDEX ON sqlstreams.message_log_1_p0 (slow(id))").await.unwrap();

    // A reader in its way: others read and write all the same.
    let reader = connect(&url).await;
    reader.batch_execute(&format!("BEGIN; {survivors}")).await.unwrap();
    let before = size(&db).await;
    let waiting = tokio::spawn({
        let stream = stream.clone();
        async move { stream.reclaim().await }
    });
    let mut longest = Duration::ZERO;
    while !waiting.is_finished() {
        let started = Instant::now();
        stream.producer().send(&"x".to_owned()).key("new").await.unwrap();
        assert_eq!(count(&db, survivors).await, rows);
        longest = longest.max(started.elapsed());
    }
    assert_eq!(waiting.await.unwrap().unwrap()[0].left, Some(Left::Busy));
    assert!(longest < Duration::from_secs(1), "{longest:?}");
    reader.batch_execute("COMMIT").await.unwrap();

    let running = tokio::spawn({
        let stream = stream.clone();
        async move { stream.reclaim().await }
    });
    let backend = "SELECT coalesce(max(pid), 0)::bigint FROM pg_stat_activity WHERE query LIKE 'VACUUM (FULL%' AND state = 'active' AND datname = current_database()";
    eventually(async || count(&db, backend).await > 0).await;
    let writing = "SELECT count(*) FROM pg_locks WHERE relation = 'sqlstreams.message_log_1_p0'::regclass AND mode = 'AccessExclusiveLock' AND granted";
    eventually(async || count(&db, writing).await > 0).await;
    let started = Instant::now();
    stream.producer().send(&"x".to_owned()).key("new").await.unwrap();
    assert!(started.elapsed() < Duration::from_millis(1_000), "{:?}", started.elapsed());
    assert_eq!(count(&db, writing).await, 1, "it is still at it");
    db.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'VACUUM (FULL%' AND state = 'active' AND datname = current_database()",
        &[],
    )
    .await
    .unwrap();
    running.await.unwrap().unwrap_err();
    assert_eq!((count(&db, survivors).await, size(&db).await), (rows, before));
    db.batch_execute("DROP INDEX sqlstreams.message_log_1_p0_slow_idx").await.unwrap();
    shrunk(&stream, 200_000).await;
    assert_eq!(count(&db, survivors).await, rows);
}

#[tokio::test]
async fn only_the_owner_may() {
    let url = database().await;
    let (_client, stream, db) = filled(&url).await;
    compact(&stream, &db).await;
    let password = url.split(['@', ':']).nth(2).unwrap();
    db.batch_execute(&format!(
        "CREATE ROLE janitor LOGIN PASSWORD '{password}'; GRANT USAGE ON SCHEMA sqlstreams TO janitor;
         GRANT SELECT ON ALL TABLES IN SCHEMA sqlstreams TO janitor; GRANT SELECT ON ALL SEQUENCES IN SCHEMA sqlstreams TO janitor"
    ))
    .await
    .unwrap();
    let janitor = Client::builder(&url.replace("//postgres:", "//janitor:")).migrate(false);
    let stream = janitor.connect().await.unwrap().stream::<String>("s").open().await.unwrap();
    let done = stream.reclaim().await.unwrap();
    assert_eq!((done[0].left, done[0].bytes_before), (Some(Left::NotPermitted), size(&db).await));
    assert_eq!(done[0].bytes_after, done[0].bytes_before);
}
