//! Groups that nobody consumes any more.

use std::time::{Duration, Instant};

use sqlstreams::{Delivery, ErrorKind, Stream};

use crate::running::Running;
use crate::support::{client, count, eventually};

type Db = tokio_postgres::Client;

const DAY: Duration = Duration::from_secs(86_400);

/// As if so many hours had passed since everything that is known of the groups.
async fn pass(db: &Db, hours: i32) {
    let sql = format!(
        "UPDATE sqlstreams.group_watch SET changed_at = changed_at - interval '{hours} hours', seen_at = seen_at - interval '{hours} hours', warned_at = warned_at - interval '{hours} hours';
         UPDATE sqlstreams.maintenance_step SET next_due = NULL"
    );
    db.batch_execute(&sql).await.unwrap();
}

async fn names(stream: &Stream<u64>) -> Vec<String> {
    stream.groups().await.unwrap().into_iter().map(|group| group.group).collect()
}

async fn audited(db: &Db, action: &str) -> Vec<String> {
    let sql = "SELECT group_name FROM sqlstreams.audit WHERE action = $1 ORDER BY group_name";
    db.query(sql, &[&action]).await.unwrap().iter().map(|row| row.get(0)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_that_nobody_consumes_is_warned_of_and_dropped() {
    let (client, db) = client().await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    for name in ["abandoned", "claims", "listens", "paused"] {
        stream.group(name).create().await.unwrap();
    }
    let paused = stream.group("paused").open().await.unwrap();
    paused.pause().await.unwrap();
    stream.producer().send(&1).await.unwrap();
    let maintain = async || client.maintenance().once().await.unwrap();
    let expires = async || {
        let groups = stream.groups().await.unwrap();
        let warned = groups.into_iter().filter(|group| group.expires_at.is_some());
        warned.map(|group| group.group).collect::<Vec<_>>()
    };
    // It has to be wanted.
    maintain().await;
    assert_eq!(count(&db, "SELECT count(*) FROM sqlstreams.group_watch").await, 0);
    let error = stream.set_group_expiry(Some(Duration::from_secs(60))).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    stream.set_group_expiry(Some(DAY)).await.unwrap();
    assert_eq!(stream.info().await.unwrap().group_expiry, Some(DAY));

    maintain().await;
    pass(&db, 17).await;
    maintain().await;
    assert_eq!(expires().await, [""; 0]);
    // One is consumed, and so moves; one is consumed and has nothing to do, which it says.
    let claims = stream.group("claims").consumer().until_caught_up();
    claims.run(|_: Delivery<u64>| async {}).await.unwrap();
    let note = "SELECT sqlstreams.note_consumers(ARRAY(SELECT id FROM sqlstreams.consumer_group WHERE name = 'listens'))";
    db.batch_execute(note).await.unwrap();
    pass(&db, 2).await;
    maintain().await;
    assert_eq!(expires().await, ["abandoned"]);
    assert_eq!(audited(&db, "group_will_expire").await, ["abandoned"]);
    maintain().await;
    assert_eq!(audited(&db, "group_will_expire").await.len(), 1, "it is said once");
    assert_eq!(names(&stream).await.len(), 4);
    pass(&db, 6).await;
    maintain().await;
    assert_eq!(names(&stream).await, ["claims", "listens", "paused"]);
    assert_eq!(audited(&db, "expire_group").await, ["abandoned"]);

    // Never without a warning before, and a sign of life takes that back.
    pass(&db, 30).await;
    maintain().await;
    assert_eq!(expires().await, ["claims", "listens"]);
    db.batch_execute(note).await.unwrap();
    pass(&db, 2).await;
    maintain().await;
    assert_eq!(names(&stream).await, ["listens", "paused"]);
    assert_eq!(expires().await, [""; 0]);
    stream.set_group_expiry(None).await.unwrap();
    pass(&db, 1_000).await;
    maintain().await;
    assert_eq!(names(&stream).await, ["listens", "paused"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_with_nothing_to_do_says_that_it_is_there() {
    let (client, db) = client().await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    stream.set_group_expiry(Some(DAY)).await.unwrap();
    let consumer = Running::start(&stream.group("g").create().await.unwrap());
    let seen = "SELECT count(*) FROM sqlstreams.group_watch WHERE seen_at IS NOT NULL";
    crate::support::until("it is seen", Duration::from_secs(120), async || {
        count(&db, seen).await == 1
    })
    .await;
    consumer.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tb_021_thousands_of_abandoned_groups_are_listed_and_go() {
    const GROUPS: i64 = 20_000;
    let (client, db) = client().await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    // As create_group makes them.
    let sql = format!(
        "INSERT INTO sqlstreams.consumer_group (stream_id, name) SELECT 1, gen_random_uuid() FROM generate_series(1, {GROUPS});
         INSERT INTO sqlstreams.consumer_group_cursor_1 (group_id, generation, claimed) SELECT id, 0, 0 FROM sqlstreams.consumer_group;
         ANALYZE sqlstreams.consumer_group"
    );
    db.batch_execute(&sql).await.unwrap();
    stream.group("alive").create().await.unwrap();
    let begun = Instant::now();
    assert_eq!(stream.groups().await.unwrap().len() as i64, GROUPS + 1);
    println!("listing {GROUPS} groups took {:?}", begun.elapsed());
    stream.set_group_expiry(Some(DAY)).await.unwrap();

    let begun = Instant::now();
    client.maintenance().once().await.unwrap();
    println!("looking at them for the first time took {:?}", begun.elapsed());
    for hours in [20, 5] {
        pass(&db, hours).await;
        let note = "SELECT sqlstreams.note_consumers(ARRAY(SELECT id FROM sqlstreams.consumer_group WHERE name = 'alive'))";
        db.batch_execute(note).await.unwrap();
        let begun = Instant::now();
        client.maintenance().once().await.unwrap();
        println!("maintenance after {hours} h took {:?}", begun.elapsed());
    }
    eventually(async || {
        client.maintenance().once().await.unwrap();
        names(&stream).await == ["alive"]
    })
    .await;
    let sql = "SELECT count(*) FROM sqlstreams.audit WHERE action = 'expire_group'";
    assert_eq!(count(&db, sql).await, GROUPS);
}
