//! A consumer whose handlers become slow leaves to others what it cannot do soon.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use sqlstreams::{CancellationToken, Client, Delivery, Outgoing};
use tokio::sync::Semaphore;

use crate::support::{connect, count, database, until};

const SECONDS: Duration = Duration::from_secs(30);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_waits_behind_slow_handlers_goes_to_others() {
    let url = database().await;
    let client = Client::connect(&url).await.unwrap();
    let stream = client.stream::<u64>("numbers").create().await.unwrap();
    let group = stream.group("g").lease(Duration::from_secs(3)).create().await.unwrap();
    let send = async |numbers: std::ops::Range<u64>| {
        let numbers: Vec<u64> = numbers.collect();
        stream.producer().send_all(numbers.iter().map(Outgoing::new)).await.unwrap();
    };

    // So fast at first that it takes thousands at a time; then each handler waits for the gate.
    let (slow, gate) = (Arc::new(AtomicBool::new(false)), Arc::new(Semaphore::new(0)));
    let done = Arc::new(AtomicUsize::new(0));
    let stop = CancellationToken::new();
    let first = {
        let (slow, gate, done) = (slow.clone(), gate.clone(), done.clone());
        let consumer = group.consumer().stop_on(stop.clone());
        let health = consumer.health();
        let running = tokio::spawn(consumer.run(move |_: Delivery<u64>| {
            let (slow, gate, done) = (slow.clone(), gate.clone(), done.clone());
            async move {
                if slow.load(Ordering::Relaxed) {
                    gate.acquire().await.unwrap().forget();
                }
                done.fetch_add(1, Ordering::Relaxed);
            }
        }));
        (health, running)
    };
    send(0..30_000).await;
    until("the first has done all", SECONDS, async || done.load(Ordering::Relaxed) == 30_000).await;
    slow.store(true, Ordering::Relaxed);
    send(0..10_000).await;
    until("the first holds many", SECONDS, async || first.0.snapshot().held > 1_000).await;

    let second = {
        let done = done.clone();
        let client = Client::connect(&url).await.unwrap();
        let group = client.stream::<u64>("numbers").open().await.unwrap().group("g");
        let consumer = group.consumer().stop_on(stop.clone());
        tokio::spawn(consumer.run(move |_: Delivery<u64>| {
            done.fetch_add(1, Ordering::Relaxed);
            async {}
        }))
    };
    let most = || done.load(Ordering::Relaxed) >= 40_000 - 100;
    until("the second has done the rest", SECONDS, async || most()).await;
    assert_eq!(first.0.snapshot().in_flight, 16);

    // What the first kept is done by it, and by nobody else.
    gate.add_permits(1_000);
    let db = connect(&url).await;
    let left = "SELECT count(*) FROM sqlstreams.consumer_lease_1";
    until("no lease is left", SECONDS, async || count(&db, left).await == 0).await;
    stop.cancel();
    first.1.await.unwrap().unwrap();
    second.await.unwrap().unwrap();
    assert_eq!(done.load(Ordering::Relaxed), 40_000);
    assert_eq!(count(&db, "SELECT count(*) FROM sqlstreams.exception_queue_1").await, 0);
}
