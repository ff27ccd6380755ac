//! Leases live as long as their handlers, and what stands in the tables is enough to get everything going again.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use sqlstreams::{CancellationToken, Client, Delivery};

use crate::child::Process;
use crate::journal::{Script, What};
use crate::plain::{Lease, Plain, ids_of, installed};
use crate::scene::Scene;
use crate::support::{client, connect, count, database, numbers, until};

const LEASE: Duration = Duration::from_secs(1);

/// With heartbeats: once, however long it takes. That a handler without them is fenced off is in `frozen`.
#[tokio::test(flavor = "multi_thread")]
async fn tb_031_a_handler_that_runs_for_ten_leases_runs_once() {
    let scene = Scene::new("long", 4, LEASE).await;
    let first = scene.local(1, 4, Script::Work(10_000)).await;
    let second = scene.local(2, 4, Script::Work(10_000)).await;
    scene.until_resolved(60).await;
    assert_eq!(first.stop().await.handled + second.stop().await.handled, 4);
    assert_eq!(scene.journal.of(What::Started).len(), 4);
}

/// The lease is the group's own, and no ceiling to what a handler may take.
#[tokio::test(flavor = "multi_thread")]
async fn tb_042_each_group_has_its_own_lease_and_no_handler_a_limit() {
    let (client, db) = client().await;
    let stream = numbers(&client, "two", 1).await;
    let stop = CancellationToken::new();
    let runs = Arc::new(AtomicU32::new(0));
    let mut consumers = Vec::new();
    for (name, lease) in [("short", LEASE), ("long", Duration::from_secs(3600))] {
        let group = stream.group(name).lease(lease).create().await.unwrap();
        let runs = runs.clone();
        let consumer = group.consumer().stop_on(stop.clone()).run(move |message: Delivery<u64>| {
            runs.fetch_add(1, Ordering::SeqCst);
            assert_eq!(message.context.deadline(), None);
            tokio::time::sleep(LEASE * 5)
        });
        consumers.push((group.clone(), lease, tokio::spawn(consumer)));
    }
    until("both run", Duration::from_secs(30), async || runs.load(Ordering::SeqCst) == 2).await;
    // Renewed some times meanwhile.
    tokio::time::sleep(LEASE * 2).await;
    for (group, lease, _) in &consumers {
        let left = "SELECT extract(epoch FROM expires_at - clock_timestamp())::float8 FROM sqlstreams.consumer_lease_1 WHERE group_id = $1";
        let left: f64 = db.query_one(left, &[&group.id()]).await.unwrap().get(0);
        let lease = lease.as_secs_f64();
        assert!(
            left > 0.0 && left <= lease && left > lease - 30.0,
            "{left} s of {lease} s are left"
        );
    }
    until("both are done", Duration::from_secs(30), async || {
        count(&db, "SELECT count(*) FROM sqlstreams.consumer_lease_1").await == 0
    })
    .await;
    stop.cancel();
    for (_, _, consumer) in consumers {
        assert_eq!(consumer.await.unwrap().unwrap().handled, 1);
    }
    assert_eq!(runs.load(Ordering::SeqCst), 2);
}

/// A handler blocks its thread, and with it everything on the caller's runtime, for several leases.
async fn runs_once_though_it_blocks(name: &'static str) {
    let scene = Scene::new(name, 3, LEASE).await;
    let running = Arc::new(AtomicU32::new(0));
    let starts = Arc::new(AtomicU32::new(0));
    let (now, starting) = (running.clone(), starts.clone());
    let stop = CancellationToken::new();
    let consumer = scene.group.consumer().concurrency(1).stop_on(stop.clone());
    let blocked = tokio::spawn(consumer.run(move |message: Delivery<u64>| {
        assert_eq!(now.fetch_add(1, Ordering::SeqCst), 0, "its concurrency is 1");
        starting.fetch_add(1, Ordering::SeqCst);
        std::thread::sleep(LEASE * 4);
        assert!(!message.context.cancellation().is_cancelled(), "its lease was renewed");
        now.fetch_sub(1, Ordering::SeqCst);
        async {}
    }));
    // Somebody who would take over, in another process, and from a thread: everything of this runtime may be blocked.
    let (place, journal, started) = (scene.place.clone(), scene.journal.clone(), starts.clone());
    let other = std::thread::spawn(move || {
        while started.load(Ordering::SeqCst) == 0 {
            std::thread::sleep(Duration::from_millis(5));
        }
        Process::start(&place, 1, Script::Work(0), 2, &journal)
    });
    scene.until_resolved(60).await;
    let other = other.join().unwrap();
    stop.cancel();
    let here = blocked.await.unwrap().unwrap().handled;
    let there = other.stop().await;
    assert_eq!(here + there, 3, "{here} here and {there} elsewhere");
    assert_eq!(u64::from(starts.load(Ordering::SeqCst)), here, "a message ran twice");
    assert_eq!(scene.journal.of(What::Started).len() as u64, there);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tb_044_a_handler_that_blocks_its_thread_keeps_its_lease() {
    runs_once_though_it_blocks("blocking").await;
}

/// Where there is only one thread nothing else of the caller's runs meanwhile.
#[tokio::test(flavor = "current_thread")]
async fn tb_044_a_handler_that_blocks_the_only_thread_keeps_its_lease() {
    runs_once_though_it_blocks("blocking").await;
}

/// A consumer that was fast holds much when its handler becomes slow: what waits in it is renewed too.
#[tokio::test(flavor = "multi_thread")]
async fn tb_037_what_waits_for_a_handler_does_not_expire() {
    const FAST: u64 = 20_000;
    let scene = Scene::new("waiting", FAST + 400, LEASE).await;
    let held = Arc::new(AtomicU64::new(0));
    let consumer = scene.group.consumer().concurrency(1);
    let (health, most) = (consumer.health(), held.clone());
    let stop = CancellationToken::new();
    let act = scene.journal.handler(1, Script::Work(0));
    let slow = tokio::spawn(consumer.stop_on(stop.clone()).run(move |message| {
        let slow = message.payload >= FAST;
        if slow {
            most.fetch_max(health.snapshot().held as u64, Ordering::SeqCst);
        }
        let acting = act(message);
        async move {
            if slow {
                tokio::time::sleep(Duration::from_millis(15)).await;
            }
            acting.await
        }
    }));
    let started = || scene.journal.of(What::Started).len() as u64;
    until("it is slow", Duration::from_secs(60), async || started() > FAST).await;
    let other = scene.local(2, 1, Script::Work(0)).await;
    scene.until_resolved(60).await;
    stop.cancel();
    slow.await.unwrap().unwrap();
    other.stop().await;
    println!("up to {} messages were held", held.load(Ordering::SeqCst));
    assert!(held.load(Ordering::SeqCst) >= 100, "too few for several leases' worth of work");
    assert_eq!(started(), FAST + 400, "a message ran twice");
}

/// A settle and a take-over meet at the same lease: whoever has its row first wins, and the other changes nothing.
#[tokio::test(flavor = "multi_thread")]
async fn tb_032_a_settle_that_comes_while_its_lease_is_taken_over() {
    let url = database().await;
    let owner = installed(&url).await;
    let taker = owner.again(&url).await;
    owner.produce(10).await;
    let lease = owner.claim(10).await.unwrap();
    owner.expire_leases().await;

    // The settle is first: the taker passes over what it cannot lock.
    owner.db.batch_execute("BEGIN").await.unwrap();
    assert!(owner.settle(&lease, "{[1,4)}").await);
    assert_eq!(taker.claim(10).await, None);
    owner.db.batch_execute("COMMIT").await.unwrap();
    assert_eq!(taker.claim(10).await, None, "which has renewed it as well");

    // The taker is first: the settle waits for it, and is refused.
    owner.expire_leases().await;
    taker.db.batch_execute("BEGIN").await.unwrap();
    let taken = taker.claim(10).await.unwrap();
    assert_eq!(ids_of(&taken.pending), (4..=10).collect());
    let (settled, ()) = tokio::join!(owner.settle(&lease, "{[1,)}"), async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        taker.db.batch_execute("COMMIT").await.unwrap();
    });
    assert!(!settled);
    assert_eq!(taker.fetch(&taken).await, (4..=10).collect::<Vec<_>>());

    // The taker is first but does not commit: the settle stands.
    taker.expire_leases().await;
    owner.db.batch_execute("BEGIN").await.unwrap();
    assert!(owner.claim(10).await.is_some());
    let (settled, ()) = tokio::join!(taker.settle(&taken, "{[1,)}"), async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        owner.db.batch_execute("ROLLBACK").await.unwrap();
    });
    assert!(settled);
    assert_eq!(owner.claim(10).await, None, "all is settled");
}

/// Two takers at once, the second of which began while the first was under way: nothing is handed out twice.
#[tokio::test(flavor = "multi_thread")]
async fn tb_039_two_who_take_over_at_once_get_different_messages() {
    let url = database().await;
    let first = installed(&url).await;
    let second = first.again(&url).await;
    first.produce(40).await;
    for _ in 0..4 {
        first.claim(10).await.unwrap();
    }
    first.expire_leases().await;
    let mut seen = Vec::new();
    for _ in 0..2 {
        first.db.batch_execute("BEGIN").await.unwrap();
        let one = first.claim(10).await.unwrap();
        let (other, ()) = tokio::join!(second.claim(10), async {
            tokio::time::sleep(Duration::from_millis(200)).await;
            first.db.batch_execute("COMMIT").await.unwrap();
        });
        seen.extend(ids_of(&one.pending));
        seen.extend(ids_of(&other.unwrap().pending));
    }
    seen.sort_unstable();
    assert_eq!(seen, (1..=40).collect::<Vec<_>>());
    assert_eq!(first.claim(10).await, None);
}

/// Leases of all ages that nobody will ever renew: whoever comes next clears them all.
#[tokio::test(flavor = "multi_thread")]
async fn tb_049_leases_that_were_stuck_for_months_are_cleared() {
    let url = database().await;
    let client = Client::connect(&url).await.unwrap();
    let stream = numbers(&client, "stuck", 600).await;
    let group = stream.group("g").create().await.unwrap();
    let plain = Plain { db: connect(&url).await, stream: stream.id(), group: group.id() };
    // Forgotten for up to 91 days, some at the third time, some by a process that had a number, some just now.
    for _ in 0..60 {
        plain.claim(10).await.unwrap();
    }
    let owner: i64 = plain
        .db
        .query_one("SELECT nextval('sqlstreams.consumer_owner')", &[])
        .await
        .unwrap()
        .get(0);
    let sql = "UPDATE sqlstreams.consumer_lease_1 SET expires_at = clock_timestamp() - (seq % 30) * interval '3 days 1 hour' + interval '1 second',
                   reclaims = seq % 3, owner = CASE WHEN seq % 2 = 0 THEN $1::bigint END";
    plain.db.execute(sql, &[&owner]).await.unwrap();
    // And exceptions in flight.
    let sql = "UPDATE sqlstreams.consumer_lease_1 SET expires_at = clock_timestamp() + interval '1 minute' WHERE seq = 1 RETURNING token";
    let token: uuid::Uuid = plain.db.query_one(sql, &[]).await.unwrap().get(0);
    let lease = Lease { seq: 1, token, pending: String::new() };
    let failed: Vec<_> = (1..=10).map(|id| (id, "retry", Some(0.0))).collect();
    assert!(plain.fail(&lease, &failed).await);
    assert_eq!(plain.claim_exceptions(10, false).await.1.len(), 10);
    let sql = "UPDATE sqlstreams.exception_queue_1 SET lease_expires_at = clock_timestamp() - message_id * interval '9 days'";
    plain.db.batch_execute(sql).await.unwrap();

    let started = Instant::now();
    let consumed = group.consumer().until_caught_up().run(async |_| {}).await.unwrap();
    println!("cleared after {:?}", started.elapsed());
    assert!(started.elapsed() < Duration::from_secs(30), "{:?}", started.elapsed());
    assert_eq!(consumed.handled, 600);
    for table in ["consumer_lease_1", "exception_queue_1"] {
        assert_eq!(
            count(&plain.db, &format!("SELECT count(*) FROM sqlstreams.{table}")).await,
            0,
            "{table}"
        );
    }
}
