//! Ids: how far they reach, and what happens at their end.

use std::time::Duration;

use sqlstreams::{Delivery, ErrorKind, Outgoing};

use crate::support::{client, count};

/// The sequences of a stream, and the last of its ids that a partition takes.
const LAST: i64 = i64::MAX / 1_000 * 1_000 - 1;

async fn go_on_from(db: &tokio_postgres::Client, id: i64) {
    let sql = "SELECT setval('sqlstreams.message_log_1_id_seq', $1)";
    db.query(sql, &[&id]).await.unwrap();
    db.execute("UPDATE sqlstreams.consumer_group_cursor_1 SET claimed = $1", &[&id]).await.unwrap();
    db.execute("UPDATE sqlstreams.stream_fence SET settled = $1", &[&id]).await.unwrap();
}

/// Everything that numbers something is a bigint: at a million a second, 292,000 years. At the end of them a stream says so, in
/// every way to produce, and what it holds can be consumed.
#[tokio::test(flavor = "multi_thread")]
async fn tb_117_at_the_end_of_all_ids_a_stream_says_so() {
    let (client, db) = client().await;
    let small = "SELECT count(*) FROM pg_sequences WHERE schemaname = 'sqlstreams' AND data_type <> 'bigint'::regtype";
    assert_eq!(count(&db, small).await, 0);
    let columns = "SELECT count(*) FROM information_schema.columns WHERE table_schema = 'sqlstreams' AND (column_name = 'id' OR column_name LIKE '%\\_id') AND data_type NOT IN ('bigint', 'uuid')";
    assert_eq!(count(&db, columns).await, 0);

    let stream = client.stream::<u64>("s").partition_size(1_000).create().await.unwrap();
    let group = stream.group("g").create().await.unwrap();
    go_on_from(&db, LAST - 100).await;
    db.query("SELECT sqlstreams.ensure_partitions(1)", &[]).await.unwrap();
    let numbers: Vec<u64> = (0..100).collect();
    let producer = stream.producer();
    let sent = producer.send_all(numbers.iter().map(Outgoing::new)).await.unwrap();
    assert_eq!(sent.last().unwrap().id, LAST);
    let consumed = group.consumer().until_caught_up();
    let consumed =
        consumed.run(async |m: Delivery<u64>| if m.payload == 7 { Err("no") } else { Ok(()) });
    let consumed = tokio::time::timeout(Duration::from_secs(60), consumed).await.unwrap();
    assert_eq!(consumed.unwrap().handled, 99);

    for (what, message) in
        [("plain", Outgoing::new(&0)), ("with a key", Outgoing::new(&0).idempotency_key("k"))]
    {
        let error = producer.send_all([message]).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::IdsUsedUp, "{what}: {error:?}");
        assert!(error.hint().unwrap().contains("Create another stream"), "{error:?}");
        assert!(!error.is_retryable());
    }
    let error = producer.send(&0).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::IdsUsedUp);
    // The sequence's own end.
    db.batch_execute("SELECT setval('sqlstreams.message_log_1_id_seq', 9223372036854775807)")
        .await
        .unwrap();
    let error = producer.send(&0).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::IdsUsedUp, "{error:?}");
    assert_eq!(count(&db, "SELECT count(*) FROM sqlstreams.message_log_1").await, 100);
    // Other streams go on.
    let other = client.stream::<u64>("t").create().await.unwrap();
    assert_eq!(other.producer().send(&0).await.unwrap().id, 1);
}
