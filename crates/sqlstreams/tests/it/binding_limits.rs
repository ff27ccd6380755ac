//! Limits of a group with bindings: messages are counted, not ids.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use sqlstreams::{Client, Delivery, Outcome, RetryPolicy};
use tokio::time::sleep;

use crate::routing::routed;
use crate::support::{connect, count, database};

/// How many messages leases hold that run: in a group with a limit, each id is one.
const LEASED: &str = "SELECT coalesce((SELECT sum(upper(r) - lower(r)) FROM sqlstreams.consumer_lease_1, unnest(pending) AS r
                                       WHERE expires_at > clock_timestamp()), 0)::bigint
     + (SELECT count(*) FROM sqlstreams.exception_queue_1 WHERE state = 'inflight' AND lease_expires_at > clock_timestamp())";

/// Runs consumers of group `g` whose handlers take `time` each, until all is handled; returns how many handlers ran at most
/// and what the tables said at most. The first handlers go on when `together` of them run, however slow the machine is.
async fn gauge(
    url: &str,
    consumers: usize,
    together: usize,
    time: Duration,
) -> (usize, usize, i64) {
    let (now, most, handled) = (
        Arc::new(AtomicUsize::new(0)),
        Arc::new(AtomicUsize::new(0)),
        Arc::new(AtomicUsize::new(0)),
    );
    let mut running = Vec::new();
    for _ in 0..consumers {
        let client = Client::connect(url).await.unwrap();
        let stream = client.stream::<u64>("s").open().await.unwrap();
        let (now, most, handled) = (now.clone(), most.clone(), handled.clone());
        let consumer = stream.group("g").consumer().concurrency(4).until_caught_up();
        running.push(tokio::spawn(consumer.run(move |message: Delivery<u64>| {
            most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            let (now, most, handled) = (now.clone(), most.clone(), handled.clone());
            async move {
                let begun = Instant::now();
                while most.load(Ordering::SeqCst) < together
                    && begun.elapsed() < Duration::from_secs(20)
                {
                    sleep(Duration::from_millis(1)).await;
                }
                sleep(time).await;
                now.fetch_sub(1, Ordering::SeqCst);
                if message.payload.is_multiple_of(3) && message.attempt() == 1 {
                    return Outcome::Retry("once".into());
                }
                handled.fetch_add(1, Ordering::SeqCst);
                Outcome::Done
            }
        })));
    }
    let db = connect(url).await;
    let mut leased = 0;
    while !running.iter().all(tokio::task::JoinHandle::is_finished) {
        leased = leased.max(count(&db, LEASED).await);
        sleep(Duration::from_millis(2)).await;
    }
    for consumer in running {
        consumer.await.unwrap().unwrap();
    }
    (handled.load(Ordering::SeqCst), most.load(Ordering::SeqCst), leased)
}

/// The limit is exact: so many messages, not ids, and all of it is used.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn max_in_flight_counts_messages_that_are_for_the_group() {
    for (each, limit) in [(0, 6), (1, 6), (7, 6), (500, 3)] {
        let url = database().await;
        let client = Client::connect(&url).await.unwrap();
        let messages = 150 * each.max(1);
        let stream = routed(&client, "s", 0..messages, each.max(1)).await;
        let policy = RetryPolicy::attempts(3).backoff(Duration::ZERO, 1.0, Duration::ZERO);
        let mut group = stream.group("g").retry(policy).max_in_flight(limit);
        if each > 0 {
            group = group.bind("rare.*");
        }
        group.create().await.unwrap();
        let (handled, most, leased) =
            gauge(&url, 3, limit as usize, Duration::from_millis(20)).await;
        assert_eq!((handled, most, leased), (150, limit as usize, i64::from(limit)), "1 in {each}");
    }
}

/// A limit that is set while a wide range is held does not leave the others without work until that is done.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_limit_that_comes_later_counts_messages_as_well() {
    let url = database().await;
    let client = Client::connect(&url).await.unwrap();
    let stream = routed(&client, "s", 0..30_000, 100).await;
    let group = stream.group("g").bind("rare.*").create().await.unwrap();
    // A process that died holds all of it, in one lease that has not run out.
    let db = connect(&url).await;
    let claim = format!(
        "SELECT sqlstreams.advance({}, {}, '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', 100, p_width => 30000)",
        stream.id(),
        group.id()
    );
    db.batch_execute(&claim).await.unwrap();
    stream.group("g").max_in_flight(4).open().await.unwrap();
    db.batch_execute("UPDATE sqlstreams.consumer_lease_1 SET expires_at = clock_timestamp() + interval '500 milliseconds'").await.unwrap();
    sleep(Duration::from_millis(600)).await;
    let (handled, most, leased) = gauge(&url, 2, 4, Duration::from_millis(5)).await;
    assert_eq!((handled, most, leased), (300, 4, 4));
    // By ids instead of messages it would be 7,500 claims of 4 ids.
    let claims = count(&db, "SELECT max(next_seq) FROM sqlstreams.consumer_group_cursor_1").await;
    assert!(claims < 900, "{claims} claims");
}

/// Sparse matches are found at the speed of ranges, and still only so many a second are handed out.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn rate_limit_counts_messages_that_are_for_the_group() {
    const RATE: f64 = 200.0;
    let url = database().await;
    let client = Client::connect(&url).await.unwrap();
    let stream = routed(&client, "s", 0..40_000, 100).await;
    stream.group("g").rate_limit(RATE).bind("rare.*").create().await.unwrap();
    let begun = Instant::now();
    let (handled, _, _) = gauge(&url, 2, 0, Duration::ZERO).await;
    let elapsed = begun.elapsed().as_secs_f64();
    // 400 and their retries: a third fails once.
    let started = 400.0 + 400.0 / 3.0;
    println!("{handled} in {elapsed:.2} s");
    assert_eq!(handled, 400);
    assert!(elapsed >= (started - RATE / 10.0) / RATE * 0.95, "{elapsed}");
}
