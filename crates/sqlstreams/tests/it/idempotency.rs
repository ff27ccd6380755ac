//! Idempotency keys: what is sent twice is stored once, whoever sends it, in whatever way.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sqlstreams::{Client, Duplicate, ErrorKind, Outgoing, PayloadType, Receipt, Stream};

use crate::proxy::{Cut, Place, Proxy};
use crate::support::{client, client_at, connect, count, database, eventually, until};

/// What was told of a message: its id, and whether it is a duplicate.
fn told(receipt: &Receipt) -> (i64, Option<Duplicate>) {
    (receipt.id, receipt.duplicate)
}

const SAME: Option<Duplicate> = Some(Duplicate::SamePayload);
const OTHER: Option<Duplicate> = Some(Duplicate::OtherPayload);

async fn stored(db: &tokio_postgres::Client) -> i64 {
    count(db, "SELECT count(*) FROM sqlstreams.message_log_1").await
}

#[tokio::test]
async fn a_duplicate_gets_the_first_ones_id_and_says_so() {
    let (client, db) = client().await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    let producer = stream.producer();
    let first = producer.send(&1).idempotency_key("a").key("k").await.unwrap();
    assert_eq!((first.duplicate, first.is_duplicate()), (None, false));
    let again = producer.send(&1).idempotency_key("a").await.unwrap();
    assert_eq!(told(&again), (first.id, SAME));
    let other = producer.send(&2).idempotency_key("a").await.unwrap();
    assert_eq!(told(&other), (first.id, OTHER));
    let keyless = producer.send(&1).await.unwrap();
    assert_eq!(keyless.duplicate, None);

    // In a batch each message by itself, in order, also where the first one is in the batch, too.
    let keys = ["b", "a", "c", "b", "", "c", "b"];
    let payloads = [10, 1, 11, 10, 12, 99, 10];
    let batch = || {
        payloads.iter().zip(keys).map(|(payload, key)| match key {
            "" => Outgoing::new(payload),
            key => Outgoing::new(payload).idempotency_key(key),
        })
    };
    let sent = producer.send_all(batch()).await.unwrap();
    let [b, c, none] = [sent[0].id, sent[2].id, sent[4].id];
    assert!(keyless.id < b && b < c && c < none, "{sent:?}");
    let expected =
        [(b, None), (first.id, SAME), (c, None), (b, SAME), (none, None), (c, OTHER), (b, SAME)];
    assert_eq!(sent.iter().map(told).collect::<Vec<_>>(), expected);
    let sent = producer.send_all(batch()).await.unwrap();
    assert!(sent.iter().enumerate().all(|(n, r)| r.is_duplicate() != (n == 4)), "{sent:?}");
    assert_eq!(stored(&db).await, 2 + 3 + 1);
    let read = stream.read(&[first.id, c]).await.unwrap();
    assert_eq!((read[0].payload, read[0].key.as_deref(), read[1].payload), (1, Some("k"), 11));
    assert_eq!(count(&db, "SELECT count(*) FROM sqlstreams.message_idempotency_1").await, 3);
}

/// The same text in another spelling is another payload, unless the stream does not keep spellings.
#[tokio::test]
async fn payloads_are_compared_as_they_are_stored() {
    let (client, _db) = client().await;
    for (payload_type, one, two, same) in [
        (PayloadType::Json, "{\"a\": 1}", "{\"a\":1}", false),
        (PayloadType::Jsonb, "{\"a\": 1, \"b\": 2}", "{\"b\":2,\"a\":1}", true),
        (PayloadType::Text, "é", "e", false),
        (PayloadType::Bytea, "\0", "\0\0", false),
    ] {
        let stream = client.stream::<Vec<u8>>(payload_type.as_str()).payload_type(payload_type);
        let stream = stream.codec::<sqlstreams::Bytes>().create().await.unwrap();
        let producer = stream.producer();
        let send = async |text: &str| {
            let payload = text.as_bytes().to_vec();
            producer.send(&payload).idempotency_key("k").await.unwrap().duplicate
        };
        assert_eq!(send(one).await, None);
        assert_eq!(send(one).await, SAME, "{payload_type}");
        assert_eq!(send(two).await, if same { SAME } else { OTHER }, "{payload_type}");
    }
}

#[tokio::test]
async fn keys_that_cannot_be_are_refused() {
    let (client, db) = client().await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    let producer = stream.producer();
    let long = "x".repeat(sqlstreams::MAX_IDEMPOTENCY_KEY_BYTES + 1);
    for (key, word) in [("", "empty"), (&long, "1025 bytes"), ("a\0b", "NUL")] {
        let error = producer.send(&1).idempotency_key(key).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidMessage);
        assert!(error.to_string().contains(word), "{error}");
    }
    for window in [Duration::ZERO, Duration::from_secs(299), Duration::MAX] {
        let error = client.stream::<u64>("t").idempotency_window(window).create().await;
        assert_eq!(error.unwrap_err().kind(), ErrorKind::InvalidArgument, "{window:?}");
        let error = stream.set_idempotency_window(window).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{window:?}");
    }
    stream.set_idempotency_window(Duration::from_secs(3600)).await.unwrap();
    assert_eq!(stream.info().await.unwrap().idempotency_window, Duration::from_secs(3600));

    // A message that cannot be stored takes its key along.
    let raw = client.stream::<Vec<u8>>("s").codec::<sqlstreams::Bytes>().open().await.unwrap();
    let (bad, good) = (b"{".to_vec(), b"7".to_vec());
    let batch = [&good, &bad].map(|p| Outgoing::new(p).idempotency_key(format!("{p:?}")));
    let error = raw.producer().send_all(batch).await.unwrap_err();
    assert_eq!((error.kind(), error.place()), (ErrorKind::InvalidMessage, Some(1)));
    assert_eq!(stored(&db).await, 0);
    let sent = raw.producer().send(&good).idempotency_key(format!("{good:?}")).await.unwrap();
    assert_eq!(sent.duplicate, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn tb_167_in_the_callers_transaction_the_key_goes_with_it() {
    let url = database().await;
    let (client, db) = client_at(&url).await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    let mut own = connect(&url).await;

    let tx = own.transaction().await.unwrap();
    let sent = stream.send_in(&tx, &1).idempotency_key("k").await.unwrap();
    let again = stream.send_in(&tx, &1).idempotency_key("k").await.unwrap();
    assert_eq!((sent.duplicate, told(&again)), (None, (sent.id, SAME)));
    tx.rollback().await.unwrap();
    assert_eq!(stored(&db).await, 0);
    // In plain SQL, as psql sends it.
    own.batch_execute(
        "BEGIN; INSERT INTO sqlstreams.message_log_1 (payload) VALUES ('1'); SELECT sqlstreams.produce('s', '1');
         SELECT sqlstreams.produce('s', '1', p_idempotency_key => 'k'); SELECT sqlstreams.produce('s', '1', p_delay => '1 hour')",
    )
    .await
    .unwrap();
    assert_eq!(stored(&db).await, 0, "nobody sees it yet");
    own.batch_execute("ROLLBACK").await.unwrap();
    for table in ["message_log_1", "message_idempotency_1", "message_delayed_1"] {
        assert_eq!(count(&db, &format!("SELECT count(*) FROM sqlstreams.{table}")).await, 0);
    }

    // An open one is waited for: only its end tells.
    for commit in [false, true] {
        let tx = own.transaction().await.unwrap();
        let sent = stream.send_in(&tx, &1).idempotency_key("k").await.unwrap();
        assert_eq!(sent.duplicate, None);
        let producer = stream.producer();
        let other = tokio::spawn(async move { producer.send(&1).idempotency_key("k").await });
        let waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%produce_1%'";
        eventually(async || count(&db, waiting).await == 1).await;
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert!(!other.is_finished());
        let expected = if commit { SAME } else { None };
        match commit {
            true => tx.commit().await.unwrap(),
            false => tx.rollback().await.unwrap(),
        }
        let other = other.await.unwrap().unwrap();
        assert_eq!(other.duplicate, expected);
        assert_eq!(other.id == sent.id, commit);
        if !commit {
            assert_eq!(db.execute("DELETE FROM sqlstreams.message_log_1", &[]).await.unwrap(), 1);
            db.execute("DELETE FROM sqlstreams.message_idempotency_1", &[]).await.unwrap();
        }
    }
    assert_eq!(stored(&db).await, 1);

    // Where one snapshot serves the whole transaction, a key that came after it is an error that says: again.
    let tx =
        own.build_transaction().isolation_level(tokio_postgres::IsolationLevel::RepeatableRead);
    let tx = tx.start().await.unwrap();
    tx.query("SELECT 1", &[]).await.unwrap();
    stream.producer().send(&2).idempotency_key("later").await.unwrap();
    let error = stream.send_in(&tx, &2).idempotency_key("later").await.unwrap_err();
    assert_eq!((error.sql_state(), error.is_retryable()), (Some("40001"), true));
}

/// Many at once, batches that overlap, some of which are rolled back: each key has one message, and everybody is told of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn keys_that_race_are_stored_once_each() {
    const KEYS: u64 = 3_000;
    const SENDERS: usize = 10;
    let url = database().await;
    let (client, db) = client_at(&url).await;
    let stream = client.stream::<u64>("s").partition_size(1000).create().await.unwrap();
    // The caller's transactions cannot make room by themselves.
    db.batch_execute("SELECT sqlstreams.ensure_partitions(1, 40)").await.unwrap();
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let answers: Arc<Mutex<BTreeMap<u64, BTreeSet<i64>>>> = Arc::default();
    let mut senders = Vec::new();
    for sender in 0..SENDERS {
        let (stream, answers, url) = (stream.clone(), answers.clone(), url.clone());
        senders.push(tokio::spawn(async move {
            let mut random = fastrand::Rng::with_seed(seed + sender as u64);
            let (producer, mut db) = (stream.producer(), connect(&url).await);
            let (mut originals, mut duplicates, mut around) = (0, 0, 0);
            while around < KEYS {
                let size = random.usize(1..30);
                let keys: Vec<u64> =
                    (0..size).map(|_| (around + random.u64(..40)) % KEYS).collect();
                around += random.u64(..15);
                let batch =
                    || keys.iter().map(|key| Outgoing::new(key).idempotency_key(key.to_string()));
                let receipts = match random.u8(..3) {
                    0 => producer.send_all(batch()).await.unwrap(),
                    _ => {
                        let tx = db.transaction().await.unwrap();
                        let receipts = stream.send_all_in(&tx, batch()).await.unwrap();
                        if random.f64() < 0.25 {
                            tx.rollback().await.unwrap();
                            continue;
                        }
                        tx.commit().await.unwrap();
                        receipts
                    }
                };
                assert_eq!(receipts.len(), keys.len());
                let mut answers = answers.lock().unwrap();
                for (key, receipt) in keys.iter().zip(receipts) {
                    assert_ne!(receipt.duplicate, OTHER);
                    answers.entry(*key).or_default().insert(receipt.id);
                    match receipt.is_duplicate() {
                        true => duplicates += 1,
                        false => originals += 1,
                    }
                }
            }
            (originals, duplicates)
        }));
    }
    let (mut originals, mut duplicates) = (0, 0);
    for sender in senders {
        let sent = sender.await.unwrap();
        (originals, duplicates) = (originals + sent.0, duplicates + sent.1);
    }
    println!("{originals} stored, {duplicates} duplicates");
    let answers = answers.lock().unwrap().clone();
    let rows =
        db.query("SELECT payload::text::bigint, id FROM sqlstreams.message_log_1", &[]).await;
    let rows = rows.unwrap();
    let log: BTreeMap<u64, BTreeSet<i64>> = rows.iter().fold(BTreeMap::new(), |mut log, row| {
        log.entry(row.get::<_, i64>(0) as u64).or_default().insert(row.get(1));
        log
    });
    assert!(log.values().all(|ids| ids.len() == 1), "a key is stored twice");
    assert_eq!(answers, log, "somebody was told of another message");
    assert_eq!(originals, log.len());
    assert!(duplicates > 10 * originals, "too little overlap");
}

/// Batches of more than one statement may wait for each other in a circle. Nobody hears of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn large_batches_that_deadlock_are_sent_again() {
    const MESSAGES: u64 = 12_000;
    let (client, db) = client().await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    let sent = [false, true].map(|reverse| {
        let stream = stream.clone();
        tokio::spawn(async move {
            let mut keys: Vec<u64> = (0..MESSAGES).collect();
            if reverse {
                keys.reverse();
            }
            let batch = keys.iter().map(|key| Outgoing::new(key).idempotency_key(key.to_string()));
            stream.producer().send_all(batch).await.unwrap()
        })
    });
    let mut duplicates = 0;
    for sent in sent {
        duplicates += sent.await.unwrap().iter().filter(|receipt| receipt.is_duplicate()).count();
    }
    assert_eq!((stored(&db).await, duplicates as u64), (MESSAGES as i64, MESSAGES));
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_are_forgotten_after_the_window_in_bounded_steps() {
    const KEYS: u64 = 30_000;
    let (client, db) = client().await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    let numbers: Vec<u64> = (0..KEYS).collect();
    let batch = |from: usize| {
        numbers[from..].iter().map(|n| Outgoing::new(n).idempotency_key(n.to_string()))
    };
    let first = stream.producer().send_all(batch(0)).await.unwrap();
    let keys = "SELECT count(*) FROM sqlstreams.message_idempotency_1";
    assert_eq!(count(&db, keys).await, KEYS as i64);

    // A day later, most of them: what has outlived the window counts as never sent, removed or not.
    let age = "UPDATE sqlstreams.message_idempotency_1 SET sent_at = sent_at - interval '24 hours' WHERE message_id <= $1";
    let old = first[KEYS as usize - 1001].id;
    db.execute(age, &[&old]).await.unwrap();
    let again = stream.producer().send_all(batch(KEYS as usize - 2000)).await.unwrap();
    assert!(again[..1000].iter().all(|r| !r.is_duplicate() && r.id > first[KEYS as usize - 1].id));
    assert!(again[1000..].iter().all(Receipt::is_duplicate));

    // Somebody else's snapshot keeps the dead rows. Each step still reads about what it removes.
    let holder = connect_again(&db).await;
    holder.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1").await.unwrap();
    db.batch_execute("ANALYZE sqlstreams.message_idempotency_1").await.unwrap();
    let mut from = None::<std::time::SystemTime>;
    let mut steps = Vec::new();
    loop {
        let before = touched(&db).await;
        let sql = "SELECT removed, upto FROM sqlstreams.expire_idempotency_keys(1, coalesce($1::timestamptz, '-infinity'), 1000)";
        let row = db.query_one(sql, &[&from]).await.unwrap();
        steps.push((row.get::<_, i64>(0), touched(&db).await - before));
        if steps.last().unwrap().0 == 0 {
            break;
        }
        from = row.get(1);
    }
    println!("{steps:?}");
    assert_eq!(steps.iter().map(|s| s.0).sum::<i64>(), KEYS as i64 - 2000);
    let most = steps.iter().map(|s| s.1).max().unwrap();
    assert!(most < 15_000, "a step of 1,000 keys touched {most} pages");
    assert_eq!(count(&db, keys).await, 2000);
    holder.batch_execute("COMMIT").await.unwrap();

    // And by itself: whoever sends with keys removes old ones from time to time.
    db.execute(age, &[&i64::MAX]).await.unwrap();
    let other = Client::connect(&url_of(&db).await).await.unwrap();
    let other = other.stream::<u64>("s").open().await.unwrap();
    other.producer().send(&1).idempotency_key("new").await.unwrap();
    until("old keys are gone", Duration::from_secs(20), async || count(&db, keys).await == 1).await;
}

async fn url_of(db: &tokio_postgres::Client) -> String {
    let name: String = db.query_one("SELECT current_database()::text", &[]).await.unwrap().get(0);
    crate::support::cluster().url(&name)
}

async fn connect_again(db: &tokio_postgres::Client) -> tokio_postgres::Client {
    connect(&url_of(db).await).await
}

/// Pages of the table of keys and its indexes that this session's database has touched.
async fn touched(db: &tokio_postgres::Client) -> i64 {
    db.batch_execute("SELECT pg_stat_force_next_flush()").await.unwrap();
    count(db, "SELECT pg_stat_get_blocks_fetched('sqlstreams.message_idempotency_1'::regclass) + sum(pg_stat_get_blocks_fetched(indexrelid))::bigint
               FROM pg_index WHERE indrelid = 'sqlstreams.message_idempotency_1'::regclass").await
}

/// Duplicates draw no ids. (A key that loses a race may.)
#[tokio::test]
async fn tb_117_duplicates_use_up_no_ids() {
    let (client, db) = client().await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    let numbers: Vec<u64> = (0..5_000).collect();
    let batch = || numbers.iter().map(|n| Outgoing::new(n).idempotency_key(n.to_string()));
    stream.producer().send_all(batch()).await.unwrap();
    let drawn = "SELECT last_value FROM sqlstreams.message_log_1_id_seq";
    let before = count(&db, drawn).await;
    for _ in 0..20 {
        let again = stream.producer().send_all(batch()).await.unwrap();
        assert!(again.iter().all(Receipt::is_duplicate));
    }
    assert_eq!(count(&db, drawn).await, before);
    let smaller = "SELECT count(*) FROM pg_sequences WHERE schemaname = 'sqlstreams' AND data_type <> 'bigint'::regtype";
    assert_eq!(count(&db, smaller).await, 0);
}

/// Statements that carry messages, by what they say.
async fn statements(url: &str, work: impl AsyncFnOnce(&Stream<u64>)) -> Vec<String> {
    let proxy = Proxy::start(url).await;
    let client = Client::connect(&proxy.url).await.unwrap();
    let stream = client.stream::<u64>("s").create_if_missing().await.unwrap();
    let sent: Arc<Mutex<Vec<String>>> = Arc::default();
    let log = sent.clone();
    proxy.set(move |statement| {
        if ["message_log_1", "produce_1", "message_idempotency_1"]
            .iter()
            .any(|word| statement.sql.contains(word))
        {
            log.lock().unwrap().push(statement.sql.to_owned());
        }
        None
    });
    work(&stream).await;
    let sent = sent.lock().unwrap();
    sent.clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn tb_169_a_batch_with_keys_is_one_statement_and_one_without_is_what_it_was() {
    let url = database().await;
    let numbers: Vec<u64> = (0..1_000).collect();
    let numbers = &numbers;
    let keyed = statements(&url, async |stream| {
        let batch = numbers.iter().map(|n| Outgoing::new(n).idempotency_key(n.to_string()));
        stream.producer().send_all(batch).await.unwrap();
    });
    let keyed = keyed.await;
    assert_eq!(keyed.len(), 1, "{keyed:?}");
    assert!(keyed[0].contains("produce_1("), "{keyed:?}");

    let plain = statements(&url, async |stream| {
        stream.producer().send_all(numbers.iter().map(Outgoing::new)).await.unwrap();
        stream.producer().send(&1).key("k").await.unwrap();
    });
    let plain = plain.await;
    assert_eq!(plain.len(), 2, "{plain:?}");
    let insert = "INSERT INTO \"sqlstreams\".message_log_1 (key, routing_key, headers, payload)";
    assert!(plain.iter().all(|sql| sql.contains(insert)), "{plain:?}");
    let db = connect(&url).await;
    assert_eq!(count(&db, "SELECT count(*) FROM sqlstreams.message_idempotency_1").await, 1_000);
}

/// A commit whose answer is lost is found out about as without keys: its message is stored, not a duplicate of itself. Sent
/// once more, it is one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commits_that_are_not_answered_store_each_key_once() {
    let url = database().await;
    let proxy = Proxy::start(&url).await;
    let client = Client::connect(&proxy.url).await.unwrap();
    let stream = client.stream::<u64>("s").create().await.unwrap();
    let db = connect(&url).await;
    let producer = stream.producer();
    // What looks after partitions and keys has been.
    producer.send(&0).idempotency_key("first").await.unwrap();
    tokio::time::sleep(Duration::from_millis(500)).await;
    let mut sent = BTreeMap::from([(0, 0)]);
    for text in ["BEGIN", "produce_1", "pg_current_xact_id", "COMMIT"] {
        for place in [Place::Before, Place::Sent, Place::InReply(3), Place::InReply(usize::MAX)] {
            for again in [false, true] {
                let cuts = proxy.cuts();
                let payload = sent.len() as u64 - u64::from(again);
                proxy.cut_next(text, Cut::Close(place));
                let receipt = producer.send(&payload).idempotency_key(payload.to_string()).await;
                let receipt = receipt.unwrap();
                assert_eq!(proxy.cuts(), cuts + 1, "{text} {place:?}");
                assert_eq!(receipt.duplicate, if again { SAME } else { None }, "{text} {place:?}");
                let before = sent.insert(payload, receipt.id);
                assert_eq!(before, again.then_some(receipt.id));
            }
        }
    }
    let rows = db.query("SELECT payload::text::bigint, id FROM sqlstreams.message_log_1 WHERE payload::text <> '0'", &[]).await;
    let log: BTreeMap<u64, i64> =
        rows.unwrap().iter().map(|row| (row.get::<_, i64>(0) as u64, row.get(1))).collect();
    sent.remove(&0);
    assert_eq!(log, sent);
}

/// The log's partitions are made where they are missing, for messages with keys as for others.
#[tokio::test]
async fn a_batch_with_keys_of_any_size_finds_room() {
    let (client, db) = client().await;
    let stream = client.stream::<u64>("s").partition_size(1000).create().await.unwrap();
    let numbers: Vec<u64> = (0..23_000).collect();
    let batch = numbers.iter().map(|n| Outgoing::new(n).idempotency_key(n.to_string()));
    let receipts = stream.producer().send_all(batch).await.unwrap();
    assert!(receipts.windows(2).all(|pair| pair[0].id < pair[1].id));
    assert!(receipts.iter().all(|receipt| !receipt.is_duplicate()));
    assert_eq!(stored(&db).await, 23_000);
}
