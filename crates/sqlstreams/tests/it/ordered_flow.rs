//! Limits of ordered groups, over all their consumers.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use sqlstreams::{CancellationToken, Client, Delivery, Outgoing, RetryPolicy, Stream};
use tokio::time::sleep;

use crate::support::{client_at, connect, count, database, eventually, until};

/// Messages in turn of so many keys.
async fn send(stream: &Stream<u64>, messages: u64, keys: u64) {
    let numbers: Vec<u64> = (0..messages).collect();
    let all = numbers.iter().map(|n| Outgoing::new(n).key(format!("k{}", n % keys)));
    stream.producer().send_all(all).await.unwrap();
}

/// What the tables say is handed out.
const HANDED_OUT: &str = "SELECT coalesce(sum(sqlstreams.id_count(pending) + (SELECT count(*) FROM sqlstreams.exception_queue_1 AS e WHERE e.lease_id = l.token)), 0)::bigint
    FROM sqlstreams.consumer_lease_1 AS l WHERE expires_at > clock_timestamp()";

/// Over consumers of which some go without a word, with retries.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn max_in_flight_is_kept_in_an_ordered_group() {
    const MOST: usize = 6;
    const MESSAGES: u64 = 2_000;
    let url = database().await;
    let (client, db) = client_at(&url).await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    let pause = Duration::from_millis(10);
    let policy = RetryPolicy::attempts(3).backoff(pause, 1.0, pause);
    let group = stream.group("g").ordered().lease(Duration::from_secs(1)).retry(policy);
    group.max_in_flight(MOST as u32).create().await.unwrap();
    send(&stream, MESSAGES, 100).await;

    let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let latest: Arc<Mutex<HashMap<String, i64>>> = Arc::default();
    let stop = CancellationToken::new();
    let start = async |consumers: &mut Vec<_>| {
        let client = Client::connect(&url).await.unwrap();
        let stream = client.stream::<u64>("s").open().await.unwrap();
        let (now, most, latest) = (now.clone(), most.clone(), latest.clone());
        let consumer = stream.group("g").consumer().concurrency(4).stop_on(stop.clone());
        consumers.push(tokio::spawn(consumer.run(move |message: Delivery<u64>| {
            let (now, most, latest) = (now.clone(), most.clone(), latest.clone());
            async move {
                struct Running(Arc<AtomicUsize>);
                impl Drop for Running {
                    fn drop(&mut self) {
                        self.0.fetch_sub(1, Ordering::SeqCst);
                    }
                }
                most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                let running = Running(now.clone());
                sleep(Duration::from_millis(1 + message.payload % 5)).await;
                drop(running);
                if message.payload % 20 == 3 && message.attempt() == 1 {
                    return Err("once");
                }
                let key = message.key.clone().unwrap();
                let mut latest = latest.lock().unwrap();
                let before = latest.entry(key).or_default();
                // Of one that was dropped the last one may come again.
                assert!(*before <= message.id, "{} after {before}", message.id);
                *before = message.id;
                Ok(())
            }
        })));
    };
    let mut consumers = Vec::new();
    for _ in 0..3 {
        start(&mut consumers).await;
    }
    let seen = Arc::new(AtomicUsize::new(0));
    let (auditing, audited) = (connect(&url).await, seen.clone());
    let auditor = tokio::spawn(async move {
        loop {
            audited.fetch_max(count(&auditing, HANDED_OUT).await as usize, Ordering::SeqCst);
            sleep(Duration::from_millis(2)).await;
        }
    });
    let resolved = async |id: u64| {
        count(&db, &format!("SELECT sqlstreams.is_resolved(1, 1, {id})::int::bigint")).await == 1
    };
    until("some are handled", Duration::from_secs(60), async || resolved(200).await).await;
    consumers.swap_remove(0).abort();
    start(&mut consumers).await;
    until("all are handled", Duration::from_secs(120), async || resolved(MESSAGES).await).await;
    auditor.abort();
    stop.cancel();
    for consumer in consumers {
        consumer.await.unwrap().unwrap();
    }
    // As many as that at times, unless the machine is busy.
    for at_most in [most.load(Ordering::SeqCst), seen.load(Ordering::SeqCst)] {
        assert!((MOST / 2..=MOST).contains(&at_most), "{at_most}");
    }
    assert_eq!(count(&db, "SELECT count(*) FROM sqlstreams.exception_queue_1").await, 0);
}

/// A key with many messages takes one place of them.
#[tokio::test(flavor = "multi_thread")]
async fn a_hot_key_does_not_use_a_limit_up() {
    let url = database().await;
    let (client, _) = client_at(&url).await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    let group = stream.group("g").ordered().max_in_flight(3).create().await.unwrap();
    send(&stream, 100, 1).await;
    let others: Vec<u64> = (0..200).collect();
    let all = others.iter().map(|n| Outgoing::new(n).key(format!("other {n}")));
    stream.producer().send_all(all).await.unwrap();
    let db = connect(&url).await;
    // Others of its lane wait with it.
    let elsewhere = "SELECT count(*) FROM sqlstreams.message_log_1 WHERE sqlstreams.lane_of(key, id) <> sqlstreams.lane_of('k0', 0)";
    let elsewhere = count(&db, elsewhere).await as usize;
    let (opened, stop) = (CancellationToken::new(), CancellationToken::new());
    let handled = Arc::new(AtomicUsize::new(0));
    let (waits, counted) = (opened.clone(), handled.clone());
    let consumer = group.consumer().concurrency(8).stop_on(stop.clone());
    let running = tokio::spawn(consumer.run(move |message: Delivery<u64>| {
        let (waits, counted) = (waits.clone(), counted.clone());
        async move {
            if message.key.as_deref() == Some("k0") {
                waits.cancelled().await;
            } else {
                counted.fetch_add(1, Ordering::SeqCst);
            }
        }
    }));
    eventually(async || handled.load(Ordering::SeqCst) == elsewhere).await;
    opened.cancel();
    until("all are handled", Duration::from_secs(60), async || {
        count(&db, "SELECT sqlstreams.is_resolved(1, 1, 300)::int::bigint").await == 1
    })
    .await;
    stop.cancel();
    assert_eq!(running.await.unwrap().unwrap().handled, 300);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn rate_limit_is_kept_in_an_ordered_group() {
    const RATE: f64 = 100.0;
    let url = database().await;
    let (client, _) = client_at(&url).await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    let policy = RetryPolicy::attempts(100).backoff(Duration::ZERO, 1.0, Duration::ZERO);
    stream.group("g").ordered().retry(policy).rate_limit(RATE).create().await.unwrap();
    send(&stream, 5_000, 500).await;
    let starts: Arc<Mutex<Vec<Instant>>> = Arc::default();
    let begun = Instant::now();
    let mut running = Vec::new();
    let stop = CancellationToken::new();
    for _ in 0..2 {
        let client = Client::connect(&url).await.unwrap();
        let stream = client.stream::<u64>("s").open().await.unwrap();
        let log = starts.clone();
        let consumer = stream.group("g").consumer().concurrency(4).stop_on(stop.clone());
        running.push(tokio::spawn(consumer.run(move |message: Delivery<u64>| {
            log.lock().unwrap().push(Instant::now());
            let fails = message.payload.is_multiple_of(4);
            std::future::ready(if fails { Err("no") } else { Ok(()) })
        })));
    }
    until("they go on", Duration::from_secs(60), async || starts.lock().unwrap().len() > 200).await;
    stop.cancel();
    for consumer in running {
        consumer.await.unwrap().unwrap();
    }
    let elapsed = begun.elapsed().as_secs_f64();
    let started = starts.lock().unwrap().len() as f64;
    println!("{started} in {elapsed:.2} s");
    assert!(started <= RATE * elapsed + RATE / 10.0, "{started} in {elapsed} s");
}
