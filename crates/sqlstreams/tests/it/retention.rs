//! Retention: what goes, and what stays. How it goes is in retention_leaving.rs.

use std::sync::Mutex;
use std::time::Duration;

use sqlstreams::{Client, ErrorKind, HoldReason, Outcome, Outgoing, Retention, Stream};

use crate::support::{connect, count, database, eventually};

/// Ids of a partition.
pub const SIZE: i64 = 1_000;
pub const DAY: Duration = Duration::from_secs(86_400);

/// A client that does no maintenance by itself, and its stream 1.
pub struct Scene {
    pub url: String,
    pub client: Client,
    pub db: tokio_postgres::Client,
    pub stream: Stream<u64>,
}

pub async fn scene(keep: Retention) -> Scene {
    let url = database().await;
    let client = Client::builder(&url).maintenance(false).connect().await.unwrap();
    let stream = client.stream("s").partition_size(SIZE).retention(keep).create().await.unwrap();
    Scene { db: connect(&url).await, url, client, stream }
}

/// What is older than an hour goes.
pub fn hour() -> Retention {
    Retention::forever().keep_for(DAY / 24)
}

impl Scene {
    /// So many messages, numbered like their ids.
    pub async fn fill(&self, messages: i64) {
        self.ensure().await;
        let sql = format!(
            "INSERT INTO sqlstreams.message_log_1 (payload)
             SELECT to_json(coalesce((SELECT max(id) FROM sqlstreams.message_log_1), 0) + n) FROM generate_series(1, {messages}) AS n"
        );
        self.db.batch_execute(&sql).await.unwrap();
    }

    pub async fn ensure(&self) -> i32 {
        let sql = "SELECT sqlstreams.ensure_partitions(1, 30)";
        self.db.query_one(sql, &[]).await.unwrap().get(0)
    }

    /// Seals what is final, once all ids up to the head are if `all`.
    pub async fn seal(&self, all: bool) {
        let sql = "SELECT more FROM sqlstreams.seal_partitions(1)";
        eventually(async || {
            !self.db.query_one(sql, &[]).await.unwrap().get::<_, Option<bool>>(0).unwrap_or(false)
                || !all
        })
        .await;
    }

    /// A day goes by: partitions that are full are sealed, and old.
    pub async fn a_day_later(&self) {
        self.seal(true).await;
        let sql = "UPDATE sqlstreams.log_partition SET sealed_at = sealed_at - interval '1 day'";
        self.db.batch_execute(sql).await.unwrap();
    }

    /// So many partitions go, and no more. A vacuum may be in the way for a moment.
    pub async fn let_go(&self, partitions: u64) {
        let mut gone = 0;
        eventually(async || {
            gone += self.stream.retain().await.unwrap().partitions;
            gone >= partitions
        })
        .await;
        gone += self.stream.retain().await.unwrap().partitions;
        assert_eq!(gone, partitions);
    }

    /// The numbers of the partitions that readers of the log see.
    pub async fn partitions(&self) -> Vec<i64> {
        let sql = "SELECT substring(c.relname FROM '_p(\\d+)$')::bigint AS n FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid
                   WHERE i.inhparent = 'sqlstreams.message_log_1'::regclass AND NOT i.inhdetachpending ORDER BY n";
        self.db.query(sql, &[]).await.unwrap().iter().map(|row| row.get(0)).collect()
    }

    /// How many tables there are beside those: what was detached, or is halfway.
    pub async fn strays(&self) -> i64 {
        let sql = "SELECT count(*) FROM pg_class WHERE relkind = 'r' AND relname ~ '^message_log_1_(p|next_)\\d+$'";
        count(&self.db, sql).await - self.partitions().await.len() as i64
    }

    pub async fn first_id(&self) -> i64 {
        self.stream.info().await.unwrap().first_id
    }

    /// What the group gets until it has caught up, in order.
    pub async fn consume(&self, group: &str) -> Vec<u64> {
        let seen = Mutex::new(Vec::new());
        let group = self.stream.group(group).create_if_missing().await.unwrap();
        let consumer = group.consumer().until_caught_up();
        let seen_by_handler = std::sync::Arc::new(seen);
        let seen = seen_by_handler.clone();
        consumer
            .run(move |message| {
                seen_by_handler.lock().unwrap().push(message.payload);
                std::future::ready(Ok::<_, std::io::Error>(()))
            })
            .await
            .unwrap();
        let mut seen = std::mem::take(&mut *seen.lock().unwrap());
        seen.sort_unstable();
        seen
    }

    pub async fn holder(&self) -> Option<(HoldReason, Option<String>, Option<i64>)> {
        let hold = self.stream.info().await.unwrap().hold;
        hold.map(|hold| (hold.reason, hold.group, hold.resolved))
    }
}

pub fn numbers(range: std::ops::RangeInclusive<u64>) -> Vec<u64> {
    range.collect()
}

#[tokio::test]
async fn whole_partitions_go_when_they_are_old_and_every_group_has_resolved_them() {
    let scene = scene(hour()).await;
    scene.fill(3_500).await;
    assert_eq!(scene.consume("a").await, numbers(1..=3_500));
    scene.seal(true).await;
    // Sealed just now.
    assert_eq!(scene.stream.retain().await.unwrap().partitions, 0);
    scene.a_day_later().await;
    scene.let_go(3).await;
    assert_eq!(scene.partitions().await[0], 3);
    assert_eq!(scene.strays().await, 0);
    let info = scene.stream.info().await.unwrap();
    assert_eq!((info.first_id, info.hold), (3_000, None));
    let rows = count(&scene.db, "SELECT min(number) FROM sqlstreams.log_partition").await;
    assert_eq!(rows, 3);
    // Nothing left to do, and it costs one statement over all streams to know.
    assert_eq!(scene.stream.retain().await.unwrap().partitions, 0);
    let due = "SELECT count(*) FROM sqlstreams.retention_due(ARRAY[(1, 3500, 1000)::sqlstreams.stream_head])";
    assert_eq!(count(&scene.db, due).await, 0);

    // Who comes now begins with what is kept, from wherever it wants to.
    assert_eq!(scene.consume("b").await, numbers(3_000..=3_500));
    let sql = "SELECT sqlstreams.create_group(1, 'c', 17)";
    scene.db.batch_execute(sql).await.unwrap();
    assert_eq!(scene.consume("c").await, numbers(3_000..=3_500));
    let before = "SELECT sqlstreams.position_at(1, '-infinity')";
    assert_eq!(count(&scene.db, before).await, 2_999);
    // And the stream goes on.
    scene.fill(500).await;
    assert_eq!(scene.consume("a").await, numbers(3_501..=4_000));
}

/// A group that nobody consumes, or that has crashed with a message in hand: nothing that it has not resolved goes, and it is named.
#[tokio::test]
async fn a_frozen_group_holds_its_messages_and_is_named() {
    let scene = scene(hour()).await;
    scene.fill(3_500).await;
    scene.stream.group("frozen").create().await.unwrap();
    assert_eq!(scene.consume("quick").await.len(), 3_500);
    scene.a_day_later().await;
    let done = scene.stream.retain().await.unwrap();
    assert_eq!((done.partitions, done.waiting), (0, true));
    let frozen = |resolved| Some((HoldReason::Group, Some("frozen".to_owned()), Some(resolved)));
    assert_eq!(scene.holder().await, frozen(0));
    assert_eq!(scene.first_id().await, 1);
    let since = scene.stream.info().await.unwrap().hold.unwrap().since;

    // It has everything in hand but the first partition and a half.
    let token = "SELECT sqlstreams.advance(1, id, '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', 3000, '11111111-1111-1111-1111-111111111111') FROM sqlstreams.consumer_group WHERE name = 'frozen'";
    scene.db.query(token, &[]).await.unwrap();
    let settle = "SELECT sqlstreams.settle(1, id, 1, '11111111-1111-1111-1111-111111111111', '{[1,1501)}') FROM sqlstreams.consumer_group WHERE name = 'frozen'";
    scene.db.query(settle, &[]).await.unwrap();
    scene.let_go(1).await;
    assert_eq!((scene.first_id().await, scene.holder().await), (1_000, frozen(1_500)));
    let hold = scene.stream.info().await.unwrap().hold.unwrap();
    assert_eq!(hold.since, since, "it was the same all the time");

    scene
        .db
        .batch_execute("UPDATE sqlstreams.consumer_lease_1 SET expires_at = '-infinity'")
        .await
        .unwrap();
    assert_eq!(scene.consume("frozen").await, numbers(1_501..=3_500));
    scene.let_go(2).await;
    assert_eq!((scene.first_id().await, scene.holder().await), (3_000, None));
}

/// Its messages become visible when all else of their partition has been resolved, and old. They count as that old only from then on.
#[tokio::test]
async fn a_producer_that_commits_late_loses_nothing() {
    let scene = scene(hour()).await;
    let late = connect(&scene.url).await;
    scene.fill(10).await;
    late.batch_execute("BEGIN; INSERT INTO sqlstreams.message_log_1 (payload) VALUES ('11')")
        .await
        .unwrap();
    scene.ensure().await;
    let more = "INSERT INTO sqlstreams.message_log_1 (payload) SELECT to_json(n) FROM generate_series(12, 3500) AS n";
    scene.db.batch_execute(more).await.unwrap();
    scene.stream.group("a").create().await.unwrap();
    for _ in 0..5 {
        scene.seal(false).await;
        let sql = "UPDATE sqlstreams.log_partition SET sealed_at = sealed_at - interval '1 day', made_at = made_at - interval '1 day'";
        scene.db.batch_execute(sql).await.unwrap();
        assert_eq!(scene.stream.retain().await.unwrap().partitions, 0);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    late.batch_execute("COMMIT").await.unwrap();
    assert_eq!(scene.consume("a").await, numbers(1..=3_500));
    scene.seal(true).await;
    assert_eq!(scene.stream.retain().await.unwrap().partitions, 0, "visible for a moment only");
    scene.a_day_later().await;
    scene.let_go(3).await;
}

/// The group of a transaction that has not committed when the partition is judged.
#[tokio::test]
async fn a_group_that_is_being_created_counts() {
    let scene = scene(hour()).await;
    scene.fill(2_500).await;
    scene.consume("a").await;
    scene.a_day_later().await;
    let creator = connect(&scene.url).await;
    creator.batch_execute("BEGIN; SELECT sqlstreams.create_group(1, 'new')").await.unwrap();
    // It waits for that, a second, and is tried again later.
    let done = scene.stream.retain().await.unwrap();
    assert_eq!((done.partitions, done.waiting, scene.first_id().await), (0, true, 1));
    creator.batch_execute("COMMIT").await.unwrap();
    assert_eq!(scene.stream.retain().await.unwrap().partitions, 0);
    assert_eq!(scene.holder().await.unwrap().1.as_deref(), Some("new"));
    assert_eq!(scene.consume("new").await, numbers(1..=2_500));
    scene.let_go(2).await;
}

/// Dead letters, messages that wait for another attempt, and suspects of a partition that leaves.
#[tokio::test]
async fn what_failed_outlives_its_partition() {
    let scene = scene(hour()).await;
    let producer = scene.stream.producer();
    let odd = Outgoing::new(&1)
        .key("key")
        .routing_key("a.b")
        .headers(serde_json::Map::from_iter([("h".to_owned(), 1.into())]))
        .expires_in(DAY * 30);
    producer
        .send_all([odd, Outgoing::new(&2), Outgoing::new(&3), Outgoing::new(&4)])
        .await
        .unwrap();
    scene.fill(2_500).await;
    let group = scene.stream.group("g").create().await.unwrap();
    let fail = async |message: sqlstreams::Delivery<u64>| match message.payload {
        1..=3 => Ok::<_, std::io::Error>(Outcome::Dead("poison".into())),
        _ => Ok(Outcome::Done),
    };
    group.consumer().until_caught_up().run(fail).await.unwrap();
    // One waits for its next attempt, and one may have killed its process.
    // Of some nobody can say how old they are.
    let endless = "UPDATE sqlstreams.message_log_1 SET produced_at = CASE id WHEN 2 THEN '-infinity' ELSE 'infinity' END::timestamptz WHERE id IN (2, 3, 500)";
    scene.db.batch_execute(endless).await.unwrap();
    let sql = "UPDATE sqlstreams.exception_queue_1 SET state = 'ready', dead_at = NULL, due_at = now() + interval '1 day', losses = message_id - 2 WHERE message_id > 1";
    scene.db.batch_execute(sql).await.unwrap();
    let before = "SELECT string_agg(m::text, '|' ORDER BY id) FROM (SELECT id, key, routing_key, headers, produced_at, expires_at, payload FROM sqlstreams.message_TABLE_1 WHERE id <= 3) AS m";
    let text = async |table: &str| -> String {
        scene.db.query_one(&before.replace("TABLE", table), &[]).await.unwrap().get(0)
    };
    let was = text("log").await;
    scene.a_day_later().await;
    scene.let_go(2).await;
    assert_eq!(text("archive").await, was);
    assert_eq!(count(&scene.db, "SELECT count(*) FROM sqlstreams.message_archive_1").await, 3);

    let read = scene.stream.read(&[1, 2, 3, 4, 2_400]).await.unwrap();
    assert_eq!(
        read.iter().map(|m| (m.id, m.payload)).collect::<Vec<_>>(),
        [(1, 1), (2, 2), (3, 3), (2_400, 2_400)]
    );
    assert_eq!(read[0].key.as_deref(), Some("key"));
    assert!(group.dead_letters(0, 9).await.unwrap().iter().any(|dead| dead.message_id == 1));

    // Tried again, redriven: handlers get them as ever.
    group.redrive(None, 10).await.unwrap();
    let soon =
        "UPDATE sqlstreams.exception_queue_1 SET due_at = clock_timestamp() WHERE state = 'ready'";
    scene.db.batch_execute(soon).await.unwrap();
    assert_eq!(scene.consume("g").await, [1, 2, 3]);
    assert_eq!(count(&scene.db, "SELECT count(*) FROM sqlstreams.exception_queue_1").await, 0);
    // Then nothing refers to them any more.
    scene.stream.retain().await.unwrap();
    assert_eq!(count(&scene.db, "SELECT count(*) FROM sqlstreams.message_archive_1").await, 0);
    scene.stream.retain().await.unwrap();
    let archived = "SELECT archived::int::bigint FROM sqlstreams.stream";
    assert_eq!(count(&scene.db, archived).await, 0);
}

#[tokio::test]
async fn limits_say_what_is_kept() {
    // By count: 1,500 ids are kept, and up to a partition more.
    let counted = scene(Retention::forever().keep_count(1_500)).await;
    counted.fill(3_600).await;
    counted.a_day_later().await;
    counted.let_go(2).await;
    assert_eq!(counted.first_id().await, 2_000);

    // By bytes: as much as one partition takes, in full ones.
    let sized = scene(Retention::forever()).await;
    sized.fill(3_500).await;
    sized.a_day_later().await;
    let bytes =
        count(&sized.db, "SELECT pg_total_relation_size('sqlstreams.message_log_1_p2')").await;
    let keep = Retention::forever().keep_bytes(bytes.unsigned_abs());
    sized.stream.set_retention(&keep).await.unwrap();
    sized.let_go(2).await;
    assert_eq!(sized.first_id().await, 2_000);
    assert_eq!(sized.stream.info().await.unwrap().retention, keep);

    // Until it is resolved: by every group there is, and not if there is none.
    let resolved = scene(Retention::forever().until_resolved()).await;
    resolved.fill(3_500).await;
    resolved.a_day_later().await;
    assert_eq!(resolved.stream.retain().await.unwrap().partitions, 0);
    resolved.consume("a").await;
    resolved.stream.group("b").create().await.unwrap();
    assert_eq!(resolved.stream.retain().await.unwrap().partitions, 0);
    resolved.consume("b").await;
    resolved.let_go(3).await;

    // Any of them: old, though few.
    let any = scene(hour().keep_count(1_000_000)).await;
    any.fill(1_500).await;
    any.a_day_later().await;
    any.let_go(1).await;
    // For ever: nothing, whatever it was before.
    any.fill(2_000).await;
    any.stream.set_retention(&Retention::forever()).await.unwrap();
    any.a_day_later().await;
    assert_eq!(any.stream.retain().await.unwrap().partitions, 0);
}

/// Nothing goes in the minute after its partition is full: a producer may still ask what became of its commit. And the partition of the newest id stays.
#[tokio::test]
async fn the_newest_stay_whatever_the_limits() {
    let scene = scene(Retention::forever().keep_count(1).keep_for(Duration::from_secs(1))).await;
    scene.fill(2_999).await;
    scene.seal(true).await;
    scene
        .db
        .batch_execute(
            "UPDATE sqlstreams.log_partition SET sealed_at = sealed_at - interval '50 seconds'",
        )
        .await
        .unwrap();
    assert_eq!(scene.stream.retain().await.unwrap().partitions, 0);
    scene.a_day_later().await;
    scene.let_go(2).await;
    assert_eq!(scene.partitions().await[0], 2);
}

#[tokio::test]
async fn settings_are_checked_kept_and_lifted() {
    let scene = scene(Retention::forever()).await;
    assert!(scene.stream.info().await.unwrap().retention.is_forever());
    let most = hour()
        .keep_bytes(1 << 40)
        .keep_count(7)
        .until_resolved()
        .drop_unread(true)
        .keep_dead_for(DAY);
    scene.stream.set_retention(&most).await.unwrap();
    scene.stream.set_notify(true).await.unwrap();
    assert_eq!(scene.stream.info().await.unwrap().retention, most);
    for wrong in [
        Retention::forever().keep_for(Duration::ZERO),
        Retention::forever().keep_for(Duration::from_millis(999)),
        Retention::forever().keep_for(Duration::MAX),
        Retention::forever().keep_bytes(0),
        Retention::forever().keep_count(0),
        Retention::forever().keep_dead_for(Duration::from_millis(1)),
    ] {
        let error = scene.stream.set_retention(&wrong).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{wrong:?}: {error:?}");
        let builder = scene.client.stream::<u64>("t").retention(wrong);
        assert_eq!(builder.create().await.unwrap_err().kind(), ErrorKind::InvalidArgument);
    }
    assert_eq!(scene.stream.info().await.unwrap().retention, most);
    scene.stream.set_retention(&Retention::forever()).await.unwrap();
    assert_eq!(scene.stream.info().await.unwrap().retention, Retention::forever());
}

/// Of a compacted stream old values go with their partition; compaction, which may be at it at the same time, keeps what it keeps of the rest.
#[tokio::test(flavor = "multi_thread")]
async fn compaction_goes_on_beside_it() {
    let url = database().await;
    let client = Client::builder(&url).maintenance(false).connect().await.unwrap();
    let builder = client.stream::<u64>("s").partition_size(SIZE).compacted(true);
    let stream = builder.retention(hour()).create().await.unwrap();
    let scene = Scene { db: connect(&url).await, url, client, stream };
    scene.ensure().await;
    let fill = "INSERT INTO sqlstreams.message_log_1 (key, payload) SELECT 'k' || n % 100, to_json(n) FROM generate_series(1, 9500) AS n";
    scene.db.batch_execute(fill).await.unwrap();
    scene.a_day_later().await;
    // The newest of these keys lie in what goes.
    scene
        .db
        .batch_execute("DELETE FROM sqlstreams.message_log_1 WHERE key < 'k2' AND id > 2000")
        .await
        .unwrap();
    let compacting = tokio::spawn({
        let stream = scene.stream.clone();
        async move {
            for _ in 0..10 {
                // A partition may go under its hands; the next step begins above.
                let _ = stream.compact(Duration::ZERO, Duration::ZERO).await;
            }
        }
    });
    eventually(async || {
        scene.stream.retain().await.unwrap();
        scene.partitions().await[0] == 9 && scene.strays().await == 0
    })
    .await;
    compacting.await.unwrap();
    scene.stream.compact(Duration::ZERO, Duration::ZERO).await.unwrap();
    let left = "SELECT count(*) FROM sqlstreams.message_log_1";
    assert_eq!(count(&scene.db, left).await, 88);
    assert_eq!(scene.stream.latest("k50").await.unwrap().unwrap().payload, 9_450);
    assert!(scene.stream.latest("k10").await.unwrap().is_none());
    assert_eq!(scene.stream.current(None, 1_000).await.unwrap().messages.len(), 88);
}
