//! What a role that only sends has to be granted: as docs/idempotency.md and docs/delayed.md say.

use std::time::Duration;

use sqlstreams::{Client, ErrorKind};

use crate::support::{client_at, count, database};

/// Takes the statements between these lines out of a page.
fn grants(page: &str) -> String {
    let (_, rest) = page.split_once("```sql\n-- as the owner").expect("grants");
    let (block, _) = rest.split_once("```").unwrap();
    block.split_once('\n').unwrap().1.to_owned()
}

#[tokio::test]
async fn what_the_pages_grant_is_enough_and_needed() {
    let plain = "GRANT USAGE ON SCHEMA sqlstreams TO app;
        GRANT SELECT ON sqlstreams.stream, sqlstreams.schema_migration TO app;
        GRANT SELECT, INSERT ON sqlstreams.message_log_1 TO app;";
    let keyed = grants(include_str!("../../../../docs/idempotency.md"));
    let delayed = grants(include_str!("../../../../docs/delayed.md"));
    let url = database().await;
    let (owner, db) = client_at(&url).await;
    owner.stream::<u64>("s").create().await.unwrap();
    let password = url.split(['@', ':']).nth(2).unwrap();
    db.batch_execute(&format!("CREATE ROLE app LOGIN PASSWORD '{password}'; {plain}"))
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
    let sql = "SELECT removed FROM sqlstreams.expire_idempotency_keys(1)";
    db.batch_execute("SET ROLE app").await.unwrap();
    assert_eq!(count(&db, sql).await, 1);
    db.batch_execute("RESET ROLE").await.unwrap();

    let error = producer.send(&1).delay(Duration::from_secs(60)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error:?}");
    db.batch_execute(&delayed).await.unwrap();
    let sent = producer.send(&1).delay(Duration::from_secs(60)).await.unwrap();
    assert_eq!(stream.delayed(None, 9).await.unwrap().len(), 1);
    assert!(stream.cancel_delayed(sent.id).await.unwrap());
}
