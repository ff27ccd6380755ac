//! Compacted streams: current values, tombstones.

use std::time::Duration;

use sqlstreams::{
    Bytes, Client, ErrorKind, Lenient, Outgoing, PayloadType, Stream, Text, Undecodable,
};

use crate::buffers::{buffers, middle};
use crate::running::Running;
use crate::support::{client, count};

async fn compacted(client: &Client) -> Stream<Option<u64>> {
    let stream = client.stream("s").compacted(true).partition_size(1_000);
    stream.create().await.unwrap()
}

#[tokio::test]
async fn latest_and_current_are_the_newest_of_each_key() {
    let (client, db) = client().await;
    let stream = compacted(&client).await;
    let producer = stream.producer();
    assert!(stream.latest("a").await.unwrap().is_none());
    assert!(stream.current(None, 10).await.unwrap().messages.is_empty());
    for (key, value) in [("b", 1), ("a", 2), ("", 3), ("b", 4), ("é", 5), ("c", 6), ("B", 7)] {
        producer.send(&Some(value)).key(key).await.unwrap();
    }
    let latest = stream.latest("b").await.unwrap().unwrap();
    assert_eq!((latest.id, latest.payload, latest.tombstone), (4, Some(4), false));
    assert!(stream.latest("x").await.unwrap().is_none());
    // Keys byte by byte, the empty one first.
    let first = stream.current(None, 3).await.unwrap();
    assert_eq!(first.next.as_deref(), Some("a"));
    let first = first.messages;
    let keys = |page: &[sqlstreams::Message<Option<u64>>]| {
        page.iter().map(|m| (m.key.clone().unwrap(), m.payload.unwrap())).collect::<Vec<_>>()
    };
    assert_eq!(keys(&first), [(String::new(), 3), ("B".into(), 7), ("a".into(), 2)]);
    let rest = stream.current(first[2].key.as_deref(), 100).await.unwrap();
    assert_eq!(rest.next, None);
    assert_eq!(keys(&rest.messages), [("b".into(), 4), ("c".into(), 6), ("é".into(), 5)]);

    producer.send_tombstone("b").await.unwrap();
    producer.send(&Some(8)).key("c").expires_in(Duration::from_millis(1)).await.unwrap();
    tokio::time::sleep(Duration::from_millis(5)).await;
    assert!(stream.latest("b").await.unwrap().is_none());
    assert!(stream.latest("c").await.unwrap().is_none());
    let page = stream.current(Some("a"), 1).await.unwrap();
    assert_eq!(keys(&page.messages), [("é".into(), 5)]);
    // JSON null is a value.
    producer.send(&None).key("b").await.unwrap();
    let null = stream.latest("b").await.unwrap().unwrap();
    assert_eq!((null.payload, null.tombstone), (None, false));
    // The same in SQL.
    let sql = "SELECT payload FROM sqlstreams.latest_message('s', 'a')";
    assert_eq!(db.query_one(sql, &[]).await.unwrap().get::<_, String>(0), "2");
    let sql = "SELECT count(*) FROM sqlstreams.current_messages('s', p_after => 'a')";
    assert_eq!(count(&db, sql).await, 2);
}

/// Keys that were removed bound a page.
#[tokio::test]
async fn a_page_ends_early_among_keys_that_were_removed() {
    let (client, db) = client().await;
    let stream = client.stream::<Option<u64>>("s").compacted(true).create().await.unwrap();
    db.batch_execute(
        "INSERT INTO sqlstreams.message_log_1 (key, payload)
         SELECT lpad(n::text, 5, '0'), CASE WHEN n IN (1, 1500) THEN '1'::json END FROM generate_series(1, 2002) AS n",
    )
    .await
    .unwrap();
    let page = stream.current(None, 10).await.unwrap();
    assert_eq!((page.messages.len(), page.next.as_deref()), (1, Some("01001")));
    let page = stream.current(page.next.as_deref(), 10).await.unwrap();
    assert_eq!((page.messages.len(), page.next.as_deref()), (1, Some("02002")));
    let page = stream.current(page.next.as_deref(), 10).await.unwrap();
    assert_eq!((page.messages.len(), page.next.as_deref()), (0, None));
}

#[tokio::test]
async fn what_is_not_meant_for_the_stream_is_refused() {
    let (client, db) = client().await;
    let stream = compacted(&client).await;
    let producer = stream.producer();
    let error = producer.send(&Some(1)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidMessage);
    assert!(error.to_string().contains("has no key"), "{error}");
    let batch = [Outgoing::new(&Some(1)).key("k"), Outgoing::new(&Some(2))];
    assert_eq!(producer.send_all(batch).await.unwrap_err().place(), Some(1));
    let sql = "INSERT INTO sqlstreams.message_log_1 (payload) VALUES ('1')";
    let error = db.execute(sql, &[]).await.unwrap_err();
    assert_eq!(error.as_db_error().unwrap().constraint(), Some("compacted_needs_key"));
    assert_eq!(count(&db, "SELECT count(*) FROM sqlstreams.message_log_1").await, 0);

    let plain = client.stream::<u64>("plain").create().await.unwrap();
    assert_eq!(plain.latest("k").await.unwrap_err().kind(), ErrorKind::InvalidArgument);
    assert_eq!(plain.current(None, 1).await.unwrap_err().kind(), ErrorKind::InvalidArgument);
    let error = plain.producer().send_tombstone("k").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidMessage);
    let sql = "SELECT sqlstreams.latest_message('plain', 'k')";
    let error = db.query(sql, &[]).await.unwrap_err();
    assert_eq!(error.code().unwrap().code(), "SQ004");
    let sql = "INSERT INTO sqlstreams.message_log_2 (key) VALUES ('k')";
    assert_eq!(db.execute(sql, &[]).await.unwrap_err().code().unwrap().code(), "23502");

    let asked = client.stream::<u64>("plain").compacted(true).create_if_missing().await;
    assert_eq!(asked.unwrap_err().kind(), ErrorKind::InvalidArgument);
    assert!(stream.info().await.unwrap().compacted && !plain.info().await.unwrap().compacted);
}

#[tokio::test(flavor = "multi_thread")]
async fn consumers_get_tombstones_of_every_payload_type() {
    let (client, _db) = client().await;
    let types = [PayloadType::Json, PayloadType::Jsonb, PayloadType::Text, PayloadType::Bytea];
    for payload_type in types {
        let name = payload_type.as_str();
        let stream = client.stream::<Vec<u8>>(name).codec::<Bytes>().payload_type(payload_type);
        let stream = stream.compacted(true).create().await.unwrap();
        let producer = stream.producer();
        let value = match payload_type {
            PayloadType::Json | PayloadType::Jsonb => b"null".to_vec(),
            _ => Vec::new(),
        };
        producer.send(&value).key("k").await.unwrap();
        producer.send_tombstone("k").await.unwrap();
        let later = producer.send_tombstone("k").delay(Duration::from_millis(200));
        assert!(later.await.unwrap().delayed);
        assert!(stream.delayed(None, 1).await.unwrap()[0].tombstone);
        producer.send_tombstone("l").idempotency_key("once").await.unwrap();
        let again = producer.send_tombstone("l").idempotency_key("once").await.unwrap();
        assert_eq!(again.duplicate, Some(sqlstreams::Duplicate::SamePayload));

        let (sender, mut got) = tokio::sync::mpsc::unbounded_channel();
        let group = stream.group("g").create().await.unwrap();
        let stop = sqlstreams::CancellationToken::new();
        let consumer = group.consumer().concurrency(1).stop_on(stop.clone());
        let handler = move |message: sqlstreams::Delivery<Vec<u8>>| {
            sender.send((message.tombstone, message.payload.clone())).unwrap();
            std::future::ready(())
        };
        let running = tokio::spawn(consumer.run(handler));
        let mut seen = Vec::new();
        for _ in 0..4 {
            let next = tokio::time::timeout(Duration::from_secs(20), got.recv()).await;
            seen.push(next.unwrap().unwrap());
        }
        assert_eq!(seen[0], (false, value), "{name}");
        assert!(seen[1..].iter().all(|s| *s == (true, Vec::new())), "{name}: {seen:?}");
        stop.cancel();
        running.await.unwrap().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn codecs_say_what_a_tombstone_is() {
    let (client, _db) = client().await;
    let stream = compacted(&client).await;
    let id = stream.producer().send_tombstone("k").await.unwrap().id;
    let read = stream.read(&[id]).await.unwrap();
    assert_eq!((read[0].tombstone, read[0].payload), (true, None));
    let text = client.stream::<String>("s").codec::<Text>().open().await.unwrap();
    assert_eq!(text.read(&[id]).await.unwrap()[0].payload, "");
    let lenient =
        client.stream::<Result<u64, Undecodable>>("s").codec::<Lenient<sqlstreams::Json>>();
    let read = lenient.open().await.unwrap().read(&[id]).await.unwrap();
    assert!(read[0].tombstone && read[0].payload.is_err());
    // A type that has no word for it: the message is a dead letter that says so.
    let numbers = client.stream::<u64>("s").open().await.unwrap();
    let group = numbers.group("g").create().await.unwrap();
    let running = Running::start(&group);
    crate::support::eventually(async || !group.dead_letters(0, 1).await.unwrap().is_empty()).await;
    let letter = group.dead_letters(0, 1).await.unwrap().pop().unwrap();
    assert!(letter.last_error.unwrap().contains("tombstone"));
    running.stop().await;
}

/// A look-up reads the index of the partition that has the key, and those of newer ones only to find that they have not.
#[tokio::test]
async fn look_ups_read_a_few_pages_whatever_the_versions() {
    let (client, db) = client().await;
    let stream = compacted(&client).await;
    // 40 partitions; key "old" is in the first one only, "hot" has 500 versions in each.
    for part in 0..40 {
        db.batch_execute(&format!(
            "SELECT sqlstreams.ensure_partitions(1, 3);
             SELECT setval('sqlstreams.message_log_1_id_seq', {});
             INSERT INTO sqlstreams.message_log_1 (key, payload)
             SELECT CASE WHEN n = 1 AND {part} = 0 THEN 'old' WHEN n % 2 = 0 THEN 'hot' ELSE 'k' || n END, to_json(n)
             FROM generate_series(1, 990) AS n",
            (part * 1_000).max(1)
        ))
        .await
        .unwrap();
    }
    db.batch_execute("VACUUM ANALYZE sqlstreams.message_log_1").await.unwrap();
    let pages = async |sql: &str| {
        let mut samples = Vec::new();
        for _ in 0..5 {
            samples.push(buffers(&db, sql).await);
        }
        middle(samples)
    };
    let newest = pages("SELECT * FROM sqlstreams.latest_message_1('hot')").await;
    let oldest = pages("SELECT * FROM sqlstreams.latest_message_1('old')").await;
    let page = pages("SELECT * FROM sqlstreams.current_messages_1(NULL, 10)").await;
    println!("pages: newest {newest}, oldest {oldest}, a page of current values {page}");
    assert!(newest <= 8.0, "{newest}");
    assert!(oldest <= 44.0 * 3.0, "{oldest}");
    assert!(page <= 10.0 * 44.0 * 5.0, "{page}");
    assert_eq!(stream.latest("old").await.unwrap().unwrap().id, 2);
    // Each partition has the index, attached.
    let sql = "SELECT (SELECT count(*) FROM pg_inherits WHERE inhparent = 'sqlstreams.message_key_1'::regclass)
                    - (SELECT count(*) FROM pg_inherits WHERE inhparent = 'sqlstreams.message_log_1'::regclass)";
    assert_eq!(count(&db, sql).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_is_stored_only_if_the_latest_is_the_expected_one() {
    let (client, mut db) = client().await;
    let stream = compacted(&client).await;
    let producer = stream.producer();
    let first = producer.send(&Some(1)).key("k").expect_latest(None).await.unwrap().id;
    let error = producer.send(&Some(2)).key("k").expect_latest(None).await.unwrap_err();
    assert_eq!((error.kind(), error.latest_id()), (ErrorKind::Conflict, Some(first)));
    let second = producer.send(&Some(2)).key("k").expect_latest(first).await.unwrap().id;
    let error = producer.send(&Some(3)).key("k").expect_latest(first).await.unwrap_err();
    assert_eq!((error.kind(), error.latest_id()), (ErrorKind::Conflict, Some(second)));
    producer.send_tombstone("k").expect_latest(second).await.unwrap();
    let error = producer.send(&Some(3)).key("k").expect_latest(second).await.unwrap_err();
    assert_eq!((error.code(), error.latest_id()), ("conflict", Some(0)));

    // A batch is all or nothing.
    let batch = [
        Outgoing::new(&Some(4)).key("a").expect_latest(None),
        Outgoing::new(&Some(5)).key("plain"),
        Outgoing::new(&Some(6)).key("b").expect_latest(99),
    ];
    let error = producer.send_all(batch.clone()).await.unwrap_err();
    assert_eq!((error.kind(), error.latest_id()), (ErrorKind::Conflict, Some(0)));
    assert!(stream.latest("a").await.unwrap().is_none());
    producer.send_all(batch.into_iter().take(2)).await.unwrap();
    assert_eq!(stream.latest("a").await.unwrap().unwrap().payload, Some(4));
    let twice = [7, 8].map(Some);
    let twice = twice.iter().map(|n| Outgoing::new(n).key("t").expect_latest(None));
    assert_eq!(producer.send_all(twice).await.unwrap_err().kind(), ErrorKind::InvalidArgument);

    // In the caller's transaction, which holds others of the key up until it ends, and nobody else.
    let tx = db.transaction().await.unwrap();
    stream.send_in(&tx, &Some(9)).key("c").expect_latest(None).await.unwrap();
    producer.send(&Some(1)).key("d").expect_latest(None).await.unwrap();
    let other = producer.clone();
    let waits =
        tokio::spawn(async move { other.send(&Some(10)).key("c").expect_latest(None).await });
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!waits.is_finished());
    tx.commit().await.unwrap();
    assert_eq!(waits.await.unwrap().unwrap_err().kind(), ErrorKind::Conflict);
    let tx = db.build_transaction();
    let tx = tx.isolation_level(tokio_postgres::IsolationLevel::RepeatableRead).start().await;
    let tx = tx.unwrap();
    let error = stream.send_in(&tx, &Some(9)).key("c").expect_latest(None).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WrongIsolation);
    tx.rollback().await.unwrap();

    // What makes no sense.
    let soon = producer.send(&Some(1)).key("k").expect_latest(None).delay(Duration::from_secs(9));
    assert_eq!(soon.await.unwrap_err().kind(), ErrorKind::InvalidMessage);
    let once = producer.send(&Some(1)).key("k").expect_latest(None).idempotency_key("i");
    assert_eq!(once.await.unwrap_err().kind(), ErrorKind::InvalidMessage);
    let plain = client.stream::<u64>("plain").create().await.unwrap();
    let error = plain.producer().send(&1).key("k").expect_latest(None).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidMessage);
    let sql = "SELECT sqlstreams.produce('s', '1', p_key => 'k', p_expect_latest => 7)";
    assert_eq!(db.query(sql, &[]).await.unwrap_err().code().unwrap().code(), "SQ015");
    db.query("SELECT sqlstreams.produce('s', '1', p_key => 'k', p_expect_latest => 0)", &[])
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn counters_that_many_change_lose_nothing() {
    let (client, _db) = client().await;
    let stream = compacted(&client).await;
    let workers: Vec<_> = (0..8)
        .map(|worker| {
            let stream = stream.clone();
            tokio::spawn(async move {
                let producer = stream.producer();
                let mut conflicts = 0;
                for turn in 0..20 {
                    let key = format!("counter {}", (worker + turn) % 2);
                    loop {
                        let latest = stream.latest(&key).await.unwrap();
                        let count = latest.as_ref().map_or(0, |m| m.payload.unwrap()) + 1;
                        let id = latest.map(|m| m.id);
                        match producer.send(&Some(count)).key(&key).expect_latest(id).await {
                            Ok(_) => break,
                            Err(e) if e.kind() == ErrorKind::Conflict => conflicts += 1,
                            Err(e) => panic!("{e:?}"),
                        }
                    }
                }
                conflicts
            })
        })
        .collect();
    let mut conflicts = 0;
    for worker in workers {
        conflicts += worker.await.unwrap();
    }
    println!("{conflicts} conflicts");
    assert!(conflicts > 0, "nothing ran at the same time");
    let counters = stream.current(None, 10).await.unwrap().messages;
    assert_eq!(counters.iter().map(|m| m.payload.unwrap()).sum::<u64>(), 160);
}
