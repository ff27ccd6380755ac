//! What a role that only sends has to be granted: as docs/idempotency.md, docs/delayed.md and docs/compaction.md
//! say.

use std::time::Duration;

use sqlstreams::{Client, ErrorKind};

use crate::support::{client_at, count, database, eventually};

/// What a plain send needs.
const PLAIN: &str = "GRANT USAGE ON SCHEMA sqlstreams TO app;
    GRANT SELECT ON sqlstreams.stream, sqlstreams.schema_migration TO app;
    GRANT SELECT, INSERT ON sqlstreams.message_log_1 TO app;";

/// Takes the statements between these lines out of a page.
fn grants(page: &str) -> String {
    let (_, rest) = page.split_once("```sql\n-- as the owner").expect("grants");
    let (block, _) = rest.split_once("```").unwrap();
    block.split_once('\n').unwrap().1.to_owned()
}

#[tokio::test]
async fn what_the_pages_grant_is_enough_and_needed() {
    let keyed = grants(include_str!("../../../../docs/idempotency.md"));
    let delayed = grants(include_str!("../../../../docs/delayed.md"));
    let url = database().await;
    let (owner, db) = client_at(&url).await;
    owner.stream::<u64>("s").create().await.unwrap();
    let password = url.split(['@', ':']).nth(2).unwrap();
    db.batch_execute(&format!("CREATE ROLE app LOGIN PASSWORD '{password}'; {PLAIN}"))
        .await
        .unwrap();
    let app = Client::builder(&url.replace("//postgres:", "//app:")).migrate(false);
    let stream = app.connect().await.unwrap().stream::<u64>("s").open().await.unwrap();
    let producer = stream.producer();
    producer.send(&1).await.unwrap();

    let error = producer.send(&1).idempotency_key("k").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error:?}");
    db.batch_execute(&keyed).await.unwrap();
    producer.send(&1).idempotency_key("k").await.unwrap();
    assert!(producer.send(&1).idempotency_key("k").await.unwrap().is_duplicate());
    db.query(
        "UPDATE sqlstreams.message_idempotency_1 SET sent_at = sent_at - interval '2 days'",
        &[],
    )
    .await
    .unwrap();
    let expire =
        "SET ROLE app; SELECT removed FROM sqlstreams.expire_idempotency_keys(1); RESET ROLE";
    let left = "SELECT count(*) FROM sqlstreams.message_idempotency_1";
    // Whoever sends with keys does so by itself, too, and one at a time.
    eventually(async || {
        db.batch_execute(expire).await.unwrap();
        count(&db, left).await == 0
    })
    .await;

    let error = producer.send(&1).delay(Duration::from_secs(60)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error:?}");
    db.batch_execute(&delayed).await.unwrap();
    let sent = producer.send(&1).delay(Duration::from_secs(60)).await.unwrap();
    assert_eq!(stream.delayed(None, 9).await.unwrap().len(), 1);
    assert!(stream.cancel_delayed(sent.id).await.unwrap());
}

#[tokio::test]
async fn what_the_page_of_compacted_streams_grants_is_enough_and_needed() {
    let granted = grants(include_str!("../../../../docs/compaction.md"));
    let url = database().await;
    let (owner, db) = client_at(&url).await;
    owner.stream::<Option<u64>>("s").compacted(true).create().await.unwrap();
    let password = url.split(['@', ':']).nth(2).unwrap();
    // Roles are the cluster's, so that this one has a name of its own here.
    let plain = PLAIN.replace("TO app", "TO setter");
    db.batch_execute(&format!("CREATE ROLE setter LOGIN PASSWORD '{password}'; {plain}"))
        .await
        .unwrap();
    let setter = Client::builder(&url.replace("//postgres:", "//setter:")).migrate(false);
    let setter = setter.connect().await.unwrap();
    let stream = setter.stream::<Option<u64>>("s").open().await.unwrap();
    let producer = stream.producer();
    // What a plain send needs is enough for this.
    let first = producer.send(&Some(1)).key("a").await.unwrap();
    producer.send_tombstone("b").await.unwrap();
    assert_eq!(stream.latest("a").await.unwrap().unwrap().id, first.id);
    assert_eq!(stream.current(None, 9).await.unwrap().messages.len(), 1);

    let statements: Vec<&str> =
        granted.split_inclusive(';').filter(|s| s.contains("GRANT")).collect();
    let send = || producer.send(&Some(2)).key("a").expect_latest(first.id);
    for grant in &statements {
        let error = send().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PermissionDenied, "before {grant}: {error:?}");
        db.batch_execute(&grant.replace("TO app", "TO setter")).await.unwrap();
    }
    send().await.unwrap();
    let sql = "GRANT INSERT ON sqlstreams.message_delayed_1 TO setter; SET ROLE setter";
    db.batch_execute(sql).await.unwrap();
    let sql = "SELECT id FROM sqlstreams.produce('s', '3', p_key => 'c', p_expect_latest => 0)";
    assert_eq!(count(&db, sql).await, 4);
    db.batch_execute("RESET ROLE").await.unwrap();
}
