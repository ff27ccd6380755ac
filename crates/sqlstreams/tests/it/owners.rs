//! Consumers that are killed: what they had in hand is handled elsewhere, soon, and nothing else is repeated.

use std::time::{Duration, Instant};

use sqlstreams::{CancellationToken, Client, RetryPolicy};

use crate::journal::{Script, What};
use crate::scene::Scene;
use crate::support::until;

/// So long that whoever waits for its end fails the test.
const LONG: Duration = Duration::from_secs(60);

/// Only a consumer that has listened for five seconds judges others.
const SETTLED: Duration = Duration::from_millis(5500);

/// With 500 in flight, all of it is handled elsewhere long before the lease runs out, and what was settled is
/// not repeated.
#[tokio::test(flavor = "multi_thread")]
async fn tb_047_what_a_killed_process_had_in_hand_is_handled_elsewhere_at_once() {
    let scene = Scene::new("killed", 500, LONG).await;
    let victim = scene.process(1, 500, Script::HangFrom(500));
    scene.until_resolved(30).await;
    scene.produce(500..1000).await;
    until("500 are in flight", Duration::from_secs(30), async || {
        scene.journal.of(What::Started).len() == 1000
    })
    .await;
    let survivor = scene.local(2, 16, Script::Work(0)).await;
    tokio::time::sleep(SETTLED).await;
    assert!(scene.journal.payloads(2, What::Started).is_empty(), "the victim lives");

    victim.kill();
    let killed = Instant::now();
    until("all are handled elsewhere", Duration::from_secs(30), async || {
        scene.journal.payloads(2, What::Done).len() == 500
    })
    .await;
    println!("500 messages of a killed process were handled after {:?}", killed.elapsed());
    assert!(killed.elapsed() < Duration::from_secs(10), "{:?}", killed.elapsed());
    scene.until_resolved(10).await;
    assert_eq!(survivor.stop().await.handled, 500, "what was settled is not repeated");
    assert_eq!(scene.journal.payloads(2, What::Started), (500..1000).collect());
    assert_eq!(scene.journal.of(What::Started).len(), 1500, "repeats: what was in flight");
}

/// The survivor hears of new messages all the time, and consumes another group too. Neither may keep it from noticing.
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_process_is_noticed_by_a_busy_one() {
    let scene = Scene::new("busy", 50, LONG).await;
    let victim = scene.process(1, 50, Script::HangFrom(0));
    until("50 are in flight", Duration::from_secs(30), async || {
        scene.journal.of(What::Started).len() == 50
    })
    .await;
    let stop = CancellationToken::new();
    let mut consumers = Vec::new();
    for name in ["g", "h"] {
        let group = scene.stream.group(name).create_if_missing().await.unwrap();
        let number = if name == "g" { 2 } else { 3 };
        let handler = scene.journal.handler(number, Script::Work(0));
        consumers.push(tokio::spawn(group.consumer().stop_on(stop.clone()).run(handler)));
    }
    let producing = tokio::spawn({
        let (producer, stop) = (scene.stream.producer(), stop.clone());
        async move {
            for payload in 1000_u64.. {
                if stop.is_cancelled() {
                    break;
                }
                producer.send(&payload).await.unwrap();
                tokio::time::sleep(Duration::from_millis(7)).await;
            }
        }
    });
    tokio::time::sleep(SETTLED).await;
    victim.kill();
    let killed = Instant::now();
    until("all are handled elsewhere", Duration::from_secs(30), async || {
        scene.journal.payloads(2, What::Done).range(..50).count() == 50
    })
    .await;
    println!("50 messages of a killed process were handled after {:?}", killed.elapsed());
    assert!(killed.elapsed() < Duration::from_secs(10), "{:?}", killed.elapsed());
    stop.cancel();
    producing.await.unwrap();
    for consumer in consumers {
        consumer.await.unwrap().unwrap();
    }
}

/// TB-045: nobody but its own successor is there. That is a new owner, so what its predecessor had is not taken for its own,
/// and it may judge as soon as it has proved to be stable itself.
#[tokio::test(flavor = "multi_thread")]
async fn tb_045_a_process_that_is_started_again_gets_what_its_predecessor_had() {
    let scene = Scene::new("again", 20, LONG).await;
    let victim = scene.process(1, 20, Script::HangFrom(0));
    until("20 are in flight", Duration::from_secs(30), async || {
        scene.journal.of(What::Started).len() == 20
    })
    .await;
    victim.kill();
    let killed = Instant::now();
    let successor = scene.process(2, 20, Script::Work(0));
    scene.until_resolved(30).await;
    println!("20 messages of a killed process were handled after {:?}", killed.elapsed());
    assert!(killed.elapsed() < Duration::from_secs(25), "{:?}", killed.elapsed());
    assert_eq!(successor.stop().await, 20);
}

/// All that the limit allows is with a consumer that dies. When its leases have run out, nothing of that counts any more.
#[tokio::test(flavor = "multi_thread")]
async fn tb_051_what_a_killed_process_had_in_hand_does_not_fill_the_limit() {
    let scene = Scene::new("limited", 20, Duration::from_secs(2)).await;
    scene.stream.group("g").max_in_flight(5).open().await.unwrap();
    let victim = scene.process(1, 8, Script::HangFrom(0));
    until("the limit is reached", Duration::from_secs(30), async || {
        scene.journal.of(What::Started).len() == 5
    })
    .await;
    let survivor = scene.local(2, 8, Script::Work(5)).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(scene.journal.of(What::Started).len(), 5, "the limit holds");
    victim.kill();
    scene.until_resolved(30).await;
    assert_eq!(survivor.stop().await.handled, 20);
}

/// Nobody notices the death here: without a listener only the end of the lease tells. A higher limit lets the rest pass now.
#[tokio::test(flavor = "multi_thread")]
async fn tb_056_a_limit_that_is_raised_lets_messages_pass_at_once() {
    let scene = Scene::new("raised", 20, Duration::from_secs(15)).await;
    scene.stream.group("g").max_in_flight(5).open().await.unwrap();
    let victim = scene.process(1, 8, Script::HangFrom(0));
    until("the limit is reached", Duration::from_secs(30), async || {
        scene.journal.of(What::Started).len() == 5
    })
    .await;
    victim.kill();
    let client = Client::builder(&scene.place.url).listener(false).connect().await.unwrap();
    let survivor = scene.local_through(client, 2, 8, Script::Work(5)).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(scene.journal.of(What::Started).len(), 5, "the limit holds");

    scene.stream.group("g").max_in_flight(50).open().await.unwrap();
    let done = || scene.journal.payloads(2, What::Done).len();
    until("the others pass", Duration::from_secs(8), async || done() == 15).await;
    // And in the end the rest as well, without anybody's help.
    scene.until_resolved(40).await;
    assert_eq!(survivor.stop().await.handled, 20);
}

/// TB-078, with real processes: whoever gets the message dies. It ends as a dead letter, and takes nobody with it.
#[tokio::test(flavor = "multi_thread")]
async fn tb_078_a_message_that_kills_its_process_dies_alone() {
    const KILLER: u64 = 3;
    let scene = Scene::new("poison", 8, Duration::from_secs(1)).await;
    let policy = RetryPolicy::attempts(2).backoff(Duration::ZERO, 1.0, Duration::ZERO);
    scene.stream.group("g").retry(policy).open().await.unwrap();
    let start = |number| scene.process(number, 8, Script::DieAt(KILLER));
    let mut processes = [start(1), start(2)];
    let deadline = Instant::now() + Duration::from_secs(90);
    let mut numbers = 3..;
    while scene.group.status().await.unwrap().dead == 0 || !scene.is_resolved().await {
        assert!(Instant::now() < deadline, "the group does not come to an end");
        for process in &mut processes {
            if process.has_ended() {
                *process = start(numbers.next().unwrap());
            }
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let dead = scene.group.dead_letters(0, 10).await.unwrap();
    assert_eq!(dead.iter().map(|e| e.message_id).collect::<Vec<_>>(), [KILLER as i64 + 1]);
    let kills = scene.journal.times(What::Started)[&KILLER];
    // With its range until that counts as poison, then alone as often as the policy allows.
    assert_eq!(kills, 3 + 2, "it killed {kills} processes");
    let done = scene.journal.times(What::Done);
    assert_eq!(done.len(), 7, "{done:?}");
    assert!(done.values().all(|times| *times == 1), "a neighbour was handled twice: {done:?}");
}
