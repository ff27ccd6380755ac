//! Consumers that are frozen for longer than their leases last, and go on afterwards as if nothing had happened.

use std::time::{Duration, SystemTime};

use crate::child::Process;
use crate::journal::{Script, What};
use crate::scene::Scene;
use crate::support::{count, until};

const LEASE: Duration = Duration::from_secs(2);

/// How often a consumer is frozen; scripts/long-tests does it more often.
fn rounds() -> u64 {
    std::env::var("SQLSTREAMS_FREEZE_ROUNDS").map_or(3, |rounds| rounds.parse().unwrap())
}

/// The lease runs out while its owner is frozen, another consumer has the messages in hand, and the owner awakes with handlers
/// that claim to have handled them, or to have failed.
#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_consumer_is_cancelled_and_what_it_says_late_is_refused() {
    const MESSAGES: u64 = 8;
    let scene = Scene::new("frozen", 0, LEASE).await;
    let frozen = scene.process(1, MESSAGES as usize, Script::HangFrom(0));
    let mut handled_elsewhere = 0;
    for round in 0..rounds() {
        let payloads = round * MESSAGES..(round + 1) * MESSAGES;
        scene.produce(payloads.clone()).await;
        let (first, last) = (payloads.start, payloads.end);
        let these = |what| scene.journal.payloads(1, what).range(first..last).count() as u64;
        until("it has them in hand", Duration::from_secs(30), async || {
            these(What::Started) == MESSAGES
        })
        .await;
        frozen.freeze();
        let other = scene.local(2, MESSAGES as usize, Script::Work(3_000)).await;
        until("another has them in hand", Duration::from_secs(30), async || {
            scene.journal.payloads(2, What::Started).range(first..last).count() as u64 == MESSAGES
        })
        .await;
        frozen.thaw();
        until("it is cancelled", Duration::from_secs(30), async || {
            these(What::Cancelled) == MESSAGES
        })
        .await;
        scene.until_resolved(30).await;
        handled_elsewhere += other.stop().await.handled;
        let rows = "SELECT count(*) FROM sqlstreams.exception_queue_1";
        assert_eq!(count(&scene.db, rows).await, 0, "round {round}: a late failure was recorded");
        assert_eq!(scene.pending().await, 0, "round {round}");
    }
    assert_eq!(handled_elsewhere, rounds() * MESSAGES, "each message ends once");
    frozen.stop().await;
    assert_eq!(scene.journal.of(What::Done).len() as u64, rounds() * MESSAGES);
}

/// At most one message is handed out, whoever is frozen: a lease that ran out counts for nobody, and the settle of who lost it
/// gives no second place free.
#[tokio::test(flavor = "multi_thread")]
async fn tb_034_a_limit_of_one_holds_while_consumers_are_frozen() {
    let scene = Scene::new("one", 100_000, LEASE).await;
    scene.stream.group("g").max_in_flight(1).open().await.unwrap();
    let consumers = [1, 2, 3].map(|number| scene.process(number, 2, Script::Work(20)));
    let started = || scene.journal.of(What::Started).len();
    until("they work", Duration::from_secs(30), async || started() > 10).await;
    let mut freezes: Vec<(u32, SystemTime, SystemTime)> = Vec::new();
    let mut samples = 0;
    for round in 0..rounds() * 2 {
        // Whoever is in a handler, that is where it hurts.
        let entries = scene.journal.entries();
        let number = entries.iter().rev().find(|e| e.what == What::Started).unwrap().process;
        let victim: &Process = &consumers[number as usize - 1];
        let before = started();
        let from = SystemTime::now();
        victim.freeze();
        let thawed = tokio::time::Instant::now() + LEASE.mul_f64(1.3);
        while tokio::time::Instant::now() < thawed {
            let in_flight = in_flight(&scene).await;
            assert!(in_flight <= 1, "round {round}: {in_flight} messages are handed out");
            samples += 1;
            tokio::time::sleep(Duration::from_millis(3)).await;
        }
        victim.thaw();
        freezes.push((number, from, SystemTime::now()));
        until("the others go on", Duration::from_secs(30), async || started() > before + 5).await;
    }
    println!("{samples} looks, {} messages were started", started());
    for consumer in consumers {
        consumer.stop().await;
    }
    // From its start to its end, or until its process was frozen: by then its lease still ran.
    let mut runs: Vec<(SystemTime, SystemTime, u32)> = Vec::new();
    let entries = scene.journal.entries();
    for (at, entry) in entries.iter().enumerate().filter(|(_, e)| e.what == What::Started) {
        let ended = entries[at..].iter().find(|e| {
            e.process == entry.process && e.payload == entry.payload && e.what != What::Started
        });
        let mut end = ended.expect("a handler does not end").at;
        for (number, from, until) in &freezes {
            if *number == entry.process && entry.at < *until && end > *from {
                end = end.min((*from).max(entry.at));
            }
        }
        runs.push((entry.at, end, entry.process));
    }
    runs.sort();
    for pair in runs.windows(2) {
        assert!(pair[0].1 <= pair[1].0, "two ran at once: {pair:?}");
    }
}

/// Messages in leases that run, and exceptions in flight, by the tables themselves.
async fn in_flight(scene: &Scene) -> i64 {
    let sql = "SELECT (SELECT coalesce(sum(upper(r) - lower(r)), 0)::bigint FROM sqlstreams.consumer_lease_1, unnest(pending) AS r
                       WHERE expires_at > clock_timestamp())
                    + (SELECT count(*) FROM sqlstreams.exception_queue_1 WHERE state = 'inflight' AND lease_expires_at > clock_timestamp())";
    count(&scene.db, sql).await
}
