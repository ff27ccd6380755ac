//! The fence across crashes of the server: prepared transactions survive them under another name, ids jump ahead.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use sqlstreams_dev::{Cluster, StopMode};

use crate::fence::{Producer, SETUP};
use crate::plain::{Plain, create_group, installed};
use crate::support::{connect, count};

const PRODUCERS: u64 = 8;

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn prepared_transactions_that_survive_a_crash_are_waited_for() {
    let found = crash_and_go_on(3, true).await;
    assert!(found.survived >= 6, "only {} prepared transactions survived", found.survived);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn tb_003_ids_drawn_after_an_immediate_stop_are_delivered() {
    crash_and_go_on(2, false).await;
}

struct Found {
    survived: usize,
}

/// Produces, crashes, goes on; at the end each group must have got exactly what the log holds, once.
async fn crash_and_go_on(rounds: usize, with_prepared: bool) -> Found {
    let start = || Arc::new(Cluster::builder().durable(true).start().unwrap());
    let cluster = tokio::task::spawn_blocking(start).await.unwrap();
    let url = cluster.url("postgres");
    let setup = installed(&url).await;
    let groups = [setup.group, create_group(&setup.db, setup.stream, "h").await];
    setup.db.batch_execute(SETUP).await.unwrap();

    let mut got: BTreeMap<(i64, i64), u32> = BTreeMap::new();
    let mut survived = 0;
    for round in 0..rounds {
        let stop = Arc::new(AtomicBool::new(false));
        let claimers = start_claimers(&url, setup.stream, &groups, &stop).await;
        let mut producers = Vec::new();
        for number in 0..PRODUCERS {
            let producer = Producer::new(connect(&url).await, round as u64 * 100 + number);
            producers.push(tokio::spawn(produce(producer, with_prepared)));
        }
        tokio::time::sleep(Duration::from_millis(900)).await;
        // The groups see the gaps of the prepared transactions, then stand still: what they got is known exactly.
        stop.store(true, Ordering::SeqCst);
        collect(&mut got, claimers).await;

        let crashing = cluster.clone();
        let crash = move || {
            match round % 2 {
                0 => crashing.stop(StopMode::Immediate).unwrap(),
                _ => crashing.kill().unwrap(),
            }
            crashing.start_again().unwrap();
        };
        tokio::task::spawn_blocking(crash).await.unwrap();
        join_all(producers).await;

        // New messages above the gaps of those that survived, and groups that look at these gaps.
        let db = connect(&url).await;
        let rows = db.query("SELECT gid FROM pg_prepared_xacts", &[]).await.unwrap();
        let names: Vec<String> = rows.iter().map(|row| row.get(0)).collect();
        survived += names.len();
        let stop = Arc::new(AtomicBool::new(false));
        let claimers = start_claimers(&url, setup.stream, &groups, &stop).await;
        let mut producer = Producer::new(connect(&url).await, round as u64 * 100 + 99);
        for _ in 0..40 {
            producer.produce().await.unwrap();
        }
        tokio::time::sleep(Duration::from_millis(300)).await;
        for (place, name) in names.iter().enumerate() {
            let word = if place % 4 == 3 { "ROLLBACK" } else { "COMMIT" };
            db.batch_execute(&format!("{word} PREPARED '{name}'")).await.unwrap();
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
        stop.store(true, Ordering::SeqCst);
        collect(&mut got, claimers).await;
    }

    let mut last = Plain { db: connect(&url).await, stream: setup.stream, group: 0 };
    let rows = last.db.query(&format!("SELECT id FROM {}", last.log()), &[]).await.unwrap();
    let log: Vec<i64> = rows.iter().map(|row| row.get(0)).collect();
    let head = count(&last.db, "SELECT sqlstreams.stream_head(1)").await;
    for group in groups {
        last.group = group;
        while last.claimed().await < head {
            if let Some(lease) = last.claim(1000).await {
                for id in last.fetch(&lease).await {
                    *got.entry((group, id)).or_default() += 1;
                }
                assert!(last.settle(&lease, "{[1,)}").await);
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let missing: Vec<_> = log.iter().filter(|id| !got.contains_key(&(group, **id))).collect();
        let repeated: Vec<_> = got.iter().filter(|g| g.0.0 == group && *g.1 > 1).collect();
        assert!(missing.is_empty(), "{} of {} missing: {missing:?}", missing.len(), log.len());
        assert!(repeated.is_empty(), "repeated: {repeated:?}");
    }
    println!("{} messages, {survived} prepared transactions survived {rounds} crashes", log.len());
    assert!(log.len() > 100 * rounds, "too little was produced: {}", log.len());
    Found { survived }
}

/// Produces until the connection breaks, leaving a prepared transaction behind now and then.
async fn produce(mut producer: Producer, with_prepared: bool) {
    for turn in 0.. {
        let left = turn % 15 == 2 && with_prepared;
        let ended =
            if left { producer.prepare().await.map(|_| ()) } else { producer.produce().await };
        if ended.is_err() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

type Claimers = Vec<(i64, tokio::task::JoinHandle<Vec<i64>>)>;

async fn start_claimers(
    url: &str,
    stream: i64,
    groups: &[i64],
    stop: &Arc<AtomicBool>,
) -> Claimers {
    let mut claimers = Vec::new();
    for &group in groups.iter().flat_map(|group| [group; 2]) {
        let plain = Plain { db: connect(url).await, stream, group };
        claimers.push((group, tokio::spawn(claim_until(plain, stop.clone()))));
    }
    claimers
}

async fn claim_until(plain: Plain, stop: Arc<AtomicBool>) -> Vec<i64> {
    let mut got = Vec::new();
    while !stop.load(Ordering::SeqCst) {
        match plain.claim(100).await {
            Some(lease) => {
                got.extend(plain.fetch(&lease).await);
                assert!(plain.settle(&lease, "{[1,)}").await);
            }
            None => {
                plain.let_look().await;
                tokio::time::sleep(Duration::from_millis(3)).await;
            }
        }
    }
    got
}

async fn collect(got: &mut BTreeMap<(i64, i64), u32>, claimers: Claimers) {
    for (group, claimer) in claimers {
        for id in claimer.await.unwrap() {
            *got.entry((group, id)).or_default() += 1;
        }
    }
}
