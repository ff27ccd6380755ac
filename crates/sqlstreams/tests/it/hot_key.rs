//! One key with very many messages, or one that fails, in an ordered group: what becomes of the others. Counted, never timed.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use sqlstreams::{CancellationToken, Client, Delivery, Outgoing, RetryPolicy, Stream};

use crate::support::{client, client_at, count, database, eventually, until};

/// Keys by number: 0 and 1 are hot, the others are not in their lanes.
async fn keys(db: &tokio_postgres::Client, wanted: usize) -> Vec<String> {
    let sql = "SELECT 'k' || n FROM generate_series(0, 10000) AS n WHERE n < 2 OR sqlstreams.lane_of('k' || n, 0) NOT IN (sqlstreams.lane_of('k0', 0), sqlstreams.lane_of('k1', 0)) ORDER BY n";
    let rows = db.query(sql, &[]).await.unwrap();
    let lanes = "SELECT (sqlstreams.lane_of('k0', 0) <> sqlstreams.lane_of('k1', 0))::int::bigint";
    assert_eq!(count(db, lanes).await, 1);
    rows.iter().take(wanted).map(|row| row.get(0)).collect()
}

/// Sends one message after the other, of these keys.
async fn send(stream: &Stream<u64>, keys: impl IntoIterator<Item = &String>) {
    let keys: Vec<&String> = keys.into_iter().collect();
    let producer = stream.producer();
    for chunk in keys.chunks(5_000) {
        producer
            .send_all(chunk.iter().map(|key| Outgoing::new(&0).key((*key).clone())))
            .await
            .unwrap();
    }
}

/// What was handled, in order.
type Log = Arc<Mutex<Vec<(String, i64)>>>;

fn of(log: &Log, is: impl Fn(&str) -> bool) -> usize {
    log.lock().unwrap().iter().filter(|(key, _)| is(key)).count()
}

fn is_hot(key: &str) -> bool {
    key == "k0" || key == "k1"
}

/// Runs a consumer whose handlers of hot keys wait for `opened` and take so long then.
fn consume(
    client: &Client,
    concurrency: usize,
    log: &Log,
    opened: &CancellationToken,
    takes: Duration,
    stop: &CancellationToken,
) -> (tokio::task::JoinHandle<u64>, sqlstreams::Health) {
    let (log, opened, stop) = (log.clone(), opened.clone(), stop.clone());
    let client = client.clone();
    let (told, health) = std::sync::mpsc::channel();
    let running = tokio::spawn(async move {
        let stream = client.stream::<u64>("s").open().await.unwrap();
        let consumer = stream.group("g").consumer().concurrency(concurrency).stop_on(stop);
        told.send(consumer.health()).unwrap();
        let consumed = consumer.run(move |message: Delivery<u64>| {
            let (log, opened) = (log.clone(), opened.clone());
            async move {
                let key = message.key.clone().unwrap();
                if is_hot(&key) {
                    opened.cancelled().await;
                    tokio::time::sleep(takes).await;
                }
                log.lock().unwrap().push((key, message.id));
            }
        });
        consumed.await.unwrap().handled
    });
    (running, tokio::task::block_in_place(|| health.recv().unwrap()))
}

fn check_order(log: &Log) {
    let mut latest = std::collections::HashMap::new();
    for (key, id) in log.lock().unwrap().iter() {
        let before = latest.insert(key.clone(), *id);
        assert!(before.is_none_or(|before| before < *id), "{key}: {id} after {before:?}");
    }
}

/// Two keys with many messages, of which not one is finished until all others are.
async fn others_pass_by(consumers: usize) {
    const HOT: usize = 30_000;
    let url = database().await;
    let (client, db) = client_at(&url).await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    stream.group("g").ordered().create().await.unwrap();
    let keys = keys(&db, 200).await;
    let (hot, others) = keys.split_at(2);
    send(&stream, others).await;
    for key in hot {
        send(&stream, std::iter::repeat_n(key, HOT)).await;
        send(&stream, others).await;
    }
    let (log, opened, stop) = (Log::default(), CancellationToken::new(), CancellationToken::new());
    let mut running = Vec::new();
    for _ in 0..consumers {
        let client = Client::connect(&url).await.unwrap();
        running.push(consume(&client, 4, &log, &opened, Duration::ZERO, &stop));
    }
    let all = others.len() * 3;
    until("the others are handled", Duration::from_secs(60), async || {
        of(&log, |key| !is_hot(key)) == all
    })
    .await;
    assert_eq!(of(&log, is_hot), 0);
    // What comes now does not wait either.
    send(&stream, others).await;
    eventually(async || of(&log, |key| !is_hot(key)) == all + others.len()).await;
    let claims = count(&db, "SELECT max(next_seq) FROM sqlstreams.consumer_group_cursor_1").await;
    let held: usize = running.iter().map(|(_, health)| health.snapshot().held).sum();
    println!("{claims} claims, {held} messages held");
    assert!(claims < 400, "{claims} claims");
    assert!(held < HOT, "{held} messages are held");

    opened.cancel();
    until("all are handled", Duration::from_secs(120), async || {
        log.lock().unwrap().len() == all + others.len() + HOT * 2
    })
    .await;
    check_order(&log);
    stop.cancel();
    for (running, _) in running {
        running.await.unwrap();
    }
    for table in ["exception_queue_1", "consumer_lease_1"] {
        assert_eq!(count(&db, &format!("SELECT count(*) FROM sqlstreams.{table}")).await, 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn others_do_not_wait_for_keys_with_very_many_messages() {
    others_pass_by(1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn others_do_not_wait_for_keys_with_very_many_messages_of_several_consumers() {
    others_pass_by(3).await;
}

/// A worker goes on with another key, if there is one.
#[tokio::test(flavor = "multi_thread")]
async fn a_single_handler_takes_turns() {
    let (client, db) = client().await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    stream.group("g").ordered().create().await.unwrap();
    let keys = keys(&db, 102).await;
    send(&stream, std::iter::repeat_n(&keys[0], 3_000)).await;
    send(&stream, &keys[2..]).await;
    let (log, opened, stop) = (Log::default(), CancellationToken::new(), CancellationToken::new());
    opened.cancel();
    // Or they may all be handled before the others are claimed.
    let takes = Duration::from_millis(1);
    let (running, _) = consume(&client, 1, &log, &opened, takes, &stop);
    eventually(async || log.lock().unwrap().len() == 3_100).await;
    stop.cancel();
    running.await.unwrap();
    check_order(&log);
    let last = log.lock().unwrap().iter().rposition(|(key, _)| !is_hot(key)).unwrap();
    println!("the last of the others was number {last}");
    assert!(last < 2_000, "the last of the others was number {last}");
}

/// A message fails all the time: its key's later ones become rows, and all others are handled.
#[tokio::test(flavor = "multi_thread")]
async fn tb_098_a_key_that_always_fails_costs_the_others_nothing() {
    const ROUNDS: usize = 20;
    let (client, db) = client().await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    let pause = Duration::from_millis(5);
    let retry = RetryPolicy::attempts(1_000_000).backoff(pause, 1.0, pause);
    stream.group("g").ordered().retry(retry).create().await.unwrap();
    let keys = keys(&db, 202).await;
    let (log, stop) = (Log::default(), CancellationToken::new());
    let (noted, stopped) = (log.clone(), stop.clone());
    let group = stream.group("g").open().await.unwrap();
    let running = tokio::spawn(async move {
        let consumer = group.consumer().concurrency(4).stop_on(stopped);
        let consumed = consumer.run(move |message: Delivery<u64>| {
            let key = message.key.clone().unwrap();
            noted.lock().unwrap().push((key.clone(), message.id));
            std::future::ready(if is_hot(&key) { Err("no") } else { Ok(()) })
        });
        consumed.await.unwrap()
    });
    for round in 1..=ROUNDS {
        send(&stream, std::iter::repeat_n(&keys[0], 500)).await;
        send(&stream, &keys[2..]).await;
        eventually(async || of(&log, |key| !is_hot(key)) == round * 200).await;
    }
    // It was tried again and again meanwhile, and never anything but its first message.
    let first = log.lock().unwrap().iter().find(|(key, _)| is_hot(key)).unwrap().1;
    assert!(log.lock().unwrap().iter().all(|(key, id)| !is_hot(key) || *id == first));
    assert!(of(&log, is_hot) > 5, "{} attempts", of(&log, is_hot));
    let rows = "SELECT count(*) FROM sqlstreams.exception_queue_1";
    eventually(async || count(&db, rows).await == 500 * ROUNDS as i64).await;
    let of_others = "SELECT count(*) FROM sqlstreams.exception_queue_1 WHERE key <> 'k0'";
    assert_eq!(count(&db, of_others).await, 0);
    stop.cancel();
    running.await.unwrap();
}

/// What waits behind a message that failed is put aside in few claims, so that others come soon.
#[tokio::test(flavor = "multi_thread")]
async fn tb_098_the_backlog_of_a_key_that_fails_is_passed_in_few_claims() {
    let (client, db) = client().await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    let pause = Duration::from_secs(3_600);
    let retry = RetryPolicy::attempts(10).backoff(pause, 1.0, pause);
    let group = stream.group("g").ordered().retry(retry).create().await.unwrap();
    let keys = keys(&db, 3).await;
    for _ in 0..20 {
        send(&stream, std::iter::repeat_n(&keys[0], 1_000)).await;
    }
    send(&stream, [&keys[2]]).await;
    let (log, stop) = (Log::default(), CancellationToken::new());
    let (noted, stopped) = (log.clone(), stop.clone());
    let running = tokio::spawn(async move {
        let consumer = group.consumer().concurrency(4).stop_on(stopped);
        let consumed = consumer.run(move |message: Delivery<u64>| {
            let key = message.key.clone().unwrap();
            noted.lock().unwrap().push((key.clone(), message.id));
            std::future::ready(if is_hot(&key) { Err("no") } else { Ok(()) })
        });
        consumed.await.unwrap()
    });
    eventually(async || of(&log, |key| !is_hot(key)) == 1).await;
    let claims = count(&db, "SELECT max(next_seq) FROM sqlstreams.consumer_group_cursor_1").await;
    println!("{claims} claims");
    assert!(claims < 200, "{claims} claims");
    stop.cancel();
    running.await.unwrap();
}

/// A group for which there is little: it looks among many ids at once.
#[tokio::test(flavor = "multi_thread")]
async fn an_ordered_group_with_sparse_bindings_claims_many_ids_at_once() {
    let (client, db) = client().await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    let numbers: Vec<u64> = (0..100_000).collect();
    for chunk in numbers.chunks(5_000) {
        let routing = |n: &u64| if n.is_multiple_of(10_000) { "few" } else { "many" };
        let all =
            chunk.iter().map(|n| Outgoing::new(n).key(format!("k{n}")).routing_key(routing(n)));
        stream.producer().send_all(all).await.unwrap();
    }
    let consumer = stream.group("g").ordered().bind("few").consumer().until_caught_up();
    let handled = consumer.run(async |_: Delivery<u64>| {}).await.unwrap().handled;
    assert_eq!(handled, 10);
    let claims = count(&db, "SELECT max(next_seq) FROM sqlstreams.consumer_group_cursor_1").await;
    println!("{claims} claims");
    assert!(claims < 60, "{claims} claims");
}
