//! Transactional consume: a handler's writes and the settling of its messages commit together, or not at all.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use sqlstreams::{CancellationToken, Client, Delivery, Outcome, RetryPolicy, Transaction};
use tokio::sync::oneshot;

use crate::plain::installed;
use crate::support::{client, connect, count, database, eventually, numbers};

const EFFECT: &str = "CREATE TABLE effect (message bigint NOT NULL, attempt int NOT NULL)";

/// What a handler does for its message.
async fn write(message: &Delivery<u64>, tx: &Transaction) -> Result<(), tokio_postgres::Error> {
    let attempt = message.attempt() as i32;
    tx.execute("INSERT INTO effect VALUES ($1, $2)", &[&message.id, &attempt]).await?;
    Ok(())
}

/// Tries again at once, so often.
fn at_once(attempts: u32) -> RetryPolicy {
    RetryPolicy::attempts(attempts).backoff(Duration::ZERO, 1.0, Duration::ZERO)
}

async fn last_error(db: &tokio_postgres::Client) -> String {
    let sql = "SELECT last_error FROM sqlstreams.exception_queue_1";
    db.query_one(sql, &[]).await.unwrap().get(0)
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_settled_leaves_no_rows_behind() {
    let (client, db) = client().await;
    db.batch_execute(EFFECT).await.unwrap();
    let stream = numbers(&client, "s", 1_000).await;
    let consumed = stream
        .group("g")
        .retry(at_once(2))
        .consumer()
        .until_caught_up()
        .run_transactional(async |message: Delivery<u64>, tx| {
            write(&message, &tx).await.map_err(|e| e.to_string())?;
            match (message.payload % 10, message.attempt()) {
                (3, 1) => Err("once".to_owned()),
                (7, _) => Err("always".to_owned()),
                _ => Ok(()),
            }
        })
        .await
        .unwrap();
    assert_eq!((consumed.handled, consumed.failed), (900, 300));
    // Nothing of an attempt that failed, and each of the others once.
    for (sql, expected) in [
        ("SELECT count(*) FROM effect", 900),
        ("SELECT count(DISTINCT message) FROM effect", 900),
        ("SELECT count(*) FROM effect WHERE attempt = 2", 100),
        ("SELECT count(*) FROM sqlstreams.exception_queue_1 WHERE state = 'dead'", 100),
        ("SELECT count(*) FROM sqlstreams.exception_queue_1", 100),
        ("SELECT count(*) FROM sqlstreams.consumer_done_1", 0),
        ("SELECT count(*) FROM sqlstreams.consumer_lease_1", 0),
    ] {
        assert_eq!(count(&db, sql).await, expected, "{sql}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_that_the_server_refuses_is_a_failure() {
    let (client, db) = client().await;
    db.batch_execute("CREATE TABLE account (id bigint PRIMARY KEY)").await.unwrap();
    db.batch_execute(
        "CREATE TABLE effect (message bigint NOT NULL, attempt int NOT NULL,
             account bigint DEFAULT 1 REFERENCES account DEFERRABLE INITIALLY DEFERRED)",
    )
    .await
    .unwrap();
    let stream = numbers(&client, "s", 1).await;
    let consumer = stream.group("g").retry(at_once(2)).consumer().until_caught_up();
    let consumed = consumer
        .run_transactional(async |message: Delivery<u64>, tx| write(&message, &tx).await)
        .await
        .unwrap();
    assert_eq!((consumed.handled, consumed.failed), (0, 2));
    assert_eq!(count(&db, "SELECT count(*) FROM effect").await, 0);
    let error = last_error(&db).await;
    assert!(error.contains("violates foreign key constraint"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_ends_its_transaction_fails() {
    for ending in ["COMMIT", "ROLLBACK", "ROLLBACK; BEGIN", "COMMIT; BEGIN"] {
        let (client, db) = client().await;
        db.batch_execute(EFFECT).await.unwrap();
        let stream = numbers(&client, "s", 1).await;
        let consumer = stream.group("g").retry(at_once(1)).consumer().until_caught_up();
        let consumed = consumer
            .run_transactional(async move |message: Delivery<u64>, tx| {
                tx.batch_execute(ending).await?;
                if ending.ends_with("BEGIN") {
                    write(&message, &tx).await?;
                }
                Ok::<_, tokio_postgres::Error>(())
            })
            .await
            .unwrap();
        assert_eq!((consumed.handled, consumed.failed), (0, 1), "{ending}");
        let error = last_error(&db).await;
        assert!(error.contains("ended the transaction that it was given"), "{ending}: {error}");
        assert_eq!(count(&db, "SELECT count(*) FROM effect").await, 0, "{ending}");
        assert_eq!(count(&db, "SELECT count(*) FROM sqlstreams.consumer_done_1").await, 0);
    }
}

/// Savepoints are the handler's business, and an error that it swallows is not.
#[tokio::test(flavor = "multi_thread")]
async fn savepoints_are_fine_and_an_aborted_transaction_is_not() {
    let (client, db) = client().await;
    db.batch_execute(EFFECT).await.unwrap();
    let stream = numbers(&client, "s", 2).await;
    let consumer = stream.group("g").retry(at_once(1)).consumer().until_caught_up();
    let consumed = consumer
        .run_transactional(async |message: Delivery<u64>, tx| {
            write(&message, &tx).await?;
            match message.payload {
                0 => {
                    tx.batch_execute("SAVEPOINT a").await?;
                    let _ = tx.batch_execute("SELECT 1 / 0").await;
                    tx.batch_execute("ROLLBACK TO a").await?;
                }
                _ => {
                    let _ = tx.batch_execute("SELECT 1 / 0").await;
                }
            }
            Ok::<_, tokio_postgres::Error>(())
        })
        .await
        .unwrap();
    assert_eq!((consumed.handled, consumed.failed), (1, 1));
    assert_eq!(count(&db, "SELECT count(*) FROM effect").await, 1);
    let error = last_error(&db).await;
    assert!(error.contains("current transaction is aborted"), "{error}");
}

/// What a handler has started and left behind cannot write any more, neither into the transaction nor after it.
#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_that_is_kept_is_worth_nothing() {
    for timeout in [None, Some(Duration::from_millis(50))] {
        let url = database().await;
        let client = Client::builder(&url).pool_size(2).connect().await.unwrap();
        let db = connect(&url).await;
        db.batch_execute(EFFECT).await.unwrap();
        let stream = numbers(&client, "s", 20).await;
        let (tell, told) = oneshot::channel();
        let tell = Arc::new(std::sync::Mutex::new(Some(tell)));
        let mut consumer = stream.group("g").retry(at_once(1)).consumer().until_caught_up();
        if let Some(timeout) = timeout {
            consumer = consumer.timeout(timeout);
        }
        let handler = move |message: Delivery<u64>, tx: Transaction| {
            let tell = tell.clone();
            async move {
                if message.payload > 0 {
                    return write(&message, &tx).await;
                }
                write(&message, &tx).await?;
                let tell = tell.lock().unwrap().take();
                tokio::spawn(async move {
                    let mut written = Vec::new();
                    while written.last() != Some(&false) && written.len() < 1_000 {
                        tokio::time::sleep(Duration::from_millis(30)).await;
                        written.push(write(&message, &tx).await.is_ok());
                    }
                    let _ = tx.batch_execute("COMMIT").await;
                    drop(tx);
                    tell.map(|tell| tell.send(written))
                });
                if timeout.is_some() {
                    std::future::pending::<()>().await;
                }
                Ok(())
            }
        };
        let consumed = consumer.run_transactional(handler).await.unwrap();
        let written = told.await.unwrap();
        assert!(!written.last().unwrap(), "{timeout:?}: {written:?}");
        assert_eq!((consumed.handled, consumed.failed), (19, 1), "{timeout:?}");
        let sql = "SELECT count(*) FROM effect WHERE message = 1";
        assert_eq!(count(&db, sql).await, 0, "{timeout:?}");
        assert_eq!(count(&db, "SELECT count(*) FROM effect").await, 19, "{timeout:?}");
        if timeout.is_none() {
            let error = last_error(&db).await;
            assert!(error.contains("kept its transaction"), "{error}");
        }
        // The pool is whole.
        stream.producer().send(&1).await.unwrap();
        let again = stream.group("g").consumer().until_caught_up();
        again.run_transactional(async |m: Delivery<u64>, tx| write(&m, &tx).await).await.unwrap();
        assert_eq!(count(&db, "SELECT count(*) FROM effect").await, 20, "{timeout:?}");
    }
}

/// A consumer that is dropped while something its handler has started goes on: the writes of that never commit.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_committed_for_a_consumer_that_is_gone() {
    let (client, db) = client().await;
    db.batch_execute(EFFECT).await.unwrap();
    let stream = numbers(&client, "s", 1).await;
    let (started, mut starts) = tokio::sync::mpsc::unbounded_channel();
    let group = stream.group("g").lease(Duration::from_secs(1));
    let running = tokio::spawn(group.clone().consumer().run_transactional(
        move |message: Delivery<u64>, tx: Transaction| {
            let started = started.clone();
            async move {
                let (done, ended) = oneshot::channel();
                tokio::spawn(async move {
                    let _ = write(&message, &tx).await;
                    let _ = started.send(ended);
                    tokio::time::sleep(Duration::from_millis(500)).await;
                    let _ = write(&message, &tx).await;
                    drop(tx);
                    let _ = done.send(());
                });
                std::future::pending::<()>().await;
            }
        },
    ));
    let ended: oneshot::Receiver<()> = starts.recv().await.unwrap();
    running.abort();
    ended.await.unwrap();
    // Its connection, were it in the pool with the transaction open, would be the next one taken.
    for n in 0..8 {
        stream.producer().send(&n).await.unwrap();
    }
    let consumed = group
        .consumer()
        .until_caught_up()
        .run_transactional(async |message: Delivery<u64>, tx| write(&message, &tx).await)
        .await
        .unwrap();
    assert_eq!(consumed.handled, 9);
    assert_eq!(count(&db, "SELECT count(*) FROM effect").await, 9);
    assert_eq!(count(&db, "SELECT count(DISTINCT message) FROM effect").await, 9);
}

/// An earlier handler's commit was slow and came after all: what is settled is neither done nor counted again.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_settled_before_is_not_counted_again() {
    let (client, db) = client().await;
    db.batch_execute(EFFECT).await.unwrap();
    let stream = numbers(&client, "s", 10).await;
    let group = stream.group("g").create().await.unwrap();
    let earlier = format!("INSERT INTO sqlstreams.consumer_done_1 VALUES ({}, 7)", group.id());
    let db = Arc::new(db);
    let other = db.clone();
    let consumer = group.consumer().until_caught_up();
    let consumed = consumer
        .run_transactional(move |message: Delivery<u64>, tx: Transaction| {
            let (other, earlier) = (other.clone(), earlier.clone());
            async move {
                if message.id == 7 {
                    other.batch_execute(&earlier).await.unwrap();
                }
                write(&message, &tx).await
            }
        })
        .await
        .unwrap();
    assert_eq!((consumed.handled, consumed.failed), (9, 0));
    assert_eq!(count(&db, "SELECT count(*) FROM effect").await, 9);
    assert_eq!(count(&db, "SELECT count(*) FROM effect WHERE message = 7").await, 0);
}

/// The lease is taken over while the handler runs: its writes are rolled back, and the other's count.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_lease_rolls_back() {
    let (client, db) = client().await;
    db.batch_execute(EFFECT).await.unwrap();
    let (stream, db) = (numbers(&client, "s", 1).await, Arc::new(db));
    let runs = Arc::new(AtomicU32::new(0));
    let (calls, thief) = (runs.clone(), db.clone());
    let consumed = stream
        .group("g")
        .lease(Duration::from_secs(2))
        .consumer()
        .until_caught_up()
        .run_transactional(move |message: Delivery<u64>, tx: Transaction| {
            let (first, thief) = (calls.fetch_add(1, Ordering::SeqCst) == 0, thief.clone());
            async move {
                write(&message, &tx).await?;
                if first {
                    let steal = "UPDATE sqlstreams.consumer_lease_1 SET token = gen_random_uuid(), expires_at = clock_timestamp()";
                    assert_eq!(thief.execute(steal, &[]).await?, 1);
                }
                Ok::<_, tokio_postgres::Error>(())
            }
        })
        .await
        .unwrap();
    assert_eq!((consumed.handled, runs.load(Ordering::SeqCst)), (1, 2));
    assert_eq!(count(&db, "SELECT count(*) FROM effect").await, 1);
    assert_eq!(count(&db, "SELECT count(*) FROM sqlstreams.consumer_done_1").await, 0);
}

/// A batch over several leases of which one is lost: all is rolled back and done again, nothing is kept from the others, and
/// the connection goes back to the pool in order.
#[tokio::test(flavor = "multi_thread")]
async fn a_batch_that_loses_one_of_its_leases_is_done_again() {
    for stolen in ["min", "max"] {
        let url = database().await;
        let client = Client::builder(&url).pool_size(2).connect().await.unwrap();
        let db = Arc::new(connect(&url).await);
        db.batch_execute(EFFECT).await.unwrap();
        let stream = numbers(&client, "s", 1).await;
        let (entered, mut entries) = tokio::sync::mpsc::unbounded_channel();
        let release = Arc::new(tokio::sync::Semaphore::new(0));
        let (wait, thief) = (release.clone(), db.clone());
        let stop = CancellationToken::new();
        let group = stream.group("g").lease(Duration::from_secs(30));
        let consumer = group.consumer().concurrency(1).batch_size(10).stop_on(stop.clone());
        let running = tokio::spawn(consumer.run_transactional_batches(
            move |batch: Vec<Delivery<u64>>, tx: Transaction| {
                let (entered, wait, thief) = (entered.clone(), wait.clone(), thief.clone());
                async move {
                    for message in &batch {
                        write(message, &tx).await?;
                    }
                    let ids: Vec<i64> = batch.iter().map(|message| message.id).collect();
                    let _ = entered.send(ids.clone());
                    wait.acquire().await.unwrap().forget();
                    if ids.len() == 2 {
                        let steal = format!(
                            "UPDATE sqlstreams.consumer_lease_1 SET token = gen_random_uuid(), expires_at = clock_timestamp()
                             WHERE seq = (SELECT {stolen}(seq) FROM sqlstreams.consumer_lease_1 WHERE NOT pending @> 1::bigint)"
                        );
                        assert_eq!(thief.execute(&steal, &[]).await?, 1);
                    }
                    Ok::<_, tokio_postgres::Error>(())
                }
            },
        ));
        assert_eq!(entries.recv().await.unwrap(), [1]);
        // Two more come, each in a lease of its own, while the only worker is busy.
        for n in 1..3 {
            stream.producer().send(&n).await.unwrap();
            let leases = "SELECT count(*) FROM sqlstreams.consumer_lease_1";
            eventually(async || count(&db, leases).await == n as i64 + 1).await;
        }
        release.add_permits(100);
        eventually(async || count(&db, "SELECT count(*) FROM effect").await == 3).await;
        stop.cancel();
        let consumed = running.await.unwrap().unwrap();
        assert_eq!((consumed.handled, consumed.failed), (3, 0), "{stolen}");
        assert_eq!(count(&db, "SELECT count(DISTINCT message) FROM effect").await, 3);
        for table in ["consumer_done_1", "consumer_lease_1", "exception_queue_1"] {
            let sql = format!("SELECT count(*) FROM sqlstreams.{table}");
            assert_eq!(count(&db, &sql).await, 0, "{table}");
        }
    }
}

/// One outcome for each: what was handled is settled, what failed is tried again.
#[tokio::test(flavor = "multi_thread")]
async fn a_transactional_batch_settles_what_it_handled() {
    let (client, db) = client().await;
    db.batch_execute(EFFECT).await.unwrap();
    let stream = numbers(&client, "s", 200).await;
    let group = stream.group("g").retry(at_once(2));
    let consumer = group.consumer().batch_size(20).concurrency(4).until_caught_up();
    let consumed = consumer
        .run_transactional_batches(async |batch: Vec<Delivery<u64>>, tx| {
            let mut outcomes = Vec::new();
            for message in &batch {
                let fails = match message.payload % 10 {
                    3 => message.attempt() == 1,
                    7 => true,
                    _ => false,
                };
                match fails {
                    true => outcomes.push(Outcome::Retry("no".into())),
                    false => {
                        write(message, &tx).await?;
                        outcomes.push(Outcome::Done);
                    }
                }
            }
            Ok::<_, tokio_postgres::Error>(outcomes)
        })
        .await
        .unwrap();
    assert_eq!((consumed.handled, consumed.failed), (180, 60));
    assert_eq!(count(&db, "SELECT count(*) FROM effect").await, 180);
    assert_eq!(count(&db, "SELECT count(DISTINCT message) FROM effect").await, 180);
    assert_eq!(count(&db, "SELECT count(*) FROM effect WHERE attempt = 2").await, 20);
    assert_eq!(count(&db, "SELECT count(*) FROM sqlstreams.exception_queue_1").await, 20);
    assert_eq!(count(&db, "SELECT count(*) FROM sqlstreams.consumer_done_1").await, 0);
}

/// Waiting for a connection is not the handler's time.
#[tokio::test(flavor = "multi_thread")]
async fn the_timeout_counts_from_the_transaction_on() {
    let url = database().await;
    let client = Client::builder(&url).pool_size(2).connect().await.unwrap();
    let stream = numbers(&client, "s", 8).await;
    // One connection for eight handlers: the last waits for seven others.
    let consumer = stream.group("g").retry(at_once(1)).consumer().concurrency(8);
    let consumed = consumer
        .timeout(Duration::from_millis(700))
        .until_caught_up()
        .run_transactional(async |message: Delivery<u64>, _tx| {
            let left = message.context.deadline().unwrap() - std::time::Instant::now();
            assert!(left > Duration::from_millis(300), "{left:?}");
            tokio::time::sleep(Duration::from_millis(150)).await;
        })
        .await
        .unwrap();
    assert_eq!((consumed.handled, consumed.failed), (8, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn no_timeout_is_too_long() {
    let (client, _db) = client().await;
    let stream = numbers(&client, "s", 3).await;
    let consumer = stream.group("g").consumer().until_caught_up();
    let consumer = consumer.timeout(Duration::MAX).shutdown_timeout(Duration::MAX);
    assert_eq!(consumer.run(async |_: Delivery<u64>| {}).await.unwrap().handled, 3);
}

/// Settling refuses a transaction that is not READ COMMITTED, says so, and succeeds in one that is: under SERIALIZABLE it
/// would read an old snapshot, or fail to serialize after the work is done.
#[tokio::test(flavor = "multi_thread")]
async fn tb_142_settling_in_a_serializable_transaction_is_refused_and_safe_to_retry() {
    let plain = installed(&database().await).await;
    let settle = "SELECT sqlstreams.settle_in_transaction(1, 1, $1, ARRAY[$2::bigint])";
    let id = plain.produce(1).await[0];
    plain.db.batch_execute(EFFECT).await.unwrap();
    plain
        .db
        .batch_execute("SELECT sqlstreams.alter_group(1, 1, p_transactional => true)")
        .await
        .unwrap();
    let lease = plain.claim(1).await.unwrap();
    for (isolation, code) in [("SERIALIZABLE", "SQ003"), ("REPEATABLE READ", "SQ003")] {
        plain.db.batch_execute(&format!("BEGIN ISOLATION LEVEL {isolation}")).await.unwrap();
        plain.db.execute("INSERT INTO effect VALUES ($1, 1)", &[&id]).await.unwrap();
        let error = plain.db.execute(settle, &[&lease.token, &id]).await.unwrap_err();
        let error = error.as_db_error().unwrap();
        assert_eq!(error.code().code(), code);
        assert!(error.hint().unwrap().contains("BEGIN ISOLATION LEVEL READ COMMITTED"));
        plain.db.batch_execute("ROLLBACK").await.unwrap();
    }
    plain.db.batch_execute("BEGIN ISOLATION LEVEL READ COMMITTED").await.unwrap();
    plain.db.execute("INSERT INTO effect VALUES ($1, 1)", &[&id]).await.unwrap();
    plain.db.execute(settle, &[&lease.token, &id]).await.unwrap();
    plain.db.batch_execute("COMMIT").await.unwrap();
    assert_eq!(count(&plain.db, "SELECT count(*) FROM effect").await, 1);

    // The same through the crate, by a handler that insists.
    let (client, db) = client().await;
    db.batch_execute(EFFECT).await.unwrap();
    let stream = numbers(&client, "s", 1).await;
    let consumer = stream.group("g").retry(at_once(5)).consumer().until_caught_up();
    let consumed = consumer
        .run_transactional(async |message: Delivery<u64>, tx| {
            if message.attempt() == 1 {
                tx.batch_execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE").await?;
            }
            write(&message, &tx).await
        })
        .await
        .unwrap();
    assert_eq!((consumed.handled, consumed.failed), (1, 1));
    assert_eq!(count(&db, "SELECT count(*) FROM effect").await, 1);
}

/// A handler loses its lease between its look at it and its commit. Whoever has the message then finds out, also if it has
/// become an exception meanwhile: nothing is done twice, tried for ever or called a failure.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_late_commit_has_settled_is_over_wherever_it_is() {
    #[derive(Debug, Clone, Copy, PartialEq)]
    enum Found {
        ByTheNextHandler,
        ByTheNextFailure,
        BeforeTheFirstFailure,
    }
    for found in [Found::ByTheNextHandler, Found::ByTheNextFailure, Found::BeforeTheFirstFailure] {
        let url = database().await;
        let plain = installed(&url).await;
        let late = plain.again(&url).await;
        let transactional = "SELECT sqlstreams.alter_group(1, 1, p_transactional => true)";
        plain.db.batch_execute(transactional).await.unwrap();
        let settle = "SELECT sqlstreams.settle_in_transaction(1, 1, $1, ARRAY[$2::bigint], $3)";
        let id = plain.produce(1).await[0];
        let lost = plain.claim(1).await.unwrap();
        late.db.batch_execute("BEGIN").await.unwrap();
        late.db.execute(settle, &[&lost.token, &id, &false]).await.unwrap();
        let lapse = "UPDATE sqlstreams.consumer_lease_1 SET expires_at = clock_timestamp()";
        plain.db.batch_execute(lapse).await.unwrap();
        let lease = plain.claim(1).await.unwrap();
        assert_eq!(lease.pending, lost.pending);
        if found == Found::BeforeTheFirstFailure {
            late.db.batch_execute("COMMIT").await.unwrap();
        }
        assert!(plain.fail(&lease, &[(id, "retry", Some(0.0))]).await);
        if found != Found::BeforeTheFirstFailure {
            late.db.batch_execute("COMMIT").await.unwrap();
            let (token, ids) = plain.claim_exceptions(1, false).await;
            assert_eq!(ids, [id]);
            if found == Found::ByTheNextHandler {
                let error = plain.db.execute(settle, &[&token, &id, &true]).await.unwrap_err();
                assert_eq!(error.code().unwrap().code(), "SQ009");
                let unsettled =
                    "SELECT cardinality(sqlstreams.unsettled(1, 1, $1, ARRAY[$2::bigint], true))";
                let row = plain.db.query_one(unsettled, &[&token, &id]).await.unwrap();
                assert_eq!(row.get::<_, i32>(0), 0);
            } else {
                let lost = plain.settle_exceptions(token, &[(id, "retry", None)]).await;
                assert!(lost.is_empty(), "{lost:?}");
            }
        }
        for table in ["consumer_done_1", "exception_queue_1", "consumer_lease_1"] {
            let sql = format!("SELECT count(*) FROM sqlstreams.{table}");
            assert_eq!(count(&plain.db, &sql).await, 0, "{found:?}: {table}");
        }
    }
}

/// The next transaction begins with the commit of the last one only where a message waits for it.
#[tokio::test(flavor = "multi_thread")]
async fn no_transaction_stays_open_without_a_message() {
    let (client, db) = client().await;
    db.batch_execute(EFFECT).await.unwrap();
    let stream = numbers(&client, "s", 500).await;
    let stop = CancellationToken::new();
    let consumer = stream.group("g").consumer().concurrency(7).stop_on(stop.clone());
    let consuming = tokio::spawn(
        consumer.run_transactional(async |message: Delivery<u64>, tx| write(&message, &tx).await),
    );
    eventually(async || count(&db, "SELECT count(*) FROM effect").await == 500).await;
    eventually(async || {
        let open = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() AND state <> 'idle'";
        count(&db, open).await == 0
    })
    .await;
    stop.cancel();
    assert_eq!(consuming.await.unwrap().unwrap().handled, 500);
}
