//! Flow control: limits over all consumers of a group, pausing, and a budget over several groups.

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sqlstreams::{
    Activity, Budget, CancellationToken, Client, Consumed, Delivery, ErrorKind, Group, RetryPolicy,
};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use crate::support::{client, connect, count, database, eventually, numbers};

/// How many handlers run, and how many did at most.
#[derive(Debug, Default)]
struct Gauge {
    now: AtomicUsize,
    most: AtomicUsize,
}

/// One that runs.
struct Running(Arc<Gauge>);

impl Gauge {
    fn enter(self: &Arc<Self>) -> Running {
        let now = self.now.fetch_add(1, Ordering::SeqCst) + 1;
        self.most.fetch_max(now, Ordering::SeqCst);
        Running(self.clone())
    }

    /// The most since the last call.
    fn most(&self) -> usize {
        self.most.swap(self.now.load(Ordering::SeqCst), Ordering::SeqCst)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.now.fetch_sub(1, Ordering::SeqCst);
    }
}

/// What the tables say: messages under a lease that runs.
const LEASED: &str = "SELECT coalesce((SELECT sum(upper(r) - lower(r)) FROM sqlstreams.consumer_lease_1, unnest(pending) AS r
                                       WHERE expires_at > clock_timestamp()), 0)::bigint
     + (SELECT count(*) FROM sqlstreams.exception_queue_1 WHERE state = 'inflight' AND lease_expires_at > clock_timestamp())";

/// Looks at the tables all the time, until dropped.
struct Auditor {
    most: Arc<AtomicI64>,
    task: JoinHandle<()>,
}

impl Auditor {
    async fn start(url: &str) -> Self {
        let (db, most) = (connect(url).await, Arc::new(AtomicI64::new(0)));
        let seen = most.clone();
        let task = tokio::spawn(async move {
            loop {
                seen.fetch_max(count(&db, LEASED).await, Ordering::SeqCst);
                sleep(Duration::from_millis(2)).await;
            }
        });
        Self { most, task }
    }
}

impl Drop for Auditor {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The settings of the group as a later call of the API gives them.
async fn alter(client: &Client, max_in_flight: u32) {
    let stream = client.stream::<u64>("s").open().await.unwrap();
    stream.group("g").max_in_flight(max_in_flight).open().await.unwrap();
}

/// Over consumers of several clients, some of which go without a word, with retries; changed and lifted while they run.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn max_in_flight_is_kept_over_all_consumers() {
    let url = database().await;
    let client = Client::connect(&url).await.unwrap();
    let stream = numbers(&client, "s", 100_000).await;
    let policy = RetryPolicy::attempts(3).backoff(Duration::ZERO, 1.0, Duration::ZERO);
    let lease = Duration::from_secs(1);
    stream.group("g").lease(lease).retry(policy).max_in_flight(6).create().await.unwrap();

    let gauge = Arc::new(Gauge::default());
    let (handled, retried) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let stop = CancellationToken::new();
    let start = async |consumers: &mut Vec<_>| {
        let client = Client::connect(&url).await.unwrap();
        let stream = client.stream::<u64>("s").open().await.unwrap();
        let (gauge, handled, retried) = (gauge.clone(), handled.clone(), retried.clone());
        let consumer = stream.group("g").consumer().concurrency(4).stop_on(stop.clone());
        let handler = move |message: Delivery<u64>| {
            let (running, handled) = (gauge.enter(), handled.clone());
            retried.fetch_add(usize::from(message.attempt() > 1), Ordering::SeqCst);
            async move {
                sleep(Duration::from_millis(5 + message.payload % 10)).await;
                drop(running);
                handled.fetch_add(1, Ordering::SeqCst);
                match message.payload % 10 == 3 && message.attempt() == 1 {
                    true => Err("once"),
                    false => Ok(()),
                }
            }
        };
        consumers.push(tokio::spawn(consumer.run(handler)));
    };
    let mut consumers = Vec::new();
    for _ in 0..3 {
        start(&mut consumers).await;
    }
    let auditor = Auditor::start(&url).await;
    // Two of three would do; each takes what it can run, so all of them have something.
    eventually(async || handled.load(Ordering::SeqCst) > 300).await;
    assert_eq!(gauge.most(), 6);
    // What failed does not wait for the end of the backlog.
    assert!(retried.load(Ordering::SeqCst) > 0);
    // Two go without a word. What they had is free again when its lease ran out, at the latest.
    for consumer in consumers.drain(..2) {
        consumer.abort();
    }
    eventually(async || gauge.most() == 4).await;
    start(&mut consumers).await;
    eventually(async || gauge.most() == 6).await;
    assert_eq!(auditor.most.load(Ordering::SeqCst), 6);
    drop(auditor);

    alter(&client, 2).await;
    let db = connect(&url).await;
    eventually(async || count(&db, LEASED).await <= 2).await;
    gauge.most();
    let auditor = Auditor::start(&url).await;
    let before = handled.load(Ordering::SeqCst);
    eventually(async || handled.load(Ordering::SeqCst) > before + 50).await;
    assert_eq!((gauge.most(), auditor.most.load(Ordering::SeqCst)), (2, 2));
    drop(auditor);

    alter(&client, 0).await;
    eventually(async || gauge.most() == 8).await;
    stop.cancel();
    for consumer in consumers {
        consumer.await.unwrap().unwrap();
    }
}

/// A limit costs no waiting: a slot that is free is taken at once, by the same consumer or by another.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn slots_of_a_limited_group_are_used() {
    let (client, db) = client().await;
    let stream = numbers(&client, "s", 200).await;
    let mut took = Vec::new();
    // The limit is the group's, or the consumer's own.
    for (name, group, concurrency) in
        [("g", stream.group("g").max_in_flight(4), 16), ("h", stream.group("h"), 4)]
    {
        let consumer = group.consumer().concurrency(concurrency).until_caught_up();
        let begun = Instant::now();
        let consumed =
            consumer.run(async |_: Delivery<u64>| sleep(Duration::from_millis(20)).await).await;
        assert_eq!(consumed.unwrap().handled, 200, "{name}");
        took.push(begun.elapsed());
    }
    // Looking for work once per 100 ms would take five times as long.
    assert!(took[0] < took[1] * 4, "{took:?}");
    assert_eq!(count(&db, LEASED).await, 0);
}

/// Messages per second, over several consumers which are stopped and started, retries included.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn rate_limit_is_kept_over_consumers_and_restarts() {
    const RATE: f64 = 100.0;
    let url = database().await;
    let client = Client::connect(&url).await.unwrap();
    let stream = numbers(&client, "s", 10_000).await;
    let policy = RetryPolicy::attempts(100).backoff(Duration::ZERO, 1.0, Duration::ZERO);
    stream.group("g").retry(policy).rate_limit(RATE).create().await.unwrap();
    let starts: Arc<Mutex<Vec<Instant>>> = Arc::default();
    let run = async |client: Client, life: Duration| {
        let (log, stop) = (starts.clone(), CancellationToken::new());
        let stream = client.stream::<u64>("s").open().await.unwrap();
        let consumer = stream.group("g").consumer().concurrency(4).stop_on(stop.clone());
        let running = tokio::spawn(consumer.run(move |message: Delivery<u64>| {
            log.lock().unwrap().push(Instant::now());
            async move { if message.payload.is_multiple_of(4) { Err("no") } else { Ok(()) } }
        }));
        sleep(life).await;
        stop.cancel();
        running.await.unwrap().unwrap()
    };
    let begun = Instant::now();
    let other = Client::connect(&url).await.unwrap();
    tokio::join!(
        async {
            for _ in 0..6 {
                run(client.clone(), Duration::from_millis(500)).await;
            }
        },
        async {
            for _ in 0..2 {
                run(other.clone(), Duration::from_millis(1_500)).await;
            }
        }
    );
    let elapsed = begun.elapsed().as_secs_f64();
    let starts = starts.lock().unwrap();
    let burst = RATE / 10.0;
    println!("{} in {elapsed:.2} s", starts.len());
    assert!(starts.len() as f64 <= RATE * elapsed + burst, "{} in {elapsed} s", starts.len());
    // Most of it is used, but for consumers that start late on a busy machine.
    assert!(starts.len() as f64 >= RATE * elapsed * 0.1, "{} in {elapsed} s", starts.len());
    // In no window more than its share and the burst, but for how late a handler may start on a busy machine.
    for (from, first) in starts.iter().enumerate() {
        for (upto, last) in starts.iter().enumerate().skip(from) {
            let window = last.duration_since(*first).as_secs_f64() + 0.3;
            let started = (upto - from + 1) as f64;
            assert!(started <= RATE * window + burst, "{started} in {window} s");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_that_make_no_sense_are_refused() {
    let (client, _db) = client().await;
    let stream = numbers(&client, "s", 3).await;
    for rate in [-1.0, f64::NAN, f64::INFINITY, 1e-300, 2e9] {
        let error = stream.group("g").rate_limit(rate).create().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{rate}: {error}");
    }
    let error = stream.group("g").max_in_flight(u32::MAX).create().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    // The extremes work.
    for (name, rate) in [("slowest", 1e-6), ("fastest", 1e9)] {
        let group = stream.group(name).rate_limit(rate).max_in_flight(i32::MAX as u32);
        let handled = Arc::new(AtomicUsize::new(0));
        let (log, stop) = (handled.clone(), CancellationToken::new());
        let consumer = group.consumer().stop_on(stop.clone());
        let running = tokio::spawn(consumer.run(move |_: Delivery<u64>| {
            log.fetch_add(1, Ordering::SeqCst);
            async {}
        }));
        let expected = if rate < 1.0 { 1 } else { 3 };
        eventually(async || handled.load(Ordering::SeqCst) == expected).await;
        sleep(Duration::from_millis(200)).await;
        stop.cancel();
        running.await.unwrap().unwrap();
        assert_eq!(handled.load(Ordering::SeqCst), expected, "{name}");
    }
}

/// Starts a consumer whose handlers take a while, and count themselves.
fn slow_consumer(
    group: &Group<u64>,
    gauge: &Arc<Gauge>,
    started: &Arc<AtomicUsize>,
) -> (CancellationToken, sqlstreams::Health, JoinHandle<sqlstreams::Result<Consumed>>) {
    let (gauge, started, stop) = (gauge.clone(), started.clone(), CancellationToken::new());
    let consumer = group.consumer().concurrency(2).stop_on(stop.clone());
    let health = consumer.health();
    let running = tokio::spawn(consumer.run(move |_: Delivery<u64>| {
        started.fetch_add(1, Ordering::SeqCst);
        let running = gauge.enter();
        async move {
            sleep(Duration::from_millis(20)).await;
            drop(running);
        }
    }));
    (stop, health, running)
}

/// Running handlers finish and nothing new starts, over restarts, until the group is resumed. A consumer that stops hands back
/// what it holds, and starts none of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_paused_group_starts_nothing_until_it_is_resumed() {
    let url = database().await;
    let client = Client::connect(&url).await.unwrap();
    let stream = numbers(&client, "s", 400).await;
    let group = stream.group("g").lease(Duration::from_secs(2)).create().await.unwrap();
    let (gauge, started) = (Arc::new(Gauge::default()), Arc::new(AtomicUsize::new(0)));
    let mut consumers: Vec<_> = (0..2).map(|_| slow_consumer(&group, &gauge, &started)).collect();
    eventually(async || started.load(Ordering::SeqCst) > 20).await;

    group.pause().await.unwrap();
    group.pause().await.unwrap();
    let now_paused = async |health: &sqlstreams::Health| {
        eventually(async || health.snapshot().activity == Activity::Paused).await;
        eventually(async || gauge.now.load(Ordering::SeqCst) == 0).await;
    };
    for (_, health, _) in &consumers {
        now_paused(health).await;
    }
    let at_pause = started.load(Ordering::SeqCst);
    assert!(at_pause < 300, "{at_pause}");
    // Longer than a lease lasts.
    sleep(Duration::from_millis(2_500)).await;
    assert_eq!(started.load(Ordering::SeqCst), at_pause, "something was started");

    // Stopped while paused: nothing starts, and what was held is free.
    let db = connect(&url).await;
    for (stop, _, running) in consumers.drain(..) {
        stop.cancel();
        running.await.unwrap().unwrap();
    }
    assert_eq!(started.load(Ordering::SeqCst), at_pause, "something was started");
    assert_eq!(count(&db, LEASED).await, 0);

    // Others find it paused, and go on at once when it is not any more.
    let other = Client::connect(&url).await.unwrap();
    let again = other.stream::<u64>("s").open().await.unwrap().group("g").open().await.unwrap();
    let (stop, health, running) = slow_consumer(&again, &gauge, &started);
    now_paused(&health).await;
    sleep(Duration::from_millis(300)).await;
    assert_eq!(started.load(Ordering::SeqCst), at_pause, "something was started");
    assert_eq!(count(&db, LEASED).await, 0);
    group.resume().await.unwrap();
    group.resume().await.unwrap();
    let resolved = "SELECT sqlstreams.is_resolved(1, 1, 400)::int::bigint";
    eventually(async || count(&db, resolved).await == 1).await;
    stop.cancel();
    running.await.unwrap().unwrap();
    assert_eq!(started.load(Ordering::SeqCst), 400, "some were done twice");
    let audited =
        "SELECT count(*) FROM sqlstreams.audit WHERE action IN ('pause_group', 'resume_group')";
    assert_eq!(count(&db, audited).await, 2);
}

/// Retries wait as well while a group is paused.
#[tokio::test(flavor = "multi_thread")]
async fn a_paused_group_tries_nothing_again() {
    let (client, db) = client().await;
    let stream = numbers(&client, "s", 5).await;
    let policy = RetryPolicy::attempts(100).backoff(Duration::ZERO, 1.0, Duration::ZERO);
    let group = stream.group("g").retry(policy).create().await.unwrap();
    let (fails, calls) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicUsize::new(0)));
    let (failing, counted) = (fails.clone(), calls.clone());
    let consumer = group.consumer().until_caught_up();
    let health = consumer.health();
    let running = tokio::spawn(consumer.run(move |_: Delivery<u64>| {
        counted.fetch_add(1, Ordering::SeqCst);
        let fails = failing.load(Ordering::SeqCst);
        async move { if fails { Err("not yet") } else { Ok(()) } }
    }));
    eventually(async || calls.load(Ordering::SeqCst) > 10).await;
    group.pause().await.unwrap();
    eventually(async || health.snapshot().activity == Activity::Paused).await;
    eventually(async || health.snapshot().in_flight == 0).await;
    let at_pause = calls.load(Ordering::SeqCst);
    sleep(Duration::from_millis(500)).await;
    assert_eq!(calls.load(Ordering::SeqCst), at_pause);
    fails.store(false, Ordering::SeqCst);
    group.resume().await.unwrap();
    assert_eq!(running.await.unwrap().unwrap().handled, 5);
    assert_eq!(count(&db, "SELECT count(*) FROM sqlstreams.exception_queue_1").await, 0);
}

/// Groups of several streams, through several clients, with one budget.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_budget_is_shared() {
    let url = database().await;
    let budget = Budget::new(3);
    let gauge = Arc::new(Gauge::default());
    let mut consumers = Vec::new();
    let first = Client::connect(&url).await.unwrap();
    for (client, name) in
        [(&first, "a"), (&first, "b"), (&Client::connect(&url).await.unwrap(), "c")]
    {
        let stream = numbers(client, name, 100).await;
        for group in ["x", "y"] {
            let gauge = gauge.clone();
            let consumer = stream.group(group).consumer().concurrency(8).budget(&budget);
            let handler = move |_: Delivery<u64>| {
                let running = gauge.enter();
                async move {
                    sleep(Duration::from_millis(3)).await;
                    drop(running);
                }
            };
            consumers.push(tokio::spawn(consumer.until_caught_up().run(handler)));
        }
    }
    for consumer in consumers {
        assert_eq!(consumer.await.unwrap().unwrap().handled, 100);
    }
    assert_eq!(gauge.most(), 3);
}
