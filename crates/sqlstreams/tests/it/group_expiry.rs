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

/// A client that claims through plain SQL and never gets anything: its claims are signs of life, in every mode, and so are its looks. They write
/// once in a while, and nothing where groups do not expire.
#[tokio::test(flavor = "multi_thread")]
async fn claims_in_vain_are_signs_of_life_and_write_next_to_nothing() {
    const CLAIMS: [(&str, &str); 4] = [
        (
            "parallel",
            "SELECT sqlstreams.advance(1, GROUP, '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', 10)",
        ),
        (
            "ordered",
            "SELECT sqlstreams.advance_lanes(1, GROUP, '00000000-0000-0000-0000-000000000001', NULL, '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}',
                '{}', '{}', '{}', '{}', '{}', '{}', 10, false, gen_random_uuid())",
        ),
        (
            "fair",
            "SELECT sqlstreams.advance(1, GROUP, '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', 10)",
        ),
        ("looks", "SELECT sqlstreams.poll(1, GROUP)"),
    ];
    let (client, db) = client().await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    let mut calls = Vec::new();
    for (name, call) in CLAIMS {
        let group = stream.group(name);
        let group = match name {
            "ordered" => group.ordered().create().await,
            "fair" => group.fair().create().await,
            _ => group.create().await,
        };
        calls.push(call.replace("GROUP", &group.unwrap().id().to_string()));
    }
    stream.group("idle").create().await.unwrap();
    let poll = async |times: usize| {
        for call in &calls {
            for _ in 0..times {
                db.batch_execute(call).await.unwrap();
            }
        }
    };
    let maintain = async || client.maintenance().once().await.unwrap();
    // How often this session has written, and how often that was HOT.
    let written = async || {
        db.batch_execute("SELECT pg_stat_force_next_flush(); SELECT pg_stat_clear_snapshot()")
            .await
            .unwrap();
        let sql = "SELECT n_tup_ins + n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'group_watch'";
        let row = db.query_one(sql, &[]).await.unwrap();
        (row.get::<_, i64>(0), row.get::<_, i64>(1))
    };
    // What an ordered group writes down of its first holder is no matter here.
    poll(20).await;
    assert_eq!(written().await, (0, 0), "groups of this stream do not expire");

    stream.set_group_expiry(Some(DAY)).await.unwrap();
    maintain().await;
    let watched = "SELECT count(*) FROM sqlstreams.group_watch";
    assert_eq!(count(&db, watched).await, 5, "each is looked at");
    poll(50).await;
    let first = written().await;
    assert_eq!(first, (4, 4), "one sign of life of each, all of them HOT");
    for _ in 0..6 {
        pass(&db, 5).await;
        let (before, _) = written().await;
        poll(50).await;
        let (after, _) = written().await;
        assert_eq!(after - before, 4, "200 calls in vain");
        maintain().await;
    }
    // Thirty hours have gone by.
    pass(&db, 2).await;
    poll(1).await;
    maintain().await;
    let mut names = names(&stream).await;
    names.sort_unstable();
    assert_eq!(names, ["fair", "looks", "ordered", "parallel"]);
    // One that was warned of takes it back at once, however fresh its sign is.
    db.batch_execute("UPDATE sqlstreams.group_watch SET warned_at = now()").await.unwrap();
    poll(1).await;
    let warned = "SELECT count(*) FROM sqlstreams.group_watch WHERE warned_at IS NOT NULL";
    assert_eq!(count(&db, warned).await, 0);
}

/// The upkeep has the row: a claim does not wait for that, and says it the next time.
#[tokio::test(flavor = "multi_thread")]
async fn a_claim_in_vain_waits_for_nobody_who_has_the_row() {
    let url = crate::support::database().await;
    let (client, db) = crate::support::client_at(&url).await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    stream.set_group_expiry(Some(DAY)).await.unwrap();
    stream.group("g").create().await.unwrap();
    client.maintenance().once().await.unwrap();
    let other = crate::support::connect(&url).await;
    other.batch_execute("BEGIN; SELECT FROM sqlstreams.group_watch FOR UPDATE").await.unwrap();
    let claim = "SET statement_timeout = '20s'; SELECT sqlstreams.advance(1, 1, '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', 10)";
    db.batch_execute(claim).await.unwrap();
    let seen = "SELECT count(*) FROM sqlstreams.group_watch WHERE seen_at IS NOT NULL";
    assert_eq!(count(&db, seen).await, 0);
    other.batch_execute("COMMIT").await.unwrap();
    db.batch_execute(claim).await.unwrap();
    assert_eq!(count(&db, seen).await, 1);
}

/// Between the look that finds a group to be over and its end there is a moment, in which somebody may come: a claim, with or without messages, one that is
/// under way, a pause.
#[tokio::test(flavor = "multi_thread")]
async fn whoever_comes_in_the_last_moment_keeps_the_group() {
    let url = crate::support::database().await;
    let (client, db) = crate::support::client_at(&url).await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    stream.set_group_expiry(Some(DAY)).await.unwrap();
    let group = stream.group("g").create().await.unwrap();
    stream.producer().send(&1).await.unwrap();
    client.maintenance().once().await.unwrap();
    let mark = "SELECT mark FROM sqlstreams.group_watch";
    let mark: String = db.query_one(mark, &[]).await.unwrap().get(0);
    db.batch_execute("SET search_path = sqlstreams").await.unwrap();
    let expire = async |mark: &str| -> bool {
        let sql = "SELECT expire_group(1, 1, $1, now() - interval '2 days')";
        db.query_one(sql, &[&mark]).await.unwrap().get(0)
    };
    let warn =
        "UPDATE sqlstreams.group_watch SET warned_at = now() - interval '2 hours', seen_at = NULL";
    let claim =
        "SELECT sqlstreams.advance(1, 1, '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', 10)";
    let other = crate::support::connect(&url).await;
    db.batch_execute(warn).await.unwrap();
    other.batch_execute(&format!("BEGIN; {claim}")).await.unwrap();
    assert!(!expire(&mark).await, "a claim is under way");
    other.batch_execute("COMMIT").await.unwrap();
    assert!(!expire(&mark).await, "it has got something");
    let mark: String = db.query_one("SELECT cursor_mark(1, 1)", &[]).await.unwrap().get(0);
    other.batch_execute(claim).await.unwrap();
    assert!(!expire(&mark).await, "it has got nothing, and taken the warning back");
    db.batch_execute(warn).await.unwrap();
    group.pause().await.unwrap();
    assert!(!expire(&mark).await, "it is paused");
    group.resume().await.unwrap();
    assert_eq!(names(&stream).await, ["g"]);
    assert!(expire(&mark).await);
    assert_eq!(names(&stream).await, [""; 0]);
}
