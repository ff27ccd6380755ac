//! Handlers of batches: what becomes of each message of a batch.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sqlstreams::{
    Bytes, CancellationToken, Delivery, Group, Json, Lenient, Outcome, Outgoing, RetryPolicy,
    Undecodable,
};

use crate::support::{client, count, eventually, numbers};

fn at_once(attempts: u32) -> RetryPolicy {
    RetryPolicy::attempts(attempts).backoff(Duration::ZERO, 1.0, Duration::ZERO)
}

/// The dead letters of a group: their ids, how often they were tried and why they died.
async fn dead<T, C>(group: &Group<T, C>) -> Vec<(i64, i32, String)> {
    let dead = group.dead_letters(0, 1_000).await.unwrap();
    let row = |d: &sqlstreams::Exception| {
        (d.message_id, d.attempts, d.last_error.clone().unwrap_or_default())
    };
    dead.iter().map(row).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn each_message_of_a_batch_has_its_own_outcome() {
    let (client, db) = client().await;
    let stream = numbers(&client, "s", 1_000).await;
    let group = stream.group("g").retry(at_once(3)).create().await.unwrap();
    let log: Arc<Mutex<BTreeMap<u64, Vec<u32>>>> = Arc::default();
    let sizes: Arc<Mutex<Vec<usize>>> = Arc::default();
    let (seen, batches) = (log.clone(), sizes.clone());
    let consumer = group.consumer().concurrency(2).batch_size(64).until_caught_up();
    let consumed = consumer
        .run_batches(move |batch: Vec<Delivery<u64>>| {
            batches.lock().unwrap().push(batch.len());
            let mut log = seen.lock().unwrap();
            let mut outcomes = Vec::new();
            for message in &batch {
                log.entry(message.payload).or_default().push(message.attempt());
                outcomes.push(match (message.payload % 10, message.attempt()) {
                    (1, 1) => Outcome::Retry("once".into()),
                    (2, _) => Outcome::RetryAfter("always".into(), Duration::from_millis(5)),
                    (3, _) => Outcome::Dead("on purpose".into()),
                    (4, _) if message.context.delays() == 0 => Outcome::Delay(Duration::ZERO),
                    _ => Outcome::Done,
                });
            }
            async move { outcomes }
        })
        .await
        .unwrap();
    assert_eq!((consumed.handled, consumed.failed), (800, 100 + 300));
    assert_eq!((consumed.dead_at_once, consumed.delayed), (100, 100));
    for (payload, attempts) in &*log.lock().unwrap() {
        let expected: &[u32] = match payload % 10 {
            1 => &[1, 2],
            2 => &[1, 2, 3],
            4 => &[1, 1],
            _ => &[1],
        };
        assert_eq!(attempts, expected, "{payload}");
    }
    let dead = dead(&group).await;
    assert_eq!(dead.len(), 200);
    assert!(dead.iter().any(|d| d.1 == 3 && d.2 == "always"));
    assert!(dead.iter().any(|d| d.1 == 1 && d.2 == "on purpose"));
    let most = sizes.lock().unwrap().iter().copied().max();
    assert_eq!(most, Some(64), "no batch was full");
    assert_eq!(count(&db, "SELECT count(*) FROM sqlstreams.consumer_lease_1").await, 0);
}

/// An error, a panic, a timeout and a wrong number of outcomes are failures of all.
#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_told_apart_fails_as_a_whole() {
    for (how, error) in [
        ("error", "no luck"),
        ("panic", "the handler panicked: boom"),
        ("timeout", "the handler took longer than 50ms"),
        ("fewer", "the handler returned 1 outcomes for "),
        ("more", "the handler returned 11 outcomes for "),
        ("none", "the handler returned 0 outcomes for "),
    ] {
        let (client, _db) = client().await;
        let stream = numbers(&client, "s", 10).await;
        let group = stream.group("g").retry(at_once(2)).create().await.unwrap();
        let consumer = group.consumer().concurrency(1).batch_size(10).until_caught_up();
        let consumer =
            consumer.timeout(Duration::from_millis(if how == "timeout" { 50 } else { 30_000 }));
        let consumed = consumer
            .run_batches(move |batch: Vec<Delivery<u64>>| async move {
                match how {
                    "error" => return Err("no luck"),
                    "panic" => panic!("boom"),
                    "timeout" => std::future::pending().await,
                    "fewer" if batch.len() > 1 => return Ok(vec![Outcome::Done]),
                    "more" => return Ok(vec![Outcome::Done; 11]),
                    _ => {}
                }
                Ok(Vec::new())
            })
            .await
            .unwrap();
        assert_eq!((consumed.handled, consumed.failed), (0, 20), "{how}");
        let dead = dead(&group).await;
        assert_eq!(dead.len(), 10, "{how}");
        let of_one = "the handler returned 0 outcomes for 1 messages";
        for (_, attempts, reason) in dead {
            assert_eq!(attempts, 2, "{how}");
            assert!(reason.starts_with(error) || reason == of_one, "{how}: {reason}");
        }
    }
}

/// `Ok(())` is for all of them.
#[tokio::test(flavor = "multi_thread")]
async fn one_outcome_may_stand_for_all() {
    let (client, db) = client().await;
    let stream = numbers(&client, "s", 500).await;
    let consumer = stream.group("g").consumer().batch_size(50).until_caught_up();
    let consumed = consumer.run_batches(async |_: Vec<Delivery<u64>>| Ok::<_, String>(())).await;
    assert_eq!(consumed.unwrap().handled, 500);
    assert_eq!(count(&db, "SELECT count(*) FROM sqlstreams.exception_queue_1").await, 0);
    for wrong in [0, 10_001] {
        let consumer = stream.group("g").consumer().batch_size(wrong).until_caught_up();
        let error = consumer.run_batches(async |_: Vec<Delivery<u64>>| ()).await.unwrap_err();
        assert_eq!(error.kind(), sqlstreams::ErrorKind::InvalidArgument);
    }
}

/// A payload that nobody can read goes by itself: the batch does not see it, and its neighbours are handled.
#[tokio::test(flavor = "multi_thread")]
async fn a_bad_payload_in_a_batch_dies_alone() {
    let (client, _db) = client().await;
    let raw = client.stream::<Vec<u8>>("s").codec::<Bytes>().payload_type("json".parse().unwrap());
    let raw = raw.create().await.unwrap();
    let payloads: Vec<Vec<u8>> = (0..100)
        .map(|n| if n % 10 == 3 { b"\"three\"".to_vec() } else { n.to_string().into_bytes() })
        .collect();
    raw.producer().send_all(payloads.iter().map(Outgoing::new)).await.unwrap();
    let stream = client.stream::<u64>("s").open().await.unwrap();
    let group = stream.group("g").create().await.unwrap();
    let seen: Arc<Mutex<Vec<u64>>> = Arc::default();
    let log = seen.clone();
    let consumer = group.consumer().batch_size(100).concurrency(1).until_caught_up();
    let consumed = consumer
        .run_batches(move |batch: Vec<Delivery<u64>>| {
            log.lock().unwrap().extend(batch.iter().map(|message| message.payload));
            async {}
        })
        .await
        .unwrap();
    assert_eq!((consumed.handled, consumed.dead_at_once), (90, 10));
    let expected: Vec<u64> = (0..100).filter(|n| n % 10 != 3).collect();
    assert_eq!(*seen.lock().unwrap(), expected);
    let dead = dead(&group).await;
    assert_eq!(dead.len(), 10);
    assert!(
        dead.iter().all(|(_, _, reason)| reason.starts_with("the payload cannot be decoded: "))
    );

    // The way out: the same payloads as they are, for a handler that knows better.
    let lenient = client.stream::<Result<u64, Undecodable>>("s").codec::<Lenient<Json>>();
    let lenient = lenient.open().await.unwrap();
    let odd: Arc<Mutex<Vec<Undecodable>>> = Arc::default();
    let log = odd.clone();
    let consumer = lenient.group("lenient").consumer().until_caught_up();
    let consumed = consumer
        .run(move |message: Delivery<Result<u64, Undecodable>>| {
            let undecodable = message.into_payload().err();
            log.lock().unwrap().extend(undecodable);
            async {}
        })
        .await
        .unwrap();
    assert_eq!((consumed.handled, consumed.dead_at_once), (100, 0));
    let odd = std::mem::take(&mut *odd.lock().unwrap());
    assert_eq!(odd.len(), 10);
    for undecodable in &odd {
        assert_eq!(undecodable.payload, b"\"three\"");
        assert!(undecodable.reason.contains("invalid type: string"), "{undecodable}");
    }
    // And back as it was.
    let sent = lenient.producer().send(&Err(odd[0].clone())).await.unwrap();
    assert_eq!(raw.read(&[sent.id]).await.unwrap()[0].payload, b"\"three\"");
    let read = lenient.read(&[sent.id, 1]).await.unwrap();
    assert_eq!((&read[0].payload, read[1].payload.is_err()), (&Ok(0), true));
}

/// A batch over several leases of which one is lost is dropped, and the messages of the others are handled all the same.
#[tokio::test(flavor = "multi_thread")]
async fn a_batch_that_is_dropped_keeps_nothing() {
    let (client, db) = client().await;
    let stream = numbers(&client, "s", 1).await;
    let (entered, mut entries) = tokio::sync::mpsc::unbounded_channel();
    let release = Arc::new(tokio::sync::Semaphore::new(0));
    let (wait, stop) = (release.clone(), CancellationToken::new());
    let group = stream.group("g").lease(Duration::from_secs(3)).create().await.unwrap();
    let consumer = group.consumer().concurrency(1).batch_size(10).stop_on(stop.clone());
    let health = consumer.health();
    let running = tokio::spawn(consumer.run_batches(move |batch: Vec<Delivery<u64>>| {
        let (entered, wait) = (entered.clone(), wait.clone());
        let ids: Vec<i64> = batch.iter().map(|message| message.id).collect();
        async move {
            let _ = entered.send(ids);
            wait.acquire().await.unwrap().forget();
        }
    }));
    assert_eq!(entries.recv().await.unwrap(), [1]);
    for n in 1..3 {
        stream.producer().send(&n).await.unwrap();
        let leases = "SELECT count(*) FROM sqlstreams.consumer_lease_1";
        eventually(async || count(&db, leases).await == n as i64 + 1).await;
        // The lease is there before its message has come.
        eventually(async || health.snapshot().held == n as usize + 1).await;
    }
    release.add_permits(1);
    assert_eq!(entries.recv().await.unwrap(), [2, 3]);
    let steal = "UPDATE sqlstreams.consumer_lease_1 SET token = gen_random_uuid(), expires_at = clock_timestamp() WHERE pending @> 2::bigint";
    assert_eq!(db.execute(steal, &[]).await.unwrap(), 1);
    // The next heartbeat finds out, and both come again.
    let mut again = Vec::new();
    while !(again.contains(&2) && again.contains(&3)) {
        let entry = tokio::time::timeout(Duration::from_secs(20), entries.recv()).await;
        again.extend(entry.expect("not handled again").unwrap());
        release.add_permits(1);
    }
    let resolved = "SELECT sqlstreams.is_resolved(1, 1, 3)::int::bigint";
    eventually(async || count(&db, resolved).await == 1).await;
    stop.cancel();
    let consumed = running.await.unwrap().unwrap();
    assert_eq!((consumed.handled, consumed.failed), (3, 0));
}
