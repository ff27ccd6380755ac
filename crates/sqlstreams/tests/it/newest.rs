//! Groups that want of each key the newest message only.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sqlstreams::{Client, Delivery, ErrorKind, Mode, Outcome, Outgoing, RetryPolicy, Stream};

use crate::plain::{Plain, create_group};
use crate::support::{client, client_at, connect, count, database, eventually};

type Seen = Arc<Mutex<Vec<(String, i64)>>>;

async fn compacted(client: &Client) -> Stream<Option<u64>> {
    let stream = client.stream("s").compacted(true).partition_size(1_000);
    stream.create().await.unwrap()
}

/// Messages of keys 0 to `keys` − 1 in turn; returns the newest id of each.
async fn produce(stream: &Stream<Option<u64>>, messages: u64, keys: u64) -> BTreeMap<String, i64> {
    let values: Vec<Option<u64>> = (0..messages).map(Some).collect();
    let batch = values.iter().enumerate();
    let batch = batch.map(|(i, value)| Outgoing::new(value).key(format!("k{}", i as u64 % keys)));
    let ids: Vec<i64> =
        stream.producer().send_all(batch).await.unwrap().into_iter().map(|sent| sent.id).collect();
    ids.iter().enumerate().map(|(i, id)| (format!("k{}", i as u64 % keys), *id)).collect()
}

fn noting<T>(seen: &Seen) -> impl Fn(Delivery<T>) -> std::future::Ready<()> + use<T> {
    let seen = seen.clone();
    move |message| {
        seen.lock().unwrap().push((message.key.clone().unwrap(), message.id));
        std::future::ready(())
    }
}

async fn assert_clean(db: &tokio_postgres::Client) {
    for table in ["consumer_lease_1", "exception_queue_1"] {
        let sql = format!("SELECT count(*) FROM sqlstreams.{table}");
        eventually(async || count(db, &sql).await == 0).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_key_is_handed_out_once_whatever_the_group() {
    let (client, db) = client().await;
    let stream = compacted(&client).await;
    let newest = produce(&stream, 2_800, 70).await;
    for kind in ["parallel", "ordered", "transactional", "limited", "batches", "ordered tx"] {
        let mode = if kind.starts_with("ordered") { Mode::Ordered } else { Mode::Parallel };
        let mut group = stream.group(kind).newest_only(true).mode(mode);
        if kind == "limited" {
            group = group.max_in_flight(10);
        }
        let group = group.create().await.unwrap();
        assert!(group.status().await.unwrap().newest_only);
        let seen = Seen::default();
        let consumer = group.consumer().concurrency(4).until_caught_up();
        let note = noting(&seen);
        let consumed = match kind {
            "transactional" | "ordered tx" => {
                consumer.run_transactional(move |m, _tx| note(m)).await
            }
            "batches" => {
                let all = move |batch: Vec<_>| {
                    batch.into_iter().for_each(|m| drop(note(m)));
                    std::future::ready(())
                };
                consumer.batch_size(16).run_batches(all).await
            }
            _ => consumer.run(note).await,
        };
        assert_eq!((consumed.unwrap().handled, kind), (70, kind));
        let seen: BTreeMap<String, i64> = seen.lock().unwrap().drain(..).collect();
        assert_eq!(seen, newest, "{kind}");
        assert_clean(&db).await;
        let status = group.status().await.unwrap();
        assert_eq!(status.resolved, status.head, "{kind}");
    }
}

#[tokio::test]
async fn only_a_compacted_stream_knows_what_is_newest() {
    let (client, db) = client().await;
    let plain = client.stream::<u64>("plain").create().await.unwrap();
    let error = plain.group("g").newest_only(true).create().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.to_string().contains("not compacted"), "{error}");
    plain.group("g").newest_only(false).create().await.unwrap();
    let error = plain.group("g").newest_only(true).open().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    let error = db.query("SELECT sqlstreams.create_group(1, 'h', p_newest_only => true)", &[]);
    assert_eq!(error.await.unwrap_err().code().unwrap().code(), "SQ004");
    assert_eq!(plain.groups().await.unwrap().len(), 1);
}

/// What a newer message has superseded while it waited for its next attempt is not tried again, and frees its key.
#[tokio::test(flavor = "multi_thread")]
async fn a_retry_of_what_is_superseded_is_none() {
    for mode in [Mode::Parallel, Mode::Ordered] {
        for transactional in [false, true] {
            let (client, db) = client().await;
            let stream = compacted(&client).await;
            let pause = Duration::from_millis(300);
            let retry = RetryPolicy::attempts(5).backoff(pause, 1.0, pause);
            let group = stream.group("g").mode(mode).newest_only(true).retry(retry);
            let group = group.create().await.unwrap();
            produce(&stream, 40, 20).await;
            let seen = Seen::default();
            let producer = stream.producer();
            let log = seen.clone();
            // Each fails the first time, when a newer one of half of the keys has come.
            let handler = move |m: Delivery<Option<u64>>| {
                let (producer, log) = (producer.clone(), log.clone());
                async move {
                    let key = m.key.clone().unwrap();
                    log.lock().unwrap().push((key.clone(), m.id));
                    if m.id > 40 || m.attempt() > 1 {
                        return Outcome::Done;
                    }
                    if m.id % 2 == 0 {
                        producer.send(&Some(0)).key(key).await.unwrap();
                    }
                    Outcome::RetryAfter("later".into(), pause)
                }
            };
            let consumer = group.consumer().concurrency(4).until_caught_up();
            let running = match transactional {
                false => consumer.run(handler).await,
                true => consumer.run_transactional(move |m, _tx| handler(m)).await,
            };
            let mut consumed = running.unwrap();
            // It began before those that its handlers sent.
            let stop = group.consumer().until_caught_up().run(noting(&seen)).await.unwrap();
            consumed.handled += stop.handled;
            consumed.superseded += stop.superseded;
            assert_eq!((consumed.failed, consumed.superseded), (20, 10), "{mode} {transactional}");
            assert_eq!(consumed.handled, 20);
            assert_eq!(group.status().await.unwrap().superseded, 10);
            let handled = seen.lock().unwrap().clone();
            let twice = (21..=40).filter(|id| handled.iter().filter(|(_, i)| i == id).count() > 1);
            assert_eq!(twice.collect::<Vec<_>>(), (21..=40).step_by(2).collect::<Vec<_>>());
            assert_clean(&db).await;
        }
    }
}

/// A newer message that nobody sees yet supersedes nothing; a tombstone does.
#[tokio::test]
async fn at_least_the_newest_is_handed_out() {
    let url = database().await;
    let (client, db) = client_at(&url).await;
    let stream = compacted(&client).await;
    let group = stream.group("g").newest_only(true).create().await.unwrap();
    let seen = Seen::default();
    let run = async || {
        group.consumer().until_caught_up().run(noting(&seen)).await.unwrap();
        seen.lock().unwrap().drain(..).map(|(_, id)| id).collect::<BTreeSet<i64>>()
    };
    stream.producer().send(&Some(1)).key("a").await.unwrap();
    stream.producer().send(&Some(1)).key("b").await.unwrap();
    db.batch_execute(
        "BEGIN; INSERT INTO sqlstreams.message_log_1 (key, payload) VALUES ('a', '2')",
    )
    .await
    .unwrap();
    stream.producer().send_tombstone("b").await.unwrap();
    let waits = tokio::spawn({
        let (group, seen) = (group.clone(), seen.clone());
        async move { group.consumer().until_caught_up().run(noting(&seen)).await }
    });
    // Not only claimed: what is fetched after the commit is superseded.
    eventually(async || !seen.lock().unwrap().is_empty()).await;
    db.batch_execute("COMMIT").await.unwrap();
    waits.await.unwrap().unwrap();
    let ids: BTreeSet<i64> = seen.lock().unwrap().drain(..).map(|(_, id)| id).collect();
    assert_eq!(ids, [1, 3, 4].into());
    // It can be changed at any time.
    for (newest_only, expected) in [(false, vec![5, 6]), (true, vec![8])] {
        stream.group("g").newest_only(newest_only).open().await.unwrap();
        stream.producer().send(&Some(1)).key("c").await.unwrap();
        stream.producer().send(&Some(2)).key("c").await.unwrap();
        assert_eq!(run().await, expected.into_iter().collect());
    }
    // By bindings, too: any newer message of the key counts.
    let bound = stream.group("bound").bind("x").newest_only(true).create().await.unwrap();
    for (key, routing_key) in [("d", "x"), ("e", "x"), ("e", "y"), ("d", "x")] {
        stream.producer().send(&Some(1)).key(key).routing_key(routing_key).await.unwrap();
    }
    let consumed = bound.consumer().until_caught_up().run(noting(&seen)).await.unwrap();
    assert_eq!(consumed.handled, 1);
    assert_eq!(seen.lock().unwrap()[0], ("d".to_owned(), 12));
}

#[tokio::test]
async fn plain_sql_gets_the_newest_only() {
    let url = database().await;
    let (client, db) = client_at(&url).await;
    let stream = compacted(&client).await;
    let plain =
        Plain { db: connect(&url).await, stream: 1, group: create_group(&db, 1, "g").await };
    let newest_only = "SELECT sqlstreams.alter_group(1, 1, p_newest_only => true)";
    db.query(newest_only, &[]).await.unwrap();
    produce(&stream, 30, 10).await;
    // What is pending is what there is to handle.
    let lease = plain.claim(100).await.unwrap();
    assert_eq!(lease.pending, "{[21,31)}");
    plain.fail(&lease, &[(21, "retry", Some(0.0)), (22, "retry", Some(0.0))]).await;
    plain.settle(&lease, "{[23,31)}").await;
    stream.producer().send(&Some(1)).key("k0").await.unwrap();
    let sql = "SELECT id FROM sqlstreams.claim_exceptions(1, 1, gen_random_uuid(), 10, false, NULL, NULL::json)";
    let rows = db.query(sql, &[]).await.unwrap();
    assert_eq!(rows.iter().map(|row| row.get(0)).collect::<Vec<i64>>(), [22]);
    let left = "SELECT count(*) FROM sqlstreams.exception_queue_1";
    assert_eq!(count(&db, left).await, 1);
}
