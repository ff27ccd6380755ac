//! Settings of a role or database that every session starts with: isolation, and limits of time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use sqlstreams::{Client, Delivery, RetryPolicy, Transaction};

use crate::running::Running;
use crate::support::{connect, count, database, numbers, until};

/// A client whose sessions all start with these settings.
async fn client_with(settings: &[&str]) -> (Client, String) {
    let url = database().await;
    let name = url.rsplit('/').next().unwrap();
    let db = connect(&url).await;
    for setting in settings {
        db.batch_execute(&format!("ALTER DATABASE {name} SET {setting}")).await.unwrap();
    }
    (Client::connect(&url).await.unwrap(), url)
}

#[tokio::test(flavor = "multi_thread")]
async fn tb_140_tb_142_transactional_consume_where_the_default_is_stricter() {
    for level in ["serializable", "repeatable read"] {
        let setting = format!("default_transaction_isolation = '{level}'");
        let (client, url) = client_with(&[setting.as_str()]).await;
        let db = connect(&url).await;
        db.batch_execute("CREATE TABLE effect (n bigint); CREATE TABLE total (n bigint); INSERT INTO total VALUES (0)")
            .await
            .unwrap();
        let shown: String =
            db.query_one("SHOW default_transaction_isolation", &[]).await.unwrap().get(0);
        assert_eq!(shown, level);
        let stream = numbers(&client, "orders", 300).await;
        let policy = RetryPolicy::attempts(3).backoff(Duration::ZERO, 1.0, Duration::ZERO);
        let group = stream.group("g").retry(policy).create().await.unwrap();
        // All write to one row, which under a stricter level would fail again and again.
        let consumers = (0..2).map(|_| {
            let consumer = group.consumer().concurrency(4).until_caught_up();
            consumer.run_transactional(async |message: Delivery<u64>, tx: Transaction| {
                let n = i64::try_from(message.payload)?;
                tx.execute("INSERT INTO effect VALUES ($1)", &[&n]).await?;
                tx.execute("UPDATE total SET n = n + $1", &[&n]).await?;
                if message.payload % 50 == 7 && message.attempt() == 1 {
                    return Err("once".into());
                }
                Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
            })
        });
        let mut failed = 0;
        for consumed in futures_util::future::join_all(consumers).await {
            failed += consumed.unwrap().failed;
        }
        assert_eq!(failed, 6, "{level}");
        assert_eq!(count(&db, "SELECT count(*) FROM effect").await, 300);
        assert_eq!(count(&db, "SELECT count(DISTINCT n) FROM effect").await, 300);
        assert_eq!(count(&db, "SELECT n FROM total").await, 299 * 300 / 2);

        // A wake-up, a pause, and messages that come meanwhile.
        let mut consumer = Running::start(&group);
        stream.producer().send(&1_000).await.unwrap();
        consumer.handles(1_000, Duration::from_secs(20)).await;
        group.pause().await.unwrap();
        group.resume().await.unwrap();
        stream.producer().send(&1_001).await.unwrap();
        consumer.handles(1_001, Duration::from_secs(20)).await;
        consumer.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_of_time_end_statements_and_transactions_but_no_handlers() {
    let limits = ["statement_timeout = '1s'", "idle_in_transaction_session_timeout = '2s'"];
    let (client, url) = client_with(&limits).await;
    let db = connect(&url).await;
    let stream = numbers(&client, "orders", 8).await;
    let lease = Duration::from_secs(2);
    let group = stream.group("g").lease(lease).create().await.unwrap();
    let calls = Arc::new(AtomicU32::new(0));
    let counted = calls.clone();
    // Handlers that outlast all of them, the lease included.
    let consumed = group
        .consumer()
        .until_caught_up()
        .run(move |_: Delivery<u64>| {
            counted.fetch_add(1, Ordering::SeqCst);
            tokio::time::sleep(Duration::from_secs(5))
        })
        .await
        .unwrap();
    assert_eq!((consumed.handled, calls.load(Ordering::SeqCst)), (8, 8));

    // A look or a claim that is cancelled, as it waits for a lock, is made again.
    let mut consumer = Running::start(&group);
    until("it listens", Duration::from_secs(30), async || consumer.health.snapshot().listening)
        .await;
    db.batch_execute("SET statement_timeout = 0; SET idle_in_transaction_session_timeout = 0")
        .await
        .unwrap();
    db.batch_execute("BEGIN; LOCK TABLE sqlstreams.consumer_group_cursor_1 IN EXCLUSIVE MODE")
        .await
        .unwrap();
    stream.producer().send(&100).await.unwrap();
    until("it says so", Duration::from_secs(30), async || {
        consumer.health.snapshot().trouble.is_some()
    })
    .await;
    let trouble = consumer.health.snapshot().trouble;
    db.batch_execute("COMMIT").await.unwrap();
    consumer.handles(100, Duration::from_secs(30)).await;
    until("it is well again", Duration::from_secs(30), async || {
        consumer.health.snapshot().trouble.is_none()
    })
    .await;
    assert!(trouble.is_some_and(|trouble| trouble.contains("statement timeout")));
    assert_eq!(consumer.stop().await.handled, 1);
}
