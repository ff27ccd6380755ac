//! Reading a log without a group, and importing messages from elsewhere.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use proptest::prelude::*;
use sqlstreams::{
    Bytes, Client, Delivery, ErrorKind, Import, Outgoing, PayloadType, Record, Stream,
};
use tokio::sync::Mutex;

use crate::support::{client, connect, count, database, eventually, numbers};

/// Everything that is final now, in pages of `limit`.
async fn read_all<T: std::fmt::Debug, C: sqlstreams::Codec<T>>(
    stream: &Stream<T, C>,
    limit: u32,
) -> (Vec<Record<T>>, i64) {
    let (mut all, mut after) = (Vec::new(), 0);
    loop {
        let page = stream.read_log(after, i64::MAX, limit).await.unwrap();
        assert!(page.records.iter().all(|r| r.id > after && r.id <= page.upto), "{page:?}");
        assert!(page.records.len() <= limit as usize);
        all.extend(page.records);
        if page.upto == after {
            return (all, after);
        }
        after = page.upto;
    }
}

fn ids<T>(records: &[Record<T>]) -> Vec<i64> {
    records.iter().map(|r| r.id).collect()
}

#[tokio::test]
async fn a_log_is_read_in_pages_over_partitions_and_holes() {
    let (client, db) = client().await;
    let stream = client.stream::<u64>("s").partition_size(1000).create().await.unwrap();
    let payloads: Vec<u64> = (0..2500).collect();
    stream.producer().send_all(payloads.iter().map(Outgoing::new)).await.unwrap();
    // Drawn in vain, and then more.
    db.batch_execute("BEGIN; INSERT INTO sqlstreams.message_log_1 (payload) VALUES ('0'), ('0'); ROLLBACK; SELECT setval('sqlstreams.message_log_1_id_seq', 9000)").await.unwrap();
    db.batch_execute("SELECT sqlstreams.ensure_partitions(1)").await.unwrap();
    stream.producer().send(&7).key("k").await.unwrap();
    for limit in [1000, 700, 10_000] {
        let (all, upto) = read_all(&stream, limit).await;
        assert_eq!(upto, 9001);
        assert_eq!(ids(&all), (1..=2500).chain([9001]).collect::<Vec<i64>>());
        assert!(all[..2500].iter().zip(&payloads).all(|(r, p)| r.payload == Some(*p)));
    }
    // A range; pages end in it.
    let page = stream.read_log(990, 1010, 1000).await.unwrap();
    assert_eq!((ids(&page.records), page.upto), ((991..=1010).collect(), 1010));
    let page = stream.read_log(3000, 4000, 1000).await.unwrap();
    assert_eq!((page.records.len(), page.upto, page.head), (0, 4000, 9001));
    assert_eq!(stream.read_log(9001, i64::MAX, 5).await.unwrap().upto, 9001);
    for (after, upto, limit) in [(0, 5, 0), (5, 4, 10), (i64::MAX, 0, 10)] {
        let error = stream.read_log(after, upto, limit).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error:?}");
    }
    assert_eq!(stream.read_log(5, 5, 10).await.unwrap().records, []);
    // A partition that is gone from the front is passed over at once.
    db.batch_execute(
        "ALTER TABLE sqlstreams.message_log_1 DETACH PARTITION sqlstreams.message_log_1_p0",
    )
    .await
    .unwrap();
    assert_eq!(stream.read_log(0, i64::MAX, 1).await.unwrap().records[0].id, 1000);
}

#[tokio::test]
async fn a_page_ends_by_its_bytes() {
    let (client, _) = client().await;
    let stream = client.stream::<Vec<u8>>("s").codec::<Bytes>().create().await.unwrap();
    let large: Vec<Vec<u8>> =
        (0..5).map(|_| (0..3 << 20).map(|_| fastrand::u8(..)).collect()).collect();
    stream.producer().send_all(large.iter().map(Outgoing::new)).await.unwrap();
    let page = stream.read_log(0, i64::MAX, 1000).await.unwrap();
    assert!((1..5).contains(&page.records.len()), "{}", page.records.len());
    let (all, _) = read_all(&stream, 1000).await;
    assert_eq!(all.into_iter().map(|r| r.payload.unwrap()).collect::<Vec<_>>(), large);
}

/// Also for a role that may not write the fence down, and in a transaction that may not write at all.
#[tokio::test]
async fn a_reader_never_goes_past_what_may_still_come() {
    let url = database().await;
    let client = Client::connect(&url).await.unwrap();
    let (db, open) = (connect(&url).await, connect(&url).await);
    let stream = numbers(&client, "s", 3).await;
    open.batch_execute("BEGIN; INSERT INTO sqlstreams.message_log_1 (payload) VALUES ('3')")
        .await
        .unwrap();
    stream.producer().send(&4).await.unwrap();
    let as_reader = "BEGIN READ ONLY; SELECT max(upto) FROM sqlstreams.read_log(1, 3, 100, 100, 1000000, NULL::json)";
    for _ in 0..3 {
        let (all, upto) = read_all(&stream, 100).await;
        assert_eq!((ids(&all), upto), (vec![1, 2, 3], 3));
        let (begin, query) = as_reader.split_once("; ").unwrap();
        db.batch_execute(begin).await.unwrap();
        assert_eq!(count(&db, query).await, 3);
        db.batch_execute("COMMIT").await.unwrap();
    }
    open.batch_execute("COMMIT").await.unwrap();
    let (begin, query) = as_reader.split_once("; ").unwrap();
    db.batch_execute(begin).await.unwrap();
    assert_eq!(count(&db, query).await, 5);
    db.batch_execute("COMMIT").await.unwrap();
    eventually(async || read_all(&stream, 100).await.1 == 5).await;
    assert_eq!(ids(&read_all(&stream, 100).await.0), [1, 2, 3, 4, 5]);
    let error = db
        .batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT FROM sqlstreams.read_log(1, 0, 9, 9, 9, NULL::json)")
        .await
        .unwrap_err();
    assert_eq!(error.code().unwrap().code(), "SQ003");
}

/// As docs/export.md has it.
#[tokio::test]
async fn reading_and_importing_take_no_more_privileges_than_the_page_says() {
    let url = database().await;
    let client = Client::connect(&url).await.unwrap();
    let db = connect(&url).await;
    let stream = numbers(&client, "s", 3).await;
    let password = url.split(['@', ':']).nth(2).unwrap();
    db.batch_execute(&format!(
        "CREATE ROLE exporter LOGIN PASSWORD '{password}'; GRANT USAGE ON SCHEMA sqlstreams TO exporter;
         GRANT SELECT ON sqlstreams.message_log_1, sqlstreams.message_log_1_id_seq, sqlstreams.stream, sqlstreams.stream_fence, sqlstreams.schema_migration TO exporter"
    ))
    .await
    .unwrap();
    let exporter = Client::builder(&url.replace("//postgres:", "//exporter:")).migrate(false);
    let exporter = exporter.connect().await.unwrap().stream::<u64>("s").open().await.unwrap();
    // A gap, and nobody who may write it down.
    db.batch_execute("SELECT nextval('sqlstreams.message_log_1_id_seq')").await.unwrap();
    stream.producer().send(&4).await.unwrap();
    let (all, upto) = read_all(&exporter, 10).await;
    assert_eq!((ids(&all), upto), (vec![1, 2, 3, 5], 5));
    let new = [record(1, 1)];
    for (how, grant) in [
        (Import::new(), "INSERT ON sqlstreams.message_log_1"),
        (Import::new().name("x"), "SELECT, INSERT, UPDATE ON sqlstreams.import_progress"),
    ] {
        let error = exporter.import(&new, &how).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error:?}");
        db.batch_execute(&format!("GRANT {grant} TO exporter")).await.unwrap();
        exporter.import(&new, &how).await.unwrap();
    }
    let keep = Import::new().keep_ids(true);
    let error = exporter.import(&[record(100, 1)], &keep).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error:?}");
}

fn record(id: i64, payload: u64) -> Record<u64> {
    let at = SystemTime::UNIX_EPOCH + Duration::from_micros(1_500_000_000_123_456 + id as u64);
    Record::new(id, at, payload)
}

#[tokio::test]
async fn messages_keep_what_they_have_under_new_ids() {
    let (client, _) = client().await;
    let stream = numbers(&client, "s", 10).await;
    let mut records: Vec<_> = (0..2500).map(|n| record(n * 2 + 1, n as u64)).collect();
    records[3].key = Some("k".to_owned());
    records[3].routing_key = Some("a.b".to_owned());
    records[3].headers = Some(r#"{"n": 12345678901234567890.5, "z": "\u00e9"}"#.to_owned());
    records[3].expires_at = Some(SystemTime::UNIX_EPOCH + Duration::from_secs(5_000_000_000));
    let done = stream.import(&records, &Import::new()).await.unwrap();
    assert_eq!((done.stored, done.skipped), (2500, 0));
    assert_eq!((done.first_id, done.last_id), (Some(11), Some(2510)));
    let (all, _) = read_all(&stream, 1000).await;
    for (was, is) in records.iter().zip(&all[10..]) {
        assert_eq!(is.id, 11 + (was.id - 1) / 2);
        assert_eq!((was.produced_at, was.expires_at), (is.produced_at, is.expires_at));
        assert_eq!(
            (&was.key, &was.routing_key, was.payload),
            (&is.key, &is.routing_key, is.payload)
        );
    }
    // Digits and all.
    let headers = all[13].headers.as_deref().unwrap();
    assert!(headers.contains("12345678901234567890.5") && headers.contains('é'), "{headers}");
    // A group gets them as it gets others.
    let consumed = stream
        .group("g")
        .consumer()
        .until_caught_up()
        .run(async |_: Delivery<u64>| Ok::<_, String>(()))
        .await
        .unwrap();
    assert_eq!(consumed.handled, 2510);
}

#[tokio::test]
async fn an_import_with_a_name_stores_each_message_once() {
    let (client, db) = client().await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    let records: Vec<_> = (1..=30).map(|n| record(n, n as u64)).collect();
    let how = Import::new().name("old");
    assert_eq!(stream.imported_upto("old").await.unwrap(), 0);
    stream.import(&records[..20], &how).await.unwrap();
    assert_eq!(stream.imported_upto("old").await.unwrap(), 20);
    // From a bit before where it ended.
    let done = stream.import(&records[10..], &how).await.unwrap();
    assert_eq!((done.stored, done.skipped, done.first_id), (10, 10, Some(21)));
    assert_eq!(stream.import(&records, &how).await.unwrap().stored, 0);
    assert_eq!(count(&db, "SELECT count(*) FROM sqlstreams.message_log_1").await, 30);
    assert_eq!(stream.import(&records, &Import::new().name("other")).await.unwrap().stored, 30);
}

#[tokio::test]
async fn ids_are_kept_only_above_all_that_was() {
    let (client, db) = client().await;
    let stream = client.stream::<u64>("s").partition_size(1000).create().await.unwrap();
    let group = stream.group("g").create().await.unwrap();
    let keep = Import::new().keep_ids(true);
    let mut records: Vec<_> =
        (0..100).map(|n| record(if n < 50 { 5 + n * 3 } else { 4990 + n }, n as u64)).collect();
    let done = stream.import(&records, &keep).await.unwrap();
    assert_eq!((done.stored, done.first_id, done.last_id), (100, Some(5), Some(5089)));
    assert_eq!(ids(&read_all(&stream, 10).await.0), ids(&records));
    assert_eq!(stream.producer().send(&1).await.unwrap().id, 5090, "the sequence went along");
    let consumed = group
        .consumer()
        .until_caught_up()
        .run(async |_: Delivery<u64>| Ok::<_, String>(()))
        .await
        .unwrap();
    assert_eq!(consumed.handled, 101);

    // Once more: all of it is there.
    let again = stream.import(&records, &keep).await.unwrap();
    assert_eq!((again.stored, again.skipped), (0, 100));
    // Another in its place; one where there is none; and nothing of either batch is stored.
    let more = record(9000, 0);
    for (change, id) in [(0, 5), (60, 5050)] {
        let mut other = records.clone();
        other[change].headers = Some("{}".to_owned());
        other.push(more.clone());
        let error = stream.import(&other, &keep).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ImportConflict, "{error:?}");
        assert_eq!(error.place(), Some(change), "{error:?}");
        assert!(error.to_string().contains(&format!("id {id}")), "{error}");
    }
    for id in [1, 6, 5091] {
        let at = records.partition_point(|r| r.id < id);
        let mut other = records.clone();
        other.insert(at, record(id, 1));
        if id == 5091 {
            // Drawn, and taken back.
            db.batch_execute("SELECT nextval('sqlstreams.message_log_1_id_seq')").await.unwrap();
        }
        let error = stream.import(&other, &keep).await.unwrap_err();
        assert_eq!((error.kind(), error.place()), (ErrorKind::ImportConflict, Some(at)));
        assert!(error.hint().unwrap().contains("new stream"), "{error:?}");
    }
    assert_eq!(count(&db, "SELECT count(*) FROM sqlstreams.message_log_1").await, 101);

    // What cursors know counts as well: a group that was told to start at an id that is not there yet, or was.
    db.batch_execute("UPDATE sqlstreams.consumer_group_cursor_1 SET claimed = 20000")
        .await
        .unwrap();
    records = vec![record(20_000, 0)];
    let error = stream.import(&records, &keep).await.unwrap_err();
    assert!(error.to_string().contains("20000"), "{error}");
    stream.import(&[record(20_001, 0)], &keep).await.unwrap();
}

#[tokio::test]
async fn what_makes_no_sense_is_refused_with_its_place() {
    let (client, db) = client().await;
    let stream = client.stream::<Vec<u8>>("s").codec::<Bytes>();
    let stream = stream.payload_type(PayloadType::Json).create().await.unwrap();
    let at = SystemTime::UNIX_EPOCH;
    let good = |id| Record::new(id, at, b"1".to_vec());
    let bad = |change: &dyn Fn(&mut Record<Vec<u8>>)| {
        let mut record = good(2);
        change(&mut record);
        vec![good(1), record, good(3)]
    };
    for keep in [false, true] {
        let how = Import::new().keep_ids(keep);
        for (records, said) in [
            (bad(&|r| r.payload = Some(b"{".to_vec())), "json"),
            (bad(&|r| r.payload = Some(b"\0".to_vec())), "NUL"),
            (bad(&|r| r.payload = None), "tombstones"),
            (bad(&|r| r.headers = Some("[]".to_owned())), "JSON object"),
            (bad(&|r| r.headers = Some(r#"{"a":"\u0000"}"#.to_owned())), "U+0000"),
            (bad(&|r| r.key = Some("x".repeat(1025))), "1025"),
        ] {
            let error = stream.import(&records, &how).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidMessage, "{error:?}");
            assert_eq!(error.place(), Some(1), "{error:?}");
            assert!(error.to_string().contains(said), "{said}: {error}");
        }
        for ids in [[1, 1], [2, 1], [0, 1]] {
            let error = stream.import(&ids.map(good), &how).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error:?}");
        }
    }
    let error = stream.import(&[good(1)], &Import::new().name("")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidName);
    assert_eq!(count(&db, "SELECT count(*) FROM sqlstreams.message_log_1").await, 0);
    assert_eq!(stream.import(&[], &Import::new()).await.unwrap().stored, 0);
}

const KEEP: &str = "SELECT FROM sqlstreams.import_messages(1, true, NULL, ARRAY[1000, 1002], ARRAY[NULL, NULL], ARRAY[NULL, NULL], ARRAY[NULL, NULL],
    ARRAY[now(), now()], ARRAY[NULL, NULL]::timestamptz[], ARRAY['1', '2']::json[])";

/// An import that was rolled back leaves nothing behind, so that it can come again; while one is open, readers wait for it and producers, too.
#[tokio::test]
async fn kept_ids_come_with_their_transaction_or_not_at_all() {
    let url = database().await;
    let client = Client::connect(&url).await.unwrap();
    let (importer, db) = (connect(&url).await, connect(&url).await);
    let stream = numbers(&client, "s", 3).await;
    let head = async || count(&db, "SELECT sqlstreams.stream_head(1)").await;
    importer.batch_execute(&format!("BEGIN; {KEEP}; ROLLBACK")).await.unwrap();
    assert_eq!(head().await, 3, "an id was drawn by what was taken back");

    importer.batch_execute(&format!("BEGIN; {KEEP}")).await.unwrap();
    for _ in 0..3 {
        assert_eq!(read_all(&stream, 10).await.1, 3);
        assert_eq!(head().await, 3);
    }
    let sending = tokio::spawn({
        let producer = stream.producer();
        async move { producer.send(&4).await.unwrap().id }
    });
    let waits = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
    eventually(async || count(&db, waits).await == 1).await;
    assert!(!sending.is_finished(), "a producer drew an id beside an import");
    importer.batch_execute("COMMIT").await.unwrap();
    assert_eq!(sending.await.unwrap(), 1003);
    eventually(async || read_all(&stream, 10).await.1 == 1003).await;
    assert_eq!(ids(&read_all(&stream, 10).await.0), [1, 2, 3, 1000, 1002, 1003]);

    // It waits for who writes, not for ever, and tells.
    db.batch_execute("BEGIN; INSERT INTO sqlstreams.message_log_1 (payload) VALUES ('5')")
        .await
        .unwrap();
    let error = importer
        .batch_execute(&KEEP.replace("1000", "2000").replace("1002", "2002"))
        .await
        .unwrap_err();
    assert_eq!(error.code().unwrap().code(), "55P03");
    db.batch_execute("COMMIT").await.unwrap();
}

/// Producers, imports with kept ids, a reader of the log and consumers at once: nobody passes over anything.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn nobody_passes_over_what_is_imported_meanwhile() {
    let (client, db) = client().await;
    let stream = client.stream::<u64>("s").partition_size(1000).create().await.unwrap();
    // First for the producers, then, when nothing comes any more, for the reader.
    let [over, complete] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
    let producers: Vec<_> = (0..3)
        .map(|_| {
            let (producer, over) = (stream.producer(), over.clone());
            tokio::spawn(async move {
                while !over.load(Ordering::SeqCst) {
                    producer.send(&1).await.unwrap();
                }
            })
        })
        .collect();
    let read = tokio::spawn({
        let (stream, complete) = (stream.clone(), complete.clone());
        async move {
            let (mut seen, mut after) = (BTreeSet::new(), 0);
            loop {
                let ended = complete.load(Ordering::SeqCst);
                let page = stream.read_log(after, i64::MAX, 200).await.unwrap();
                seen.extend(page.records.iter().map(|r| r.id));
                if ended && page.upto == page.head {
                    return seen;
                }
                after = page.upto;
            }
        }
    });
    let handled = Arc::new(Mutex::new(BTreeMap::<i64, u32>::new()));
    let stop = sqlstreams::CancellationToken::new();
    let consumer = tokio::spawn({
        let (handled, stop) = (handled.clone(), stop.clone());
        let consumer = stream.group("g").consumer().stop_on(stop);
        async move {
            let handler = move |m: Delivery<u64>| {
                let handled = handled.clone();
                async move {
                    *handled.lock().await.entry(m.id).or_default() += 1;
                    Ok::<_, String>(())
                }
            };
            consumer.run(handler).await
        }
    });
    let keep = Import::new().keep_ids(true);
    let mut imports = 0;
    while imports < 15 {
        let head = stream.info().await.unwrap().head;
        // A gap, and some with gaps between them. A producer may be faster.
        let first = head + 40;
        let records: Vec<_> = (0..20).map(|n| record(first + n * 2, 2)).collect();
        match stream.import(&records, &keep).await {
            Ok(done) => {
                assert_eq!(done.stored, 20);
                imports += 1;
            }
            Err(error) => assert_eq!(error.kind(), ErrorKind::ImportConflict, "{error:?}"),
        }
    }
    over.store(true, Ordering::SeqCst);
    for producer in producers {
        producer.await.unwrap();
    }
    complete.store(true, Ordering::SeqCst);
    let seen = read.await.unwrap();
    let rows = db.query("SELECT id FROM sqlstreams.message_log_1", &[]).await.unwrap();
    let stored: BTreeSet<i64> = rows.iter().map(|row| row.get(0)).collect();
    assert_eq!(seen, stored, "the reader passed over something");
    eventually(async || handled.lock().await.len() == stored.len()).await;
    stop.cancel();
    consumer.await.unwrap().unwrap();
    let handled = handled.lock().await;
    assert!(handled.keys().eq(stored.iter()), "a group passed over something");
    assert!(handled.values().all(|n| *n == 1), "something was handled twice");
}

fn any_payload(payload_type: PayloadType) -> BoxedStrategy<Vec<u8>> {
    let text = "[^\0]{0,40}";
    match payload_type {
        PayloadType::Json | PayloadType::Jsonb => prop_oneof![
            text.prop_map(|s| serde_json::to_vec(&s).unwrap()),
            "[ \n\t]{0,3}\\{\"[a-z]{1,5}\":[ \n]{0,2}-?[1-9][0-9]{0,25}(\\.[0-9]{1,9})?(e[0-9]{1,2})?\\}[ \n]{0,3}"
                .prop_map(String::into_bytes),
            Just(b"null".to_vec()),
        ]
        .boxed(),
        PayloadType::Text => text.prop_map(String::into_bytes).boxed(),
        _ => proptest::collection::vec(any::<u8>(), 0..80).boxed(),
    }
}

/// What is read can be imported, and is then the same, byte for byte.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_read_is_what_was_imported() {
    let (client, _) = client().await;
    for payload_type in
        [PayloadType::Json, PayloadType::Jsonb, PayloadType::Text, PayloadType::Bytea]
    {
        let make = async |name: &str| {
            let stream = client.stream::<Vec<u8>>(format!("{name} {payload_type}"));
            let stream = stream.codec::<Bytes>().payload_type(payload_type).compacted(true);
            stream.create().await.unwrap()
        };
        let (first, second) = (make("a").await, make("b").await);
        let mut runner = proptest::test_runner::TestRunner::deterministic();
        let one = (
            "[^\0]{0,20}",
            proptest::option::of("[^\0]{0,20}"),
            proptest::option::of("[^\0]{0,10}"),
            proptest::option::of(any_payload(payload_type)),
            -60_000_000_000_000_000_i64..9_000_000_000_000_000,
            proptest::option::of(0_u64..9_000_000_000_000_000),
        );
        let mut records = Vec::new();
        let mut id = 0;
        for _ in 0..300 {
            let tree = proptest::strategy::Strategy::new_tree(&one, &mut runner).unwrap();
            let (key, routing_key, header, payload, at, expires) =
                proptest::strategy::ValueTree::current(&tree);
            id += 1 + i64::from(fastrand::u8(..4));
            let micros = Duration::from_micros(at.unsigned_abs());
            let at = if at < 0 {
                SystemTime::UNIX_EPOCH - micros
            } else {
                SystemTime::UNIX_EPOCH + micros
            };
            let mut record = Record::new(id, at, payload);
            record.key = Some(key);
            record.routing_key = routing_key;
            record.headers = header.map(|h| serde_json::json!({"h": h}).to_string());
            record.expires_at =
                expires.map(|us| SystemTime::UNIX_EPOCH + Duration::from_micros(us));
            records.push(record);
        }
        records.push(Record::new(
            id + 1,
            SystemTime::UNIX_EPOCH,
            match payload_type {
                PayloadType::Json | PayloadType::Jsonb => {
                    format!("\"{}\"", "é".repeat(500_000)).into_bytes()
                }
                PayloadType::Text => "é".repeat(500_000).into_bytes(),
                _ => vec![0; 1_000_000],
            },
        ));
        records.last_mut().unwrap().key = Some("large".to_owned());
        let keep = Import::new().keep_ids(true);
        first.import(&records, &keep).await.unwrap();
        let (read, _) = read_all(&first, 100).await;
        if payload_type != PayloadType::Jsonb {
            let payloads =
                |all: &[Record<Vec<u8>>]| all.iter().map(|r| r.payload.clone()).collect::<Vec<_>>();
            assert!(payloads(&read) == payloads(&records), "{payload_type}");
        }
        second.import(&read, &keep).await.unwrap();
        let (again, _) = read_all(&second, 77).await;
        assert!(read == again, "{payload_type}");
        for (was, is) in records.iter().zip(&read) {
            assert_eq!((was.id, &was.key, &was.routing_key), (is.id, &is.key, &is.routing_key));
            assert_eq!((was.produced_at, was.expires_at), (is.produced_at, is.expires_at));
            assert_eq!(was.headers(), is.headers());
        }
    }
}

/// Plain SQL can store what no clock shows. Nothing fails on it, and it comes back as it was.
#[tokio::test]
async fn messages_of_infinite_times_are_messages() {
    let (client, db) = client().await;
    let from = client.stream::<u64>("from").create().await.unwrap();
    db.batch_execute(
        "INSERT INTO sqlstreams.message_log_1 (produced_at, expires_at, payload)
         VALUES ('-infinity', NULL, '1'), ('infinity', 'infinity', '2'), (now(), NULL, '3'), ('infinity', NULL, '4'), ('-infinity', '-infinity', '5')",
    )
    .await
    .unwrap();
    let (records, _) = read_all(&from, 2).await;
    assert_eq!(ids(&records), [1, 2, 3, 4, 5]);
    for (n, keep) in [(2, true), (3, false)] {
        let to = client.stream::<u64>(&format!("to {n}")).create().await.unwrap();
        let how = Import::new().keep_ids(keep).name("all");
        assert_eq!(to.import(&records, &how).await.unwrap().stored, 5);
        assert_eq!(read_all(&to, 1000).await.0, records);
        let differ = format!(
            "SELECT count(*) FROM sqlstreams.message_log_1 AS a JOIN sqlstreams.message_log_{n} AS b USING (id)
             WHERE (a.produced_at, a.expires_at) IS NOT DISTINCT FROM (b.produced_at, b.expires_at)"
        );
        assert_eq!(count(&db, &differ).await, 5);
    }
    let to = client.stream::<u64>("to 2").open().await.unwrap();
    assert_eq!(to.import(&records, &Import::new().keep_ids(true)).await.unwrap().skipped, 5);
    // Groups get them, but for the one that expired, wherever they begin.
    let group = from.group("g").create_if_missing().await.unwrap();
    let got = Arc::new(Mutex::new(Vec::new()));
    let seen = got.clone();
    let handler = move |m: Delivery<u64>| {
        let seen = seen.clone();
        async move { seen.lock().await.push(m.payload) }
    };
    let consumed = group.consumer().concurrency(1).until_caught_up().run(handler).await.unwrap();
    assert_eq!((consumed.handled, consumed.expired), (4, 1));
    assert_eq!(*got.lock().await, [1, 2, 3, 4]);
    let hour = SystemTime::now() - Duration::from_secs(3600);
    assert!((0..=5).contains(&from.position_at(hour).await.unwrap()));
    group.seek(sqlstreams::Start::Time(hour)).preview().await.unwrap();
    group.replay().from(hour).preview().await.unwrap();
    assert_eq!(from.read(&[1, 2, 4]).await.unwrap().len(), 3);
}
