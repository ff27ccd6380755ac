//! Consumers that are stopped: what runs is finished, everything else is handed back at once, nothing is repeated.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use sqlstreams::{Budget, CancellationToken, ConsumerBuilder, Health};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;

use crate::journal::{Script, What};
use crate::scene::Scene;
use crate::support::{count, until};

/// So long that whoever waits for its end fails the test.
const LONG: Duration = Duration::from_secs(60);

/// A consumer whose handlers wait at a gate, from some payload on.
struct Gated {
    gate: Arc<Semaphore>,
    stop: CancellationToken,
    health: Health,
    running: JoinHandle<sqlstreams::Result<sqlstreams::Consumed>>,
}

impl Gated {
    /// As number 1.
    fn start(scene: &Scene, consumer: ConsumerBuilder<u64>, from: u64) -> Self {
        let (gate, stop) = (Arc::new(Semaphore::new(0)), CancellationToken::new());
        let consumer = consumer.stop_on(stop.clone());
        let health = consumer.health();
        let act = scene.journal.handler(1, Script::HangFrom(u64::MAX));
        let (journal, opening) = (scene.journal.clone(), gate.clone());
        let running = tokio::spawn(consumer.run(move |message| {
            let (journal, gate, payload) = (journal.clone(), opening.clone(), message.payload);
            let acting = act(message);
            async move {
                if payload < from {
                    return acting.await;
                }
                journal.note(1, What::Started, payload);
                gate.acquire().await.unwrap().forget();
                journal.note(1, What::Done, payload);
                Ok(())
            }
        }));
        Self { gate, stop, health, running }
    }

    fn in_hand(&self) -> (usize, usize) {
        let now = self.health.snapshot();
        (now.held, now.in_flight)
    }
}

/// TB-161: of what a consumer holds as it is stopped, ten messages run. The others are handled elsewhere while these run on.
async fn what_does_not_run_is_handed_back_at_once(
    scene: &Scene,
    first: Gated,
    payloads: std::ops::Range<u64>,
) {
    let other = scene.local(2, 4, Script::Work(0)).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    let (held, running) = first.in_hand();
    assert_eq!((running, scene.journal.payloads(2, What::Started).len()), (10, 0));
    assert!(held >= 100, "{held} are held");
    first.stop.cancel();
    let stopped = Instant::now();
    let elsewhere = || scene.journal.payloads(2, What::Done).len();
    until("the rest is handled elsewhere", Duration::from_secs(20), async || {
        elsewhere() == held - 10
    })
    .await;
    println!("{} were handled elsewhere {:?} after the stop", held - 10, stopped.elapsed());
    assert!(!first.running.is_finished(), "ten handlers run");
    first.gate.add_permits(10);
    let consumed = first.running.await.unwrap().unwrap();
    assert_eq!((consumed.handled, consumed.failed), (payloads.start + 10, 0));
    scene.until_resolved(20).await;
    other.stop().await;
    let started = scene.journal.times(What::Started);
    assert_eq!(started.len() as u64, payloads.end);
    assert!(started.values().all(|times| *times == 1), "a message was repeated");
    // No attempt was counted: nothing has become an exception.
    assert_eq!(count(&scene.db, "SELECT count(*) FROM sqlstreams.exception_queue_1").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn tb_161_what_waits_in_a_stopping_consumer_is_handed_back_at_once() {
    const FAST: u64 = 10_000;
    let scene = Scene::new("stopping", FAST, LONG).await;
    // Fast at first, so that it takes many at a time.
    let first = Gated::start(&scene, scene.group.consumer().concurrency(10), FAST);
    scene.until_resolved(60).await;
    scene.produce(FAST..FAST + 110).await;
    until("it holds them", Duration::from_secs(30), async || first.in_hand() == (110, 10)).await;
    what_does_not_run_is_handed_back_at_once(&scene, first, FAST..FAST + 110).await;
}

/// What waits for a place in the budget does not run either.
#[tokio::test(flavor = "multi_thread")]
async fn tb_161_what_waits_for_the_budget_is_handed_back_at_once() {
    let scene = Scene::new("budget", 100, LONG).await;
    let consumer = scene.group.consumer().concurrency(100).budget(&Budget::new(10));
    let first = Gated::start(&scene, consumer, 0);
    until("it holds them", Duration::from_secs(30), async || first.in_hand() == (100, 10)).await;
    what_does_not_run_is_handed_back_at_once(&scene, first, 0..100).await;
}

/// TB-163: the pause between two looks is not waited for.
#[tokio::test(flavor = "multi_thread")]
async fn tb_163_an_idle_consumer_stops_at_once() {
    let scene = Scene::new("idle", 10, LONG).await;
    let mut fastest = Duration::MAX;
    for _ in 0..3 {
        let consumer = scene.local(1, 4, Script::Work(0)).await;
        scene.until_resolved(30).await;
        tokio::time::sleep(Duration::from_secs(3)).await;
        let stopping = Instant::now();
        consumer.stop().await;
        fastest = fastest.min(stopping.elapsed());
    }
    println!("an idle consumer stopped within {fastest:?}");
    assert!(fastest < Duration::from_millis(500), "{fastest:?}");
}

/// Three consumers are replaced one by one while messages come: each is handled once, and none has to wait for a lease.
#[tokio::test(flavor = "multi_thread")]
async fn a_rolling_restart_repeats_nothing_and_delays_nothing() {
    let scene = Scene::new("rolling", 0, LONG).await;
    let start = |number| scene.process(number, 4, Script::Work(20));
    let mut consumers: Vec<_> = (1..=3).map(start).collect();
    let producing = CancellationToken::new();
    let producer = tokio::spawn({
        let (producer, producing) = (scene.stream.producer(), producing.clone());
        async move {
            let mut sent = BTreeMap::new();
            for payload in 0_u64.. {
                if producing.is_cancelled() {
                    break;
                }
                producer.send(&payload).await.unwrap();
                sent.insert(payload, SystemTime::now());
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            sent
        }
    });
    let done = |number| scene.journal.payloads(number, What::Done).len();
    for round in 0..2 {
        for (number, consumer) in (1 + round * 3..).zip(&mut consumers) {
            until("the next one works", Duration::from_secs(30), async || done(number) > 50).await;
            let old = std::mem::replace(consumer, start(number + 3));
            let handled = old.stop().await;
            assert_eq!(handled, done(number) as u64, "it tells of all that it finished");
        }
    }
    producing.cancel();
    let sent = producer.await.unwrap();
    scene.until_resolved(30).await;
    for consumer in consumers {
        consumer.stop().await;
    }
    let started = scene.journal.times(What::Started);
    assert_eq!(started.len(), sent.len());
    assert!(started.values().all(|times| *times == 1), "a message was repeated");
    let mut delays: Vec<Duration> = scene
        .journal
        .of(What::Started)
        .iter()
        .map(|e| e.at.duration_since(sent[&e.payload]).unwrap_or_default())
        .collect();
    delays.sort();
    let longest = delays[delays.len() - 1];
    println!(
        "{} messages, half of them after {:?}, all after {longest:?}",
        delays.len(),
        delays[delays.len() / 2]
    );
    assert!(longest < Duration::from_secs(5), "one waited for {longest:?}");
}

/// Handlers that do not end are dropped when that is asked for, and their messages are handled elsewhere at once, without
/// counting as attempts.
async fn unfinished_ones_are_handed_back(scene: &Scene, first: Gated, within: Duration) {
    let stopping = Instant::now();
    let consumed = first.running.await.unwrap().unwrap();
    println!("stopped within {:?}", stopping.elapsed());
    assert!(stopping.elapsed() < within, "{:?}", stopping.elapsed());
    assert_eq!((consumed.handled, consumed.failed), (0, 0));
    let other = scene.local(2, 4, Script::Work(0)).await;
    scene.until_resolved(20).await;
    assert_eq!(other.stop().await.handled, 20);
    assert_eq!(scene.journal.payloads(1, What::Done).len(), 0, "they were dropped");
    assert_eq!(count(&scene.db, "SELECT count(*) FROM sqlstreams.exception_queue_1").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_that_is_aborted_drops_its_handlers() {
    let scene = Scene::new("abort", 20, LONG).await;
    let abort = CancellationToken::new();
    let consumer = scene.group.consumer().concurrency(8).shutdown_timeout(LONG * 10);
    let first = Gated::start(&scene, consumer.abort_on(abort.clone()), 0);
    until("they run", Duration::from_secs(30), async || first.in_hand().1 == 8).await;
    first.stop.cancel();
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(!first.running.is_finished(), "a graceful stop waits for its handlers");
    abort.cancel();
    unfinished_ones_are_handed_back(&scene, first, Duration::from_secs(10)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_that_takes_too_long_drops_its_handlers() {
    let scene = Scene::new("timeout", 20, LONG).await;
    let consumer = scene.group.consumer().concurrency(8).shutdown_timeout(Duration::from_secs(1));
    let first = Gated::start(&scene, consumer, 0);
    until("they run", Duration::from_secs(30), async || first.in_hand().1 == 8).await;
    first.stop.cancel();
    unfinished_ones_are_handed_back(&scene, first, Duration::from_secs(10)).await;
}

/// Without a stop, an abort means nothing.
#[tokio::test(flavor = "multi_thread")]
async fn an_abort_alone_does_nothing() {
    let scene = Scene::new("alone", 20, LONG).await;
    let abort = CancellationToken::new();
    abort.cancel();
    let first = Gated::start(&scene, scene.group.consumer().abort_on(abort), 0);
    first.gate.add_permits(20);
    scene.until_resolved(30).await;
    first.stop.cancel();
    assert_eq!(first.running.await.unwrap().unwrap().handled, 20);
}
