//! Producing.

use sqlstreams::{ErrorKind, Headers, Outgoing, PayloadType};

use crate::support::{client, count, numbers};

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

/// What some messages of a batch have and others have not stays with those that have it.
#[tokio::test]
async fn each_message_of_a_batch_keeps_what_goes_with_it() {
    let (client, mut db) = client().await;
    for kind in [PayloadType::Json, PayloadType::Jsonb, PayloadType::Text, PayloadType::Bytea] {
        let stream = client.stream::<Option<u64>>(kind.to_string()).payload_type(kind);
        let stream = stream.compacted(true).create().await.unwrap();
        let values: Vec<Option<u64>> = (0..40).map(Some).collect();
        let headers = |n: u64| Headers::from_iter([("n".to_owned(), n.into())]);
        // In all of these forms: none has any, one has, the last has, all have.
        for (from, upto) in [(41, 42), (17, 18), (39, 40), (0, 40)] {
            let has = |n: u64| (from..upto).contains(&n);
            let batch = |late: bool| {
                values.iter().enumerate().map(move |(n, value)| {
                    let n = n as u64;
                    let key = format!("k{n}");
                    let message = match has(n) && late {
                        true => Outgoing::tombstone(key),
                        false => Outgoing::new(value).key(key),
                    };
                    let message =
                        if has(n) { message.routing_key(format!("r.{n}")) } else { message };
                    if has(n) { message.headers(headers(n)) } else { message }
                })
            };
            for late in [false, true] {
                let transaction = db.transaction().await.unwrap();
                let mut receipts = stream.send_all_in(&transaction, batch(late)).await.unwrap();
                transaction.commit().await.unwrap();
                receipts.extend(stream.producer().send_all(batch(late)).await.unwrap());
                for receipts in receipts.chunks(40) {
                    let ids: Vec<i64> = receipts.iter().map(|receipt| receipt.id).collect();
                    let stored = stream.read(&ids).await.unwrap();
                    assert_eq!(stored.len(), 40);
                    for (n, message) in (0..40).zip(stored) {
                        let tombstone = has(n) && late;
                        assert_eq!(message.key, Some(format!("k{n}")));
                        assert_eq!(message.routing_key, has(n).then(|| format!("r.{n}")));
                        assert_eq!(
                            message.headers,
                            if has(n) { headers(n) } else { Headers::new() }
                        );
                        assert_eq!(message.payload, (!tombstone).then_some(n));
                        assert_eq!(message.tombstone, tombstone);
                    }
                }
            }
        }
    }
}

/// Somebody's trigger on the log that leaves messages out: nobody is told of a place that is another's.
#[tokio::test]
async fn what_a_trigger_leaves_out_fails_the_batch() {
    let (client, mut db) = client().await;
    let stream = numbers(&client, "s", 1).await;
    let trigger = "CREATE FUNCTION few() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN RETURN CASE WHEN NEW.payload::text::bigint % 3 <> 0 THEN NEW END; END $$;
        CREATE TRIGGER few BEFORE INSERT ON sqlstreams.message_log_1 FOR EACH ROW EXECUTE FUNCTION few()";
    db.batch_execute(trigger).await.unwrap();
    let stored = "SELECT count(*) FROM sqlstreams.message_log_1";
    for batch in [vec![1, 2, 3, 4], vec![3, 6], vec![3]] {
        let error = stream.producer().send_all(batch.iter().map(Outgoing::new)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Database, "{error:?}");
        assert!(error.hint().is_some_and(|hint| hint.contains("trigger")), "{error:?}");
        assert_eq!(count(&db, stored).await, 1);
        let transaction = db.transaction().await.unwrap();
        let error = stream.send_all_in(&transaction, batch.iter().map(Outgoing::new)).await;
        assert_eq!(error.unwrap_err().kind(), ErrorKind::Database);
        transaction.rollback().await.unwrap();
    }
    stream.producer().send(&3).await.unwrap_err();
    let receipts = stream.producer().send_all([1, 2].iter().map(Outgoing::new)).await.unwrap();
    let ids: Vec<i64> = receipts.iter().map(|receipt| receipt.id).collect();
    let payloads: Vec<u64> = stream.read(&ids).await.unwrap().iter().map(|m| m.payload).collect();
    assert_eq!(payloads, [1, 2]);
}
