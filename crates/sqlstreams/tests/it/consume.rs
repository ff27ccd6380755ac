//! Consuming: every message once, failures through the exception queue.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sqlstreams::{Delivery, Outcome, RetryPolicy};

use crate::support::{client, count, numbers};

#[tokio::test(flavor = "multi_thread")]
async fn clean_messages_leave_one_cursor_row() {
    let (client, db) = client().await;
    let stream = numbers(&client, "clean", 20_000).await;
    let seen = Arc::new(Mutex::new(BTreeMap::<u64, u32>::new()));
    let log = seen.clone();
    let consumed = stream
        .group("g")
        .consumer()
        .until_caught_up()
        .run(move |message: Delivery<u64>| {
            *log.lock().unwrap().entry(message.payload).or_default() += 1;
            async {}
        })
        .await
        .unwrap();
    assert_eq!(consumed.handled, 20_000);
    let seen = std::mem::take(&mut *seen.lock().unwrap());
    assert_eq!(seen.len(), 20_000);
    assert!(seen.values().all(|times| *times == 1));
    for (table, rows) in
        [("consumer_group_cursor_1", 1), ("consumer_lease_1", 0), ("exception_queue_1", 0)]
    {
        assert_eq!(
            count(&db, &format!("SELECT count(*) FROM sqlstreams.{table}")).await,
            rows,
            "{table}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn failures_retry_die_and_come_back_by_redrive() {
    let (client, db) = client().await;
    let stream = numbers(&client, "failing", 1_000).await;
    let policy =
        RetryPolicy::attempts(3).backoff(Duration::from_millis(5), 1.0, Duration::from_millis(5));
    let handler = |message: Delivery<u64>| async move {
        match (message.payload % 100, message.attempt()) {
            (7, _) => Err("always".to_owned()),
            (8, 1) => Err("once".to_owned()),
            (9, _) => Ok(Outcome::Dead("on purpose".into())),
            (10, 1) if message.payload == 10 => panic!("boom"),
            _ => Ok(Outcome::Done),
        }
    };
    let consumed =
        stream.group("g").retry(policy).consumer().until_caught_up().run(handler).await.unwrap();
    assert_eq!(consumed.handled, 980);
    assert_eq!(consumed.dead_at_once, 10);
    assert_eq!(
        count(&db, "SELECT count(*) FROM sqlstreams.exception_queue_1 WHERE state = 'dead'").await,
        20
    );

    let group = stream.group("g").open().await.unwrap();
    let dead = group.dead_letters(0, 100).await.unwrap();
    assert_eq!(dead.len(), 20);
    assert_eq!((dead[0].attempts, dead[0].last_error.as_deref()), (3, Some("always")));
    assert_eq!(group.redrive(None, 1000).await.unwrap().len(), 20);
    assert!(group.redrive(None, 1000).await.unwrap().is_empty());
    let consumed = group.consumer().until_caught_up().run(async |_| {}).await.unwrap();
    assert_eq!(consumed.handled, 20);
    assert_eq!(count(&db, "SELECT count(*) FROM sqlstreams.exception_queue_1").await, 0);
}

/// What failed is tried again while there is a backlog, not at its end.
#[tokio::test(flavor = "multi_thread")]
async fn retries_do_not_wait_for_the_end_of_a_backlog() {
    const MESSAGES: u64 = 20_000;
    let (client, _db) = client().await;
    let stream = numbers(&client, "backlog", MESSAGES).await;
    let policy = RetryPolicy::attempts(5).backoff(Duration::ZERO, 1.0, Duration::ZERO);
    let first_deliveries = Arc::new(AtomicU64::new(0));
    let before_first_retry = Arc::new(AtomicU64::new(u64::MAX));
    let (seen, mark) = (first_deliveries.clone(), before_first_retry.clone());
    let handler = move |message: Delivery<u64>| {
        match message.attempt() {
            1 => seen.fetch_add(1, Ordering::Relaxed),
            _ => mark.fetch_min(seen.load(Ordering::Relaxed), Ordering::Relaxed),
        };
        async move {
            tokio::time::sleep(Duration::from_millis(1)).await;
            if message.attempt() == 1 && message.payload.is_multiple_of(20) {
                Err("once")
            } else {
                Ok(())
            }
        }
    };
    let group = stream.group("g").retry(policy);
    group.consumer().concurrency(8).until_caught_up().run(handler).await.unwrap();
    assert_eq!(first_deliveries.load(Ordering::Relaxed), MESSAGES);
    let before = before_first_retry.load(Ordering::Relaxed);
    assert!(before < MESSAGES / 2, "{before} messages were delivered before the first retry");
}
