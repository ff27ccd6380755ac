//! What a handler is told of its message, and what it can do about its time.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use sqlstreams::{CancellationToken, Client, Context, Delivery, Outcome, RetryPolicy};
use sqlstreams_dev::Cluster;

use crate::support::{client, connect, count, eventually, numbers};

fn at_once(attempts: u32) -> RetryPolicy {
    RetryPolicy::attempts(attempts).backoff(Duration::ZERO, 1.0, Duration::ZERO)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_context_tells_what_happened_before() {
    let (client, _db) = client().await;
    let stream = numbers(&client, "orders", 1).await;
    let seen: Arc<Mutex<Vec<Context>>> = Arc::default();
    let log = seen.clone();
    let before = SystemTime::now() - Duration::from_secs(60);
    let consumer = stream.group("receipts").retry(at_once(5)).consumer().until_caught_up();
    let consumed = consumer
        .run(move |message: Delivery<u64>| {
            let mut log = log.lock().unwrap();
            log.push(message.context.clone());
            let outcome = match log.len() {
                1 => Outcome::Delay(Duration::ZERO),
                2 => Outcome::Retry("a".into()),
                3 => Outcome::Delay(Duration::from_millis(1)),
                4 => Outcome::RetryAfter("b".into(), Duration::ZERO),
                _ => Outcome::Done,
            };
            async move { outcome }
        })
        .await
        .unwrap();
    assert_eq!((consumed.handled, consumed.failed, consumed.delayed), (1, 2, 2));
    let seen = seen.lock().unwrap();
    let counts: Vec<_> = seen.iter().map(|c| (c.attempt(), c.delays())).collect();
    assert_eq!(counts, [(1, 0), (1, 1), (2, 1), (2, 2), (3, 2)]);
    assert_eq!(seen[0].first_failed_at(), None);
    let first = seen[1].first_failed_at().unwrap();
    assert!(first > before && first < SystemTime::now() + Duration::from_secs(60));
    for context in &*seen {
        assert_eq!((context.stream(), context.group()), ("orders", "receipts"));
        assert_eq!(context.deadline(), None);
        assert!(!context.cancellation().is_cancelled());
        assert!(context.first_failed_at().is_none_or(|at| at == first));
    }
}

/// A handler has its timeout, what it gives itself counts from then on, and less is possible too.
#[tokio::test(flavor = "multi_thread")]
async fn a_deadline_can_be_moved() {
    let (client, _db) = client().await;
    let stream = numbers(&client, "s", 4).await;
    let consumer = stream.group("g").retry(at_once(1)).consumer().concurrency(4);
    let begun = Instant::now();
    let consumed = consumer
        .timeout(Duration::from_millis(400))
        .until_caught_up()
        .run(move |message: Delivery<u64>| async move {
            let context = message.context.clone();
            let left = context.deadline().unwrap().saturating_duration_since(Instant::now());
            assert!(left <= Duration::from_millis(400) && left > Duration::ZERO);
            match message.payload {
                // In time.
                0 => {}
                // Too late by itself.
                1 => std::future::pending().await,
                // Given more, twice.
                2 => {
                    for _ in 0..2 {
                        context.extend(Duration::from_secs(20));
                        tokio::time::sleep(Duration::from_millis(500)).await;
                    }
                    context.extend(Duration::MAX);
                    assert!(
                        context.deadline().unwrap() > Instant::now() + Duration::from_secs(3600)
                    );
                }
                // Given less.
                _ => {
                    context.extend(Duration::from_millis(10));
                    std::future::pending().await
                }
            }
        })
        .await
        .unwrap();
    assert_eq!((consumed.handled, consumed.failed), (2, 2));
    assert!(begun.elapsed() >= Duration::from_secs(1));
}

/// Without a timeout a handler may run for many times its lease, and what it may not lose it keeps.
#[tokio::test(flavor = "multi_thread")]
async fn a_handler_may_run_longer_than_its_lease() {
    let (client, db) = client().await;
    let stream = numbers(&client, "s", 3).await;
    let group = stream.group("g").lease(Duration::from_secs(1)).consumer();
    let consumed = group
        .until_caught_up()
        .run(async |message: Delivery<u64>| {
            match message.payload {
                0 => tokio::time::sleep(Duration::from_millis(2_500)).await,
                1 => std::thread::sleep(Duration::from_millis(2_500)),
                _ => {}
            }
            assert!(!message.context.cancellation().is_cancelled());
        })
        .await
        .unwrap();
    assert_eq!((consumed.handled, consumed.failed), (3, 0));
    assert_eq!(count(&db, "SELECT count(*) FROM sqlstreams.exception_queue_1").await, 0);
}

/// When its lease is lost a handler is told, and dropped; what it has to say after that is not recorded.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_lease_cancels_its_handler() {
    let (client, db) = client().await;
    let stream = numbers(&client, "s", 1).await;
    let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
    let stop = CancellationToken::new();
    let consumer = stream.group("g").lease(Duration::from_secs(2)).consumer();
    let running =
        tokio::spawn(consumer.stop_on(stop.clone()).run(move |message: Delivery<u64>| {
            let _ = tell.send(message.context.clone());
            let first = message.attempt() == 1;
            async move {
                // What it has spawned goes by the context.
                let context = message.context.clone();
                tokio::spawn(async move { context.cancellation().cancelled().await });
                if first {
                    message.context.cancellation().cancelled().await;
                    return Err("too late");
                }
                Ok(())
            }
        }));
    let first: Context = told.recv().await.unwrap();
    assert!(!first.cancellation().is_cancelled());
    // Somebody else handles it: the row goes as if it were settled there.
    let taken = "DELETE FROM sqlstreams.consumer_lease_1";
    assert_eq!(db.execute(taken, &[]).await.unwrap(), 1);
    let wait = tokio::time::timeout(Duration::from_secs(10), first.cancellation().cancelled());
    wait.await.expect("the handler is not cancelled");
    stop.cancel();
    let consumed = running.await.unwrap().unwrap();
    assert_eq!((consumed.handled, consumed.failed), (0, 0));
    assert_eq!(count(&db, "SELECT count(*) FROM sqlstreams.exception_queue_1").await, 0);
    assert!(told.try_recv().is_err(), "it was handled again");
}

/// Durations that no calendar holds, from handlers of the Rust API.
#[tokio::test(flavor = "multi_thread")]
async fn tb_085_impossible_delays_of_handlers_are_brought_within_reach() {
    let (client, db) = client().await;
    let stream = numbers(&client, "s", 8).await;
    let policy = RetryPolicy::attempts(u32::MAX >> 1).backoff(
        Duration::from_secs(365 * 86_400),
        1000.0,
        Duration::from_secs(365 * 86_400),
    );
    let stop = CancellationToken::new();
    let consumer = stream.group("g").retry(policy).consumer().stop_on(stop.clone());
    let health = consumer.health();
    let running =
        tokio::spawn(consumer.run(async |message: Delivery<u64>| match message.payload {
            0 => Outcome::Delay(Duration::MAX),
            1 => Outcome::Delay(Duration::from_secs(1_000_000_000_000)),
            2 => Outcome::RetryAfter("a".into(), Duration::MAX),
            3 => Outcome::RetryAfter("b".into(), Duration::from_secs(u64::MAX)),
            4 if message.context.delays() == 0 => Outcome::Delay(Duration::from_nanos(1)),
            5 if message.attempt() == 1 => Outcome::RetryAfter("c".into(), Duration::ZERO),
            6 => Outcome::Retry("d".into()),
            _ => Outcome::Done,
        }));
    eventually(async || health.snapshot().consumed.handled == 3).await;
    let waiting = "SELECT count(*) FROM sqlstreams.exception_queue_1 WHERE state = 'ready'";
    eventually(async || count(&db, waiting).await == 5).await;
    stop.cancel();
    running.await.unwrap().unwrap();
    let far = "SELECT count(*) FROM sqlstreams.exception_queue_1 WHERE isfinite(due_at)
               AND due_at BETWEEN first_failed_at AND clock_timestamp() + interval '3651 days'";
    assert_eq!(count(&db, far).await, 5);
    let ten_years = "SELECT count(*) FROM sqlstreams.exception_queue_1 WHERE due_at > clock_timestamp() + interval '3640 days'";
    assert_eq!(count(&db, ten_years).await, 4);
}

/// Attempts are rows, not memory: the consumer and the database are restarted between failures, and the message dies after
/// exactly as many as it has. TB-088: after that, more restarts bring nothing back.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn tb_086_tb_088_attempts_are_counted_over_restarts() {
    const ATTEMPTS: u32 = 4;
    let start = || Arc::new(Cluster::builder().durable(true).start().unwrap());
    let cluster = tokio::task::spawn_blocking(start).await.unwrap();
    let url = cluster.url("postgres");
    let client = Client::connect(&url).await.unwrap();
    numbers(&client, "s", 1).await;
    drop(client);
    let seen: Arc<Mutex<Vec<u32>>> = Arc::default();
    for round in 1..=ATTEMPTS + 2 {
        let client = Client::connect(&url).await.unwrap();
        let stream = client.stream::<u64>("s").open().await.unwrap();
        let (log, stop) = (seen.clone(), CancellationToken::new());
        let group = stream.group("g").retry(at_once(ATTEMPTS)).create_if_missing().await.unwrap();
        // One attempt a life: it stops when it has failed.
        let consumer = group.consumer().stop_on(stop.clone());
        let failing = stop.clone();
        let running = tokio::spawn(consumer.run(move |message: Delivery<u64>| {
            log.lock().unwrap().push(message.attempt());
            failing.cancel();
            async { Err::<(), _>("always") }
        }));
        if round > ATTEMPTS {
            tokio::time::sleep(Duration::from_millis(500)).await;
            stop.cancel();
        }
        running.await.unwrap().unwrap();
        // What it has reported commits without waiting for the disk: without this the crash may take it back.
        let db = connect(&url).await;
        db.batch_execute("CHECKPOINT").await.unwrap();
        let restarting = cluster.clone();
        let restart = move || {
            restarting.kill().unwrap();
            restarting.start_again().unwrap();
        };
        tokio::task::spawn_blocking(restart).await.unwrap();
        let made = round.min(ATTEMPTS);
        assert_eq!(*seen.lock().unwrap(), (1..=made).collect::<Vec<_>>());
    }
    let db = connect(&url).await;
    let row = db.query_one("SELECT state, attempts FROM sqlstreams.exception_queue_1", &[]).await;
    let row = row.unwrap();
    assert_eq!((row.get::<_, &str>(0), row.get::<_, i32>(1)), ("dead", ATTEMPTS as i32));
}
