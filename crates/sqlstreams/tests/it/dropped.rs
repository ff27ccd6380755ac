//! A `run()` that is dropped: what it had is handed back, though its client lives on.

use std::time::Duration;

use sqlstreams::{Activity, Client, Delivery, ErrorKind, Outgoing};

use crate::support::{database, until};

const SECONDS: Duration = Duration::from_secs(30);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_dropped_consumer_had_is_handled_at_once() {
    let url = database().await;
    let client = Client::connect(&url).await.unwrap();
    let stream = client.stream::<u64>("numbers").create().await.unwrap();
    let group = stream.group("g").lease(Duration::from_secs(600)).create().await.unwrap();
    let numbers: Vec<u64> = (0..100).collect();
    stream.producer().send_all(numbers.iter().map(Outgoing::new)).await.unwrap();

    let consumer = group.consumer();
    let health = consumer.health();
    let running = tokio::spawn(consumer.run(|_: Delivery<u64>| std::future::pending::<()>()));
    until("its handlers run", SECONDS, async || health.snapshot().in_flight == 16).await;
    running.abort();
    until("it has stopped", SECONDS, async || {
        let health = health.snapshot();
        health.activity == Activity::Stopped && health.in_flight == 0
    })
    .await;

    let other = Client::connect(&url).await.unwrap();
    let group = other.stream::<u64>("numbers").open().await.unwrap().group("g");
    let consuming = group.consumer().until_caught_up().run(|_: Delivery<u64>| async {});
    let consumed = tokio::time::timeout(Duration::from_secs(30), consuming).await.unwrap();
    assert_eq!(consumed.unwrap().handled, 100);
}

#[tokio::test]
async fn settings_out_of_range_are_refused() {
    let url = database().await;
    for size in [0, 1, 10_001, usize::MAX] {
        let error = Client::builder(&url).pool_size(size).connect().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidConfig, "{size}");
    }
    let client = Client::connect(&url).await.unwrap();
    let group = client.stream::<u64>("numbers").create().await.unwrap().group("g");
    let consumer = || group.clone().consumer();
    for wrong in [
        consumer().concurrency(0),
        consumer().concurrency(10_001),
        consumer().concurrency(usize::MAX),
        consumer().timeout(Duration::ZERO),
    ] {
        let error = wrong.run(|_: Delivery<u64>| async {}).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    }
}
