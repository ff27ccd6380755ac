//! Delayed messages: they wait beside the log, and enter it once, when they are due.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use sqlstreams::{Client, Duplicate, ErrorKind, Outgoing};
use sqlstreams_dev::Cluster;

use crate::proxy::{Cut, Place, Proxy};
use crate::running::Running;
use crate::support::{client, client_at, connect, count, database, eventually, until};

const LOG: &str = "SELECT count(*) FROM sqlstreams.message_log_1";
const WAITING: &str = "SELECT count(*) FROM sqlstreams.message_delayed_1";
const HOUR: Duration = Duration::from_secs(3600);

#[tokio::test(flavor = "multi_thread")]
async fn messages_come_when_they_are_due_in_that_order() {
    let (client, db) = client().await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    let mut consumers = Vec::new();
    for group in ["a", "b"] {
        // Ordered: handlers of a parallel group may overtake each other where messages come together.
        let group = stream.group(group).ordered().create().await.unwrap();
        consumers.push(Running::start(&group));
    }
    let producer = stream.producer();
    let begun = Instant::now();
    // By one clock: the sends themselves take their time.
    let since = SystemTime::now() + Duration::from_secs(2);
    for delay in [900, 300, 600] {
        let message =
            producer.send(&delay).key("k").deliver_at(since + Duration::from_millis(delay));
        let receipt = message.await.unwrap();
        assert!(receipt.delayed && !receipt.is_duplicate());
    }
    // What is due already goes the straight way.
    let past = producer.send(&0).deliver_at(SystemTime::now() - HOUR).await.unwrap();
    assert_eq!((past.delayed, past.id), (false, 1));
    assert!(!producer.send(&1).delay(Duration::ZERO).await.unwrap().delayed);
    assert_eq!(count(&db, WAITING).await, 3);
    for consumer in &mut consumers {
        let mut handled = Vec::new();
        while handled.len() < 5 {
            let payload = tokio::time::timeout(Duration::from_secs(10), consumer.handled.recv());
            handled.push(payload.await.unwrap().unwrap());
            assert!(begun.elapsed() >= Duration::from_millis(*handled.last().unwrap()));
        }
        handled[..2].sort_unstable();
        assert_eq!(handled, [0, 1, 300, 600, 900]);
    }
    println!("after {:?}", begun.elapsed());
    for consumer in consumers {
        consumer.stop().await;
    }
    // They are messages like others from then on: ids and times are those of their entry.
    let ids: Vec<i64> = (3..=5).collect();
    let read = stream.read(&ids).await.unwrap();
    assert_eq!(read.iter().map(|m| m.payload).collect::<Vec<_>>(), [300, 600, 900]);
    assert!(read.iter().all(|m| m.key.as_deref() == Some("k")));
    assert!(read.windows(2).all(|pair| pair[1].produced_at > pair[0].produced_at));
    assert_eq!(count(&db, WAITING).await, 0);
}

/// Whoever consumes until caught up has what was due when it began, though nobody consumed before.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_overdue_is_there_to_be_caught_up_with() {
    let (client, db) = client().await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    let numbers: Vec<u64> = (0..5_000).collect();
    let all = numbers.iter().map(|n| Outgoing::new(n).delay(Duration::from_millis(1)));
    let all: Vec<_> = all.chain([Outgoing::new(&0).delay(HOUR)]).collect();
    stream.producer().send_all(all).await.unwrap();
    tokio::time::sleep(Duration::from_millis(5)).await;
    let (first, second) = (stream.group("a").consumer(), stream.group("b").ordered().consumer());
    let (first, second) = tokio::join!(
        first.until_caught_up().run(async |_: sqlstreams::Delivery<u64>| {}),
        second.until_caught_up().run(async |_: sqlstreams::Delivery<u64>| {}),
    );
    assert_eq!((first.unwrap().handled, second.unwrap().handled), (5_000, 5_000));
    assert_eq!(count(&db, WAITING).await, 1);
}

#[tokio::test]
async fn they_can_be_listed_and_cancelled_until_they_are_due() {
    let (client, db) = client().await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    let producer = stream.producer();
    let numbers: Vec<u64> = (1..=5).collect();
    let batch = numbers.iter().map(|n| Outgoing::new(n).key("k").delay(HOUR * *n as u32));
    let sent = producer.send_all(batch).await.unwrap();
    assert!(sent.iter().all(|receipt| receipt.delayed));
    assert_eq!(stream.count_delayed().await.unwrap(), 5);
    let first = stream.delayed(None, 2).await.unwrap();
    assert_eq!(
        first.iter().map(|d| (d.id, d.payload)).collect::<Vec<_>>(),
        [(sent[0].id, 1), (sent[1].id, 2)]
    );
    assert_eq!(first[1].deliver_at.duration_since(first[1].sent_at).unwrap(), HOUR * 2);
    assert_eq!(first[0].key.as_deref(), Some("k"));
    let rest = stream.delayed(Some((first[1].deliver_at, first[1].id)), 100).await.unwrap();
    assert_eq!(rest.iter().map(|d| d.payload).collect::<Vec<_>>(), [3, 4, 5]);

    assert!(stream.cancel_delayed(sent[1].id).await.unwrap());
    for gone in [sent[1].id, 0, -1, 99, i64::MAX] {
        assert!(!stream.cancel_delayed(gone).await.unwrap(), "{gone}");
    }
    assert_eq!(stream.count_delayed().await.unwrap(), 4);

    // A mover passes over what somebody is about to cancel, and finds it when that comes to nothing.
    db.batch_execute(
        "UPDATE sqlstreams.message_delayed_1 SET deliver_at = deliver_at - interval '1 day'",
    )
    .await
    .unwrap();
    let other = connect(&url_of(&db).await).await;
    other
        .batch_execute(&format!("BEGIN; SELECT sqlstreams.cancel_delayed(1, {})", sent[2].id))
        .await
        .unwrap();
    let moved = "SELECT moved FROM sqlstreams.move_delayed(1)";
    assert_eq!(count(&db, moved).await, 3);
    other.batch_execute("ROLLBACK").await.unwrap();
    assert_eq!(count(&db, moved).await, 1);
    assert_eq!(count(&db, moved).await, 0);
    assert!(!stream.cancel_delayed(sent[2].id).await.unwrap());
    assert_eq!(count(&db, LOG).await, 4);
}

async fn url_of(db: &tokio_postgres::Client) -> String {
    let name: String = db.query_one("SELECT current_database()::text", &[]).await.unwrap().get(0);
    crate::support::cluster().url(&name)
}

#[tokio::test]
async fn a_key_that_is_known_answers_with_what_it_was_given_first() {
    let (client, db) = client().await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    let producer = stream.producer();
    let first = producer.send(&1).idempotency_key("a").delay(HOUR).await.unwrap();
    assert!(first.delayed && first.duplicate.is_none());
    for delay in [HOUR, 2 * HOUR, Duration::ZERO] {
        let again = producer.send(&1).idempotency_key("a").delay(delay).await.unwrap();
        assert_eq!((again.id, again.delayed), (first.id, true));
        assert_eq!(again.duplicate, Some(Duplicate::SamePayload));
    }
    // All kinds in one batch.
    let numbers = [1, 2, 3, 4, 2];
    let batch = || {
        let [a, b, c, d, e] = numbers.each_ref().map(Outgoing::new);
        [
            a.idempotency_key("a"),
            b.idempotency_key("b"),
            c.delay(HOUR),
            d,
            e.idempotency_key("b").delay(HOUR),
        ]
    };
    let sent = producer.send_all(batch()).await.unwrap();
    let flags: Vec<(bool, bool)> = sent.iter().map(|r| (r.delayed, r.is_duplicate())).collect();
    assert_eq!(flags, [(true, true), (false, false), (true, false), (false, false), (false, true)]);
    assert_eq!((sent[0].id, sent[4].id), (first.id, sent[1].id));
    assert_eq!((count(&db, LOG).await, count(&db, WAITING).await), (2, 2));
    // Also when it has been moved since, or cancelled.
    db.batch_execute(
        "UPDATE sqlstreams.message_delayed_1 SET deliver_at = clock_timestamp() WHERE id = 1",
    )
    .await
    .unwrap();
    assert_eq!(count(&db, "SELECT moved FROM sqlstreams.move_delayed(1)").await, 1);
    let again = producer.send(&1).idempotency_key("a").await.unwrap();
    assert_eq!((again.id, again.delayed, again.is_duplicate()), (first.id, true, true));
    assert_eq!(count(&db, LOG).await, 3);
}

#[tokio::test]
async fn times_that_cannot_be_are_refused_and_the_longest_wait() {
    let (client, db) = client().await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    let producer = stream.producer();
    let year = HOUR * 24 * 365;
    let never = producer.send(&1).delay(Duration::MAX).await.unwrap_err();
    assert_eq!(never.kind(), ErrorKind::InvalidMessage);
    assert!(never.to_string().contains("10,000 years"), "{never}");
    let far = SystemTime::UNIX_EPOCH + year * 20_000;
    let never = producer.send(&1).deliver_at(far).await.unwrap_err();
    assert_eq!(never.kind(), ErrorKind::InvalidMessage);
    assert!(producer.send(&1).delay(year * 9_999).await.unwrap().delayed);
    assert!(
        producer.send(&1).deliver_at(SystemTime::UNIX_EPOCH + year * 9_999).await.unwrap().delayed
    );
    let long_ago = SystemTime::UNIX_EPOCH - year * 1_000;
    assert!(!producer.send(&1).deliver_at(long_ago).await.unwrap().delayed);
    // Nobody stumbles over them.
    let group = stream.group("g").create().await.unwrap();
    let mut consumer = Running::start(&group);
    consumer.handles(1, Duration::from_secs(20)).await;
    producer.send(&2).delay(Duration::from_millis(200)).await.unwrap();
    consumer.handles(2, Duration::from_secs(20)).await;
    consumer.stop().await;
    assert_eq!(count(&db, WAITING).await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn in_the_callers_transaction_they_go_with_it() {
    let url = database().await;
    let (client, db) = client_at(&url).await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    let mut own = connect(&url).await;
    for commit in [false, true] {
        let tx = own.transaction().await.unwrap();
        let sent = stream.send_in(&tx, &1).delay(Duration::from_millis(100)).await.unwrap();
        assert!(sent.delayed);
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert_eq!(count(&db, "SELECT moved FROM sqlstreams.move_delayed(1)").await, 0);
        match commit {
            true => tx.commit().await.unwrap(),
            false => tx.rollback().await.unwrap(),
        }
    }
    // Late as it is, it comes.
    let mut consumer = Running::start(&stream.group("g").create().await.unwrap());
    consumer.handles(1, Duration::from_secs(20)).await;
    consumer.stop().await;
    assert_eq!(count(&db, WAITING).await, 0);
}

/// Twenty movers, whose sessions are ended at random, while others send, cancel and roll back.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn each_message_enters_the_log_once_whatever_happens_to_its_movers() {
    const MESSAGES: usize = 20_000;
    const MOVERS: usize = 20;
    let url = database().await;
    let (client, db) = client_at(&url).await;
    let stream = client.stream::<i64>("s").partition_size(1000).create().await.unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let (kills, moved) = (Arc::new(AtomicI64::new(0)), Arc::new(AtomicI64::new(0)));
    let mut movers = Vec::new();
    for _ in 0..MOVERS {
        let (url, stop, moved) = (url.clone(), stop.clone(), moved.clone());
        movers.push(tokio::spawn(async move {
            let mut db = connect(&url).await;
            while !stop.load(Ordering::SeqCst) {
                let limit = fastrand::i64(1..200);
                let sql = "SELECT moved, no_room FROM sqlstreams.move_delayed(1, p_limit => $1)";
                match db.query_one(sql, &[&limit]).await {
                    Ok(row) if row.get(1) => {
                        let _ = db.query("SELECT sqlstreams.ensure_partitions(1)", &[]).await;
                    }
                    Ok(row) => _ = moved.fetch_add(row.get(0), Ordering::SeqCst),
                    Err(_) => {
                        tokio::time::sleep(Duration::from_millis(5)).await;
                        db = connect(&url).await;
                    }
                }
                tokio::time::sleep(Duration::from_millis(fastrand::u64(..4))).await;
            }
        }));
    }
    let killer = tokio::spawn({
        let (url, stop, kills) = (url.clone(), stop.clone(), kills.clone());
        async move {
            let db = connect(&url).await;
            // In the middle of a move, more often than not.
            let kill = "SELECT count(pg_terminate_backend(pid)) FROM (SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) LIMIT 1) AS x";
            while !stop.load(Ordering::SeqCst) {
                kills.fetch_add(count(&db, kill).await, Ordering::SeqCst);
                tokio::time::sleep(Duration::from_millis(fastrand::u64(5..25))).await;
            }
        }
    });
    let mut cancelled = Vec::new();
    let producer = stream.producer();
    let deadline = Instant::now() + Duration::from_secs(120);
    let mut numbers: Vec<i64> = Vec::new();
    // Until enough movers were killed, however few of them a busy machine lets be in the middle of a move.
    while numbers.len() < MESSAGES || kills.load(Ordering::SeqCst) < 5 {
        assert!(
            Instant::now() < deadline,
            "only {} movers were killed",
            kills.load(Ordering::SeqCst)
        );
        let first = numbers.len() as i64;
        let chunk: Vec<i64> = (first..first + 100).collect();
        numbers.extend(&chunk);
        let delay = || Duration::from_millis(fastrand::u64(..1_500));
        let batch = chunk.iter().map(|n| Outgoing::new(n).delay(delay()));
        let sent = producer.send_all(batch).await.unwrap();
        for (n, receipt) in chunk.iter().zip(sent).filter(|_| fastrand::u8(..100) == 0) {
            if receipt.delayed && stream.cancel_delayed(receipt.id).await.unwrap() {
                cancelled.push(*n);
            }
        }
    }
    until("all are moved", Duration::from_secs(60), async || count(&db, WAITING).await == 0).await;
    stop.store(true, Ordering::SeqCst);
    killer.await.unwrap();
    for mover in movers {
        mover.await.unwrap();
    }
    println!("{kills:?} kills, {} cancelled, {moved:?} moves told", cancelled.len());
    let rows = db.query("SELECT payload::text::bigint FROM sqlstreams.message_log_1", &[]).await;
    let mut log: Vec<i64> = rows.unwrap().iter().map(|row| row.get(0)).collect();
    log.extend(&cancelled);
    log.sort_unstable();
    assert!(log == numbers, "{} messages are in the log or cancelled", log.len());
    assert!(!cancelled.is_empty());
}

/// A commit whose answer is lost stores a delayed message once, also where it was moved before anybody asked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commits_that_are_not_answered_store_it_once() {
    let url = database().await;
    let proxy = Proxy::start(&url).await;
    let (direct, db) = client_at(&url).await;
    let client = Client::connect(&proxy.url).await.unwrap();
    let stream = client.stream::<u64>("s").create().await.unwrap();
    let consumer = Running::start(
        &direct.stream::<u64>("s").open().await.unwrap().group("g").create().await.unwrap(),
    );
    let producer = stream.producer();
    producer.send(&0).delay(HOUR).await.unwrap();
    tokio::time::sleep(Duration::from_millis(500)).await;
    let mut sent = BTreeMap::new();
    for text in ["BEGIN", "produce_1", "pg_current_xact_id", "COMMIT"] {
        for place in [Place::Before, Place::Sent, Place::InReply(3), Place::InReply(usize::MAX)] {
            for delay in [Duration::from_micros(1), HOUR] {
                let cuts = proxy.cuts();
                proxy.cut_next(text, Cut::Close(place));
                let payload = sent.len() as u64 + 1;
                let receipt = producer.send(&payload).delay(delay).await.unwrap();
                assert_eq!(proxy.cuts(), cuts + 1, "{text} {place:?}");
                assert!(receipt.delayed && !receipt.is_duplicate());
                sent.insert(payload, delay);
            }
        }
    }
    let soon = sent.values().filter(|delay| **delay < HOUR).count();
    eventually(async || count(&db, LOG).await == soon as i64).await;
    consumer.stop().await;
    for (what, sql, expected) in [
        ("the log", "SELECT payload::text::bigint FROM sqlstreams.message_log_1", false),
        (
            "waiting",
            "SELECT payload::text::bigint FROM sqlstreams.message_delayed_1 WHERE payload::text <> '0'",
            true,
        ),
    ] {
        let rows = db.query(sql, &[]).await.unwrap();
        let mut found: Vec<u64> = rows.iter().map(|row| row.get::<_, i64>(0) as u64).collect();
        found.sort_unstable();
        let expected = sent.iter().filter(|(_, delay)| (**delay == HOUR) == expected);
        assert_eq!(found, expected.map(|(payload, _)| *payload).collect::<Vec<_>>(), "{what}");
    }
    // Where the one that asks comes after the move: the row of the transaction tells.
    let asked = "SELECT count(*) FROM sqlstreams.message_idempotency_1 WHERE message_id = 0";
    assert!(count(&db, asked).await >= sent.len() as i64);
}

/// Somebody's snapshot keeps the dead rows of what was moved. Later moves do not read them again.
#[tokio::test]
async fn a_held_snapshot_does_not_slow_moves_down() {
    const MESSAGES: i64 = 20_000;
    let (client, db) = client().await;
    client.stream::<u64>("s").create().await.unwrap();
    let holder = connect(&url_of(&db).await).await;
    // All due at the same instant, and many more that are not.
    db.batch_execute(&format!(
        "INSERT INTO sqlstreams.message_delayed_1 (deliver_at, sent_at, payload)
         SELECT clock_timestamp() + interval '1 hour', now(), '0' FROM generate_series(1, {MESSAGES});
         INSERT INTO sqlstreams.message_delayed_1 (deliver_at, sent_at, payload)
         SELECT now() - interval '1 minute', now(), to_json(n) FROM generate_series(1, {MESSAGES}) AS n"
    ))
    .await
    .unwrap();
    db.batch_execute("ANALYZE sqlstreams.message_delayed_1").await.unwrap();
    holder.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1").await.unwrap();
    let mut from = (None::<SystemTime>, 0_i64);
    let mut touched = Vec::new();
    loop {
        let before = pages(&db).await;
        let sql = "SELECT moved, upto, upto_id FROM sqlstreams.move_delayed(1, coalesce($1::timestamptz, '-infinity'), $2, 1000)";
        let row = db.query_one(sql, &[&from.0, &from.1]).await.unwrap();
        touched.push(pages(&db).await - before);
        if row.get::<_, i64>(0) == 0 {
            break;
        }
        from = (row.get(1), row.get(2));
    }
    println!("{touched:?}");
    assert_eq!((touched.len(), count(&db, LOG).await), (21, MESSAGES));
    let most = touched.iter().max().unwrap();
    assert!(*most < 8_000, "a move of 1,000 touched {most} pages");
    assert!(touched[20] < 50, "a look at nothing touched {} pages", touched[20]);
    holder.batch_execute("COMMIT").await.unwrap();
}

/// Pages of the waiting messages and their indexes that were touched.
async fn pages(db: &tokio_postgres::Client) -> i64 {
    db.batch_execute("SELECT pg_stat_force_next_flush()").await.unwrap();
    count(db, "SELECT pg_stat_get_blocks_fetched('sqlstreams.message_delayed_1'::regclass) + sum(pg_stat_get_blocks_fetched(indexrelid))::bigint
               FROM pg_index WHERE indrelid = 'sqlstreams.message_delayed_1'::regclass").await
}

/// A bulk that is due at once goes into a log of small partitions, and one after the other as it was to.
#[tokio::test(flavor = "multi_thread")]
async fn a_bulk_finds_room_and_keeps_its_order() {
    const MESSAGES: u64 = 10_000;
    let (client, db) = client().await;
    let stream = client.stream::<u64>("s").partition_size(1000).create().await.unwrap();
    let numbers: Vec<u64> = (0..MESSAGES).collect();
    let at = SystemTime::now() + Duration::from_secs(2);
    let batch = numbers.iter().map(|n| Outgoing::new(n).deliver_at(at));
    assert!(stream.producer().send_all(batch).await.unwrap().iter().all(|r| r.delayed));
    let mut consumers = Vec::new();
    for _ in 0..3 {
        let client = Client::connect(&url_of(&db).await).await.unwrap();
        let stream = client.stream::<u64>("s").open().await.unwrap();
        consumers.push(Running::start(&stream.group("g").create_if_missing().await.unwrap()));
    }
    eventually(async || count(&db, LOG).await == MESSAGES as i64).await;
    let wrong = "SELECT count(*) FROM (SELECT payload::text::bigint - lag(payload::text::bigint) OVER (ORDER BY id) AS step FROM sqlstreams.message_log_1) AS x WHERE step <> 1";
    assert_eq!(count(&db, wrong).await, 0);
    for consumer in consumers {
        consumer.stop().await;
    }
}

/// When a message is due is in its row: whoever restarts, nothing comes early.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tb_155_restarts_let_nothing_come_early() {
    let start = || Arc::new(Cluster::builder().durable(true).start().unwrap());
    let cluster = tokio::task::spawn_blocking(start).await.unwrap();
    let url = cluster.url("postgres");
    let first = Client::connect(&url).await.unwrap();
    let stream = first.stream::<u64>("s").create().await.unwrap();
    let group = stream.group("g").create().await.unwrap();
    let numbers: Vec<u64> = (0..1_000).collect();
    let batch = numbers.iter().map(|n| Outgoing::new(n).delay(HOUR));
    stream.producer().send_all(batch).await.unwrap();
    let consumer = Running::start(&group);
    let again = cluster.clone();
    let crash = move || {
        again.kill().unwrap();
        again.start_again().unwrap();
    };
    tokio::task::spawn_blocking(crash).await.unwrap();
    assert_eq!(consumer.stop().await.handled, 0);

    let client = Client::connect(&url).await.unwrap();
    let stream = client.stream::<u64>("s").open().await.unwrap();
    let mut consumer = Running::start(&stream.group("g").open().await.unwrap());
    stream.producer().send(&7).await.unwrap();
    // It has looked for what is due by then.
    consumer.handles(7, Duration::from_secs(30)).await;
    assert_eq!(consumer.stop().await.handled, 1);
    assert_eq!(count(&connect(&url).await, WAITING).await, 1_000);
    tokio::task::spawn_blocking(move || drop(cluster)).await.unwrap();
}
