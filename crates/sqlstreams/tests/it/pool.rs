//! The pool: no wait of its users for each other, and nothing lost of it by calls that nobody waits for any more.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sqlstreams::{Client, Delivery, Outgoing, Transaction};
use tokio::sync::Barrier;
use tokio::time::timeout;

use crate::support::{connect, count, database, numbers, until};

/// Far more than any of this takes, far less than for ever.
const NOT_FOR_EVER: Duration = Duration::from_secs(90);

/// Handlers that hold a connection each and want another: as many as there are connections, and more.
#[tokio::test(flavor = "multi_thread")]
async fn tb_160_tb_067_handlers_that_hold_all_connections_do_not_wait_for_each_other() {
    const MESSAGES: u64 = 200;
    for (pool, handlers) in [(2, 50), (8, 8), (8, 50)] {
        let url = database().await;
        let client = Client::builder(&url).pool_size(pool).connect().await.unwrap();
        let orders = numbers(&client, "orders", MESSAGES).await;
        let inside = client.stream::<u64>("inside").create().await.unwrap();
        let beside = client.stream::<u64>("beside").create().await.unwrap();
        let (within, producer) = (inside.clone(), beside.producer());
        let consuming = orders.group("g").consumer().concurrency(handlers).until_caught_up();
        let consumed =
            consuming.run_transactional(move |message: Delivery<u64>, tx: Transaction| {
                let (within, producer) = (within.clone(), producer.clone());
                async move {
                    within.send_in(&*tx, &message.payload).await?;
                    producer.send(&message.payload).await?;
                    within.send_in(&*tx, &message.payload).await?;
                    drop(tx);
                    Ok::<_, sqlstreams::Error>(())
                }
            });
        let consumed = timeout(NOT_FOR_EVER, consumed).await.expect("they hang").unwrap();
        assert_eq!((consumed.handled, consumed.failed), (MESSAGES, 0), "pool of {pool}");
        let db = connect(&url).await;
        assert_eq!(count(&db, "SELECT count(*) FROM sqlstreams.message_log_2").await, 400);
        assert_eq!(count(&db, "SELECT count(*) FROM sqlstreams.message_log_3").await, 200);
    }
}

/// The caller's transactions are on connections of the caller's.
#[tokio::test(flavor = "multi_thread")]
async fn tb_067_fifty_transactions_that_produce_share_a_pool_of_two() {
    let url = database().await;
    let client = Client::builder(&url).pool_size(2).connect().await.unwrap();
    let stream = client.stream::<u64>("orders").notify(true).create().await.unwrap();
    let open = Arc::new(Barrier::new(50));
    let sending = (0..50).map(|n| {
        let (url, stream, open) = (url.clone(), stream.clone(), open.clone());
        tokio::spawn(async move {
            let mut db = connect(&url).await;
            let tx = db.transaction().await.unwrap();
            stream.send_in(&tx, &n).await.unwrap();
            // All are open at once, and the pool is wanted as well.
            open.wait().await;
            stream.producer().send(&(n + 100)).await.unwrap();
            tx.commit().await.unwrap();
        })
    });
    let all = futures_util::future::try_join_all(sending);
    timeout(NOT_FOR_EVER, all).await.expect("they hang").unwrap();
    let caught_up = stream.group("g").consumer().until_caught_up();
    let consumed = timeout(NOT_FOR_EVER, caught_up.run(async |_: Delivery<u64>| {})).await;
    assert_eq!(consumed.expect("it hangs").unwrap().handled, 100);
}

#[tokio::test(flavor = "multi_thread")]
async fn tb_158_calls_that_are_cancelled_cost_the_pool_nothing() {
    const POOL: usize = 4;
    let url = database().await;
    let client = Client::builder(&url).pool_size(POOL).connect().await.unwrap();
    let stream = numbers(&client, "orders", 50).await;
    let group = stream.group("g").create().await.unwrap();
    let db = connect(&url).await;

    let cancelled = Arc::new(AtomicUsize::new(0));
    let callers = (0..16_u64).map(|caller| {
        let (stream, group, cancelled) = (stream.clone(), group.clone(), cancelled.clone());
        tokio::spawn(async move {
            for call in 0..400_u64 {
                // Some are not cancelled, however slow the machine is.
                let after = match call % 8 {
                    0 => Duration::from_secs(60),
                    _ => Duration::from_micros(fastrand::u64(1..300).pow(2)),
                };
                let numbers: Vec<u64> = (0..20).collect();
                let producer = stream.producer();
                let done = match (caller + call) % 6 {
                    0 => timeout(after, producer.send(&call).into_future()).await.is_ok(),
                    1 => {
                        let all = producer.send_all(numbers.iter().map(Outgoing::new));
                        timeout(after, all).await.is_ok()
                    }
                    2 => timeout(after, group.status()).await.is_ok(),
                    3 => timeout(after, stream.read(&[1, 2, 3])).await.is_ok(),
                    4 => timeout(after, stream.info()).await.is_ok(),
                    _ => {
                        let run = group.consumer().concurrency(2).until_caught_up();
                        timeout(after, run.run(async |_: Delivery<u64>| {})).await.is_ok()
                    }
                };
                cancelled.fetch_add(usize::from(!done), Ordering::Relaxed);
            }
        })
    });
    futures_util::future::try_join_all(callers).await.unwrap();
    let cancelled = cancelled.load(Ordering::Relaxed);
    println!("{cancelled} of 6400 calls were cancelled");
    assert!((1_000..=5_600).contains(&cancelled), "{cancelled}");

    // No transaction was left open, and no more connections than there may be: the pool's and the listener.
    until("the sessions are idle", Duration::from_secs(30), async || {
        let open = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() AND state <> 'idle'";
        let all = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()";
        count(&db, open).await == 0 && count(&db, all).await <= POOL as i64 + 1
    })
    .await;

    // All of the pool can be used at once: by this many transactions that wait for each other, and one call beside them.
    let (together, seen) =
        (Arc::new(Barrier::new(POOL - 1)), Arc::new(Mutex::new(BTreeSet::new())));
    let last = numbers(&client, "last", POOL as u64 - 1).await;
    let (log, status) = (seen.clone(), group.clone());
    let run = last.group("g").consumer().concurrency(POOL - 1).until_caught_up();
    let run = run.run_transactional(move |_: Delivery<u64>, tx: Transaction| {
        let (together, log, status) = (together.clone(), log.clone(), status.clone());
        async move {
            let pid: i32 = tx.query_one("SELECT pg_backend_pid()", &[]).await.unwrap().get(0);
            log.lock().unwrap().insert(pid);
            together.wait().await;
            status.status().await.unwrap();
            together.wait().await;
        }
    });
    let consumed = timeout(NOT_FOR_EVER, run).await.expect("connections are missing").unwrap();
    assert_eq!((consumed.handled, seen.lock().unwrap().len()), (3, 3));
}

/// The first leaves while the second, which found no connection unreserved, has work.
#[tokio::test(flavor = "multi_thread")]
async fn consumers_that_share_the_connections_for_handlers_do_not_lose_them_with_the_first() {
    const POOL: usize = 4;
    let url = database().await;
    let client = Client::builder(&url).pool_size(POOL).connect().await.unwrap();
    let first = numbers(&client, "first", 3).await;
    let second = numbers(&client, "second", 300).await;
    let db = connect(&url).await;

    let (all, started) = (Arc::new(Barrier::new(POOL - 1)), Arc::new(Barrier::new(2)));
    let begin = started.clone();
    let consuming = first.group("g").consumer().concurrency(POOL - 1).until_caught_up();
    let consuming = consuming.run_transactional(move |message: Delivery<u64>, tx: Transaction| {
        let (all, begin) = (all.clone(), begin.clone());
        async move {
            all.wait().await;
            if message.payload == 0 {
                begin.wait().await;
            }
            drop(tx);
        }
    });
    let consuming = tokio::spawn(consuming.into_future());
    started.wait().await;
    let most = Arc::new(AtomicUsize::new(0));
    let seen = most.clone();
    let consumed = second.group("g").consumer().concurrency(10).until_caught_up();
    let consumed = consumed.run_transactional(move |message: Delivery<u64>, tx: Transaction| {
        let seen = seen.clone();
        async move {
            // What is used when connections are reserved is closed when it is given back.
            if message.payload < 150 {
                return;
            }
            let all = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()";
            seen.fetch_max(count(&tx, all).await as usize, Ordering::Relaxed);
        }
    });
    let consumed = timeout(NOT_FOR_EVER, consumed).await.expect("it has no connection").unwrap();
    assert_eq!(consumed.handled, 300);
    assert_eq!(consuming.await.unwrap().unwrap().handled, 3);
    // The pool, the listener, and `db`.
    assert!(most.load(Ordering::Relaxed) <= POOL + 2, "{most:?}");
    // They are the client's again.
    let calls = (0..20).map(|_| client.streams());
    timeout(NOT_FOR_EVER, futures_util::future::try_join_all(calls)).await.unwrap().unwrap();
    let all = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()";
    until("some are closed", Duration::from_secs(30), async || {
        count(&db, all).await <= POOL as i64 + 1
    })
    .await;
}
