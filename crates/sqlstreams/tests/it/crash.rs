//! A server that is killed under load: what a producer was told is stored is stored.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sqlstreams::{CancellationToken, Client, Delivery};
use sqlstreams_dev::Cluster;

use crate::support::{connect, count};

/// TB-138 as well: producers and consumers go on by themselves when the server is back.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn tb_138_nothing_acknowledged_is_lost_when_the_server_is_killed() {
    let start = || Arc::new(Cluster::builder().durable(true).start().unwrap());
    let cluster = tokio::task::spawn_blocking(start).await.unwrap();
    let url = cluster.url("postgres");
    let client = Client::connect(&url).await.unwrap();
    let stream = client.stream::<u64>("orders").create().await.unwrap();

    let stop = CancellationToken::new();
    let handled: Arc<Mutex<BTreeMap<i64, u32>>> = Arc::default();
    let log = handled.clone();
    let group = stream.group("g").lease(Duration::from_secs(2)).create().await.unwrap();
    let consumer =
        tokio::spawn(group.consumer().stop_on(stop.clone()).run(move |message: Delivery<u64>| {
            *log.lock().unwrap().entry(message.id).or_default() += 1;
            async {}
        }));
    let producing = CancellationToken::new();
    let producer = stream.producer();
    let senders: Vec<_> = (0..12_u64)
        .map(|sender| {
            let (producer, producing) = (producer.clone(), producing.clone());
            tokio::spawn(async move {
                let (mut acknowledged, mut refused) = (Vec::new(), 0_u32);
                for n in 0.. {
                    if producing.is_cancelled() {
                        break;
                    }
                    let payload = sender * 1_000_000_000 + n;
                    match producer.send(&payload).await {
                        Ok(receipt) => acknowledged.push((receipt.id, payload)),
                        Err(_) => {
                            refused += 1;
                            tokio::time::sleep(Duration::from_millis(50)).await;
                        }
                    }
                }
                (acknowledged, refused)
            })
        })
        .collect();
    for _ in 0..3 {
        tokio::time::sleep(Duration::from_millis(700)).await;
        let crashing = cluster.clone();
        let crash = move || {
            crashing.kill().unwrap();
            crashing.start_again().unwrap();
        };
        tokio::task::spawn_blocking(crash).await.unwrap();
    }
    tokio::time::sleep(Duration::from_millis(700)).await;
    producing.cancel();
    let (mut acknowledged, mut refused) = (Vec::new(), 0);
    for sender in senders {
        let (ids, errors) = sender.await.unwrap();
        acknowledged.extend(ids);
        refused += errors;
    }

    let db = connect(&url).await;
    let rows = db
        .query("SELECT id, payload::text::bigint FROM sqlstreams.message_log_1", &[])
        .await
        .unwrap();
    let stored: BTreeMap<i64, i64> = rows.iter().map(|row| (row.get(0), row.get(1))).collect();
    println!(
        "{} messages acknowledged, {refused} refused, {} stored",
        acknowledged.len(),
        stored.len()
    );
    for (id, payload) in &acknowledged {
        assert_eq!(stored.get(id), Some(&(*payload as i64)), "message {id} was acknowledged");
    }
    assert!(acknowledged.len() > 100, "no load");
    // A server that is back within seconds is waited for; an error would mean unknown at most.
    assert!(stored.len() - acknowledged.len() <= refused as usize);

    // The consumer has everything, too, at least once.
    let head = count(&db, "SELECT sqlstreams.stream_head(1)").await;
    let deadline = tokio::time::Instant::now() + Duration::from_secs(40);
    loop {
        let resolved: bool = db
            .query_one("SELECT sqlstreams.is_resolved(1, $1, $2)", &[&group.id(), &head])
            .await
            .unwrap()
            .get(0);
        if resolved {
            break;
        }
        assert!(tokio::time::Instant::now() < deadline, "the consumer does not get to the end");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    stop.cancel();
    consumer.await.unwrap().unwrap();
    let handled = handled.lock().unwrap();
    let missed: Vec<_> = stored.keys().filter(|id| !handled.contains_key(id)).collect();
    assert!(missed.is_empty(), "never handled: {missed:?}");
}
