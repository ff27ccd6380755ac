//! Isolation levels: consuming refuses an old snapshot, and the crate does not depend on the database's default.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use sqlstreams::{Client, Delivery, RetryPolicy};

use crate::plain::installed;
use crate::support::{connect, count, database, mostly, numbers};

#[tokio::test]
async fn every_consuming_function_refuses_an_old_snapshot() {
    let plain = installed(&database().await).await;
    plain.produce(10).await;
    let lease = plain.claim(5).await.unwrap();
    let (group, token) = (plain.group, lease.token);
    let before = plain.state().await;
    let none = "'{}', '{}', '{}'";
    let calls = [
        format!("advance(1, {group}, {none}, {none}, '{{}}', '{{}}', 10)"),
        format!("\"fetch\"(1, {group}, '{token}', 0, 10, 1000, NULL::json)"),
        format!("claim(1, {group}, 10, NULL::json)"),
        format!("claimed_range(1, {group}, '{token}', 1)"),
        format!("settle(1, {group}, 1, '{token}', '{{[1,2)}}')"),
        format!("fail(1, {group}, 1, '{token}', '{{1}}', '{{dead}}', '{{x}}')"),
        format!("extend(1, {group}, '{{1}}', '{{{token}}}', ARRAY['{{}}'::int8multirange])"),
        format!("release(1, {group}, '{{1}}', '{{{token}}}', ARRAY['{{}}'::int8multirange])"),
        format!("claim_exceptions(1, {group}, '{token}', 10, false, NULL, NULL::json)"),
        format!("settle_exceptions(1, {group}, '{{{token}}}', '{{1}}', '{{ok}}', '{{x}}')"),
        format!("extend_exceptions(1, {group}, '{{{token}}}', '{{1}}')"),
        format!("release_exceptions(1, {group}, '{{{token}}}', '{{1}}')"),
    ];
    for call in calls {
        for level in ["REPEATABLE READ", "SERIALIZABLE"] {
            plain.db.batch_execute(&format!("BEGIN ISOLATION LEVEL {level}")).await.unwrap();
            let refused = plain.db.batch_execute(&format!("SELECT sqlstreams.{call}")).await;
            let error = refused.expect_err(&format!("{call} in {level}"));
            assert_eq!(error.code().map(|c| c.code()), Some("SQ003"), "{call}: {error:?}");
            let error = error.as_db_error().unwrap();
            assert!(error.message().contains(level), "{error}");
            assert!(error.hint().is_some_and(|hint| hint.contains("READ COMMITTED")), "{error:?}");
            plain.db.batch_execute("ROLLBACK").await.unwrap();
        }
        // And takes the other two.
        plain.db.batch_execute("BEGIN ISOLATION LEVEL READ UNCOMMITTED").await.unwrap();
        plain.db.batch_execute(&format!("SELECT sqlstreams.{call}")).await.expect(&call);
        plain.db.batch_execute("ROLLBACK").await.unwrap();
    }
    assert_eq!(plain.state().await, before);
}

#[tokio::test(flavor = "multi_thread")]
async fn tb_140_the_crate_works_where_serializable_is_the_default() {
    let url = database().await;
    let name = url.rsplit('/').next().unwrap();
    for setting in ["default_transaction_isolation = 'serializable'", "synchronous_commit = off"] {
        connect(&url)
            .await
            .batch_execute(&format!("ALTER DATABASE {name} SET {setting}"))
            .await
            .unwrap();
    }
    let db = connect(&url).await;
    let level: String =
        db.query_one("SHOW default_transaction_isolation", &[]).await.unwrap().get(0);
    assert_eq!(level, "serializable");

    let client = Client::connect(&url).await.unwrap();
    let stream = numbers(&client, "strict", 3_000).await;
    let policy = RetryPolicy::attempts(2).backoff(Duration::ZERO, 1.0, Duration::ZERO);
    let group = stream.group("g").retry(policy).create().await.unwrap();
    let handled = Arc::new(AtomicU32::new(0));
    let consumers = (0..3).map(|_| group.consumer().until_caught_up().run(mostly(&handled)));
    for consumed in futures_util::future::join_all(consumers).await {
        consumed.unwrap();
    }
    assert_eq!(handled.load(Ordering::SeqCst), 2_970);
    assert_eq!(group.redrive(None, 100).await.unwrap().len(), 30);
    let consumed =
        group.consumer().until_caught_up().run(async |_: Delivery<u64>| {}).await.unwrap();
    assert_eq!(consumed.handled, 30);
    assert_eq!(count(&db, "SELECT count(*) FROM sqlstreams.exception_queue_1").await, 0);
}
