//! Producing.

use sqlstreams::{ErrorKind, Outgoing};

use crate::support::{client, count};

#[tokio::test]
async fn a_batch_of_any_size_gets_its_ids_in_order() {
    let (client, db) = client().await;
    let stream = client.stream::<u64>("numbers").partition_size(1000).create().await.unwrap();
    let payloads: Vec<u64> = (0..23_000).collect();
    let receipts = stream.producer().send_all(payloads.iter().map(Outgoing::new)).await.unwrap();
    assert_eq!(receipts.len(), payloads.len());
    assert!(receipts.windows(2).all(|pair| pair[0].id < pair[1].id));
    let first = receipts[0].id;
    let wrong = count(&db, &format!("SELECT count(*) FROM sqlstreams.message_log_1 WHERE payload::text::bigint <> id - {first}")).await;
    assert_eq!(wrong, 0);
}

#[tokio::test]
async fn a_wrong_message_in_a_batch_is_named_and_nothing_is_stored() {
    let (client, db) = client().await;
    let stream = client
        .stream::<String>("texts")
        .codec::<sqlstreams::Text>()
        .payload_type(sqlstreams::PayloadType::Json)
        .create()
        .await
        .unwrap();
    let lines = ["{}".to_owned(), "{".to_owned(), "1".to_owned()];
    let error = stream.producer().send_all(lines.iter().map(Outgoing::new)).await.unwrap_err();
    assert_eq!((error.kind(), error.place()), (ErrorKind::InvalidMessage, Some(1)));
    assert!(
        error.to_string().starts_with("message 2 of 3: invalid input syntax for type json"),
        "{error}"
    );
    assert_eq!(count(&db, "SELECT count(*) FROM sqlstreams.message_log_1").await, 0);
}
