//! Messages that expire: nobody gets them after that, whichever way they come.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use sqlstreams::{CancellationToken, Delivery, ErrorKind, Mode, Outcome, Outgoing, RetryPolicy};

use crate::running::Running;
use crate::support::{client, count, eventually, until};

const HOUR: Duration = Duration::from_secs(3600);
const STATE: [&str; 2] = [
    "SELECT count(*) FROM sqlstreams.consumer_lease_1",
    "SELECT count(*) FROM sqlstreams.exception_queue_1",
];

/// Nothing is left of them: no lease, no exception.
async fn assert_clean(db: &tokio_postgres::Client) {
    for sql in STATE {
        eventually(async || count(db, sql).await == 0).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_has_expired_is_passed_over_and_counted() {
    let (client, db) = client().await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    let producer = stream.producer();
    let numbers: Vec<u64> = (0..3_000).collect();
    let now = SystemTime::now();
    let batch = numbers.iter().map(|n| {
        let message = Outgoing::new(n);
        match n % 3 {
            0 => message,
            1 => message.expires_in(HOUR),
            _ if n % 2 == 0 => message.expires_at(now - HOUR),
            _ => message.expires_in(Duration::ZERO),
        }
    });
    producer.send_all(batch).await.unwrap();
    for transactional in [false, true] {
        let group = stream.group(if transactional { "t" } else { "g" }).create().await.unwrap();
        let seen = Arc::new(AtomicU64::new(0));
        let consumer = group.consumer().concurrency(4).until_caught_up();
        let handle = {
            let seen = seen.clone();
            move |message: &Delivery<u64>| {
                let payload = message.payload;
                assert_ne!(payload % 3, 2, "{payload} had expired");
                let left = message.context.expires().map(|at| at - Instant::now());
                assert_eq!(left.is_some(), payload % 3 == 1);
                assert!(left.is_none_or(|left| left <= HOUR && left > HOUR - HOUR / 4), "{left:?}");
                seen.fetch_add(1, Ordering::SeqCst);
            }
        };
        let consumed = match transactional {
            false => {
                consumer
                    .run(move |m: Delivery<u64>| {
                        handle(&m);
                        async {}
                    })
                    .await
            }
            true => {
                consumer
                    .run_transactional(move |m: Delivery<u64>, _tx| {
                        handle(&m);
                        async {}
                    })
                    .await
            }
        };
        let consumed = consumed.unwrap();
        assert_eq!((consumed.handled, consumed.expired, consumed.failed), (2_000, 1_000, 0));
        assert_eq!(seen.load(Ordering::SeqCst), 2_000);
        assert_clean(&db).await;
    }
    // Batches have no holes for them.
    let group = stream.group("b").create().await.unwrap();
    let consumer = group.consumer().batch_size(100).until_caught_up();
    let consumed = consumer
        .run_batches(async |batch: Vec<Delivery<u64>>| {
            assert!(!batch.is_empty() && batch.iter().all(|m| m.payload % 3 != 2));
        })
        .await
        .unwrap();
    assert_eq!((consumed.handled, consumed.expired), (2_000, 1_000));

    // An operator sees it.
    for name in ["g", "t", "b"] {
        let status = stream.group(name).open().await.unwrap().status().await.unwrap();
        assert_eq!((status.expired, status.superseded), (1_000, 0), "{name}");
    }
    assert_eq!(count(&db, "SELECT count(*) FROM sqlstreams.group_tally").await, 3);

    // In the log they are as long as it keeps them.
    assert_eq!(stream.read(&[3]).await.unwrap()[0].payload, 2);
}

/// It waits behind others in the consumer's own queue, and expires there.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_expires_in_the_queue_is_not_handled() {
    let (client, db) = client().await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    for transactional in [false, true] {
        let group = stream.group(if transactional { "t" } else { "g" }).create().await.unwrap();
        let messages = [(0, HOUR), (1, Duration::from_millis(700)), (2, HOUR)];
        let batch = messages.iter().map(|(n, time)| Outgoing::new(n).expires_in(*time));
        stream.producer().send_all(batch).await.unwrap();
        let handled: Arc<Mutex<Vec<u64>>> = Arc::default();
        let log = handled.clone();
        let handle = move |payload: u64| {
            log.lock().unwrap().push(payload);
            Duration::from_millis(if payload == 0 { 1_000 } else { 0 })
        };
        let consumer = group.consumer().concurrency(1).until_caught_up();
        let consumed = match transactional {
            false => {
                consumer.run(move |m: Delivery<u64>| tokio::time::sleep(handle(m.payload))).await
            }
            true => {
                consumer
                    .run_transactional(move |m: Delivery<u64>, _tx| {
                        tokio::time::sleep(handle(m.payload))
                    })
                    .await
            }
        };
        let consumed = consumed.unwrap();
        println!("{consumed:?}");
        assert_eq!(handled.lock().unwrap().as_slice(), [0, 2]);
        assert_eq!((consumed.handled, consumed.expired), (2, if transactional { 2 } else { 1 }));
        assert_clean(&db).await;
        // Those of the round before have been handled, too, but for the new group.
        db.batch_execute("DELETE FROM sqlstreams.message_log_1 WHERE payload::text IN ('0', '2')")
            .await
            .unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retry_that_comes_too_late_is_none() {
    let (client, db) = client().await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    // More attempts than there is time for.
    let retry = RetryPolicy::attempts(1_000);
    let group = stream.group("g").retry(retry).create().await.unwrap();
    let numbers: Vec<u64> = (0..100).collect();
    let batch = numbers.iter().map(|n| Outgoing::new(n).expires_in(Duration::from_millis(2_500)));
    stream.producer().send_all(batch).await.unwrap();
    let stop = CancellationToken::new();
    let consumer = group.consumer().stop_on(stop.clone());
    let health = consumer.health();
    let running = tokio::spawn(consumer.run(async |_: Delivery<u64>| {
        Outcome::RetryAfter("not yet".into(), Duration::from_millis(600))
    }));
    until("all have expired", Duration::from_secs(20), async || {
        health.snapshot().consumed.expired == 100
    })
    .await;
    stop.cancel();
    let consumed = running.await.unwrap().unwrap();
    assert!(consumed.failed > 0 && consumed.handled == 0, "{consumed:?}");
    assert_clean(&db).await;
    assert_eq!(group.status().await.unwrap().dead, 0);

    // A dead letter does not come back to life.
    stream.producer().send(&0).expires_in(HOUR).await.unwrap();
    let consumer = group.consumer().until_caught_up();
    consumer.run(async |_: Delivery<u64>| Outcome::Dead("no".into())).await.unwrap();
    let expire = "UPDATE sqlstreams.message_log_1 SET expires_at = clock_timestamp() WHERE payload::text = '0' AND id > 100";
    assert_eq!(db.execute(expire, &[]).await.unwrap(), 1);
    assert_eq!(group.redrive(None, 10).await.unwrap().len(), 1);
    let consumed = group
        .consumer()
        .until_caught_up()
        .run(async |_: Delivery<u64>| Outcome::Retry("it has expired".into()));
    assert_eq!(consumed.await.unwrap().expired, 1);
    assert_clean(&db).await;
}

/// In an ordered group what has expired releases its key, whether it waited for its retry or behind another.
#[tokio::test(flavor = "multi_thread")]
async fn an_expired_message_releases_its_key() {
    let (client, db) = client().await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    let group = stream.group("g").mode(Mode::Ordered).create().await.unwrap();
    let soon = Duration::from_millis(2_500);
    let messages = [(0, soon), (1, soon), (2, HOUR), (3, HOUR)];
    let batch = messages.iter().map(|(n, time)| Outgoing::new(n).key("k").expires_in(*time));
    stream.producer().send_all(batch).await.unwrap();
    let handled: Arc<Mutex<Vec<u64>>> = Arc::default();
    let log = handled.clone();
    let stop = CancellationToken::new();
    let consumer = group.consumer().stop_on(stop.clone());
    let health = consumer.health();
    let running = tokio::spawn(consumer.run(move |message: Delivery<u64>| {
        log.lock().unwrap().push(message.payload);
        let outcome = match message.payload {
            0 => Outcome::RetryAfter("later".into(), Duration::from_secs(3)),
            _ => Outcome::Done,
        };
        async { outcome }
    }));
    until("the key is free", Duration::from_secs(30), async || {
        health.snapshot().consumed.handled == 2
    })
    .await;
    assert_eq!(handled.lock().unwrap().as_slice(), [0, 2, 3]);
    assert_clean(&db).await;
    stop.cancel();
    let consumed = running.await.unwrap().unwrap();
    assert_eq!((consumed.handled, consumed.expired, consumed.failed), (2, 2, 1));
}

/// A lease that somebody else takes over, after its messages have expired.
#[tokio::test(flavor = "multi_thread")]
async fn a_lease_that_is_taken_over_too_late_holds_nothing() {
    let (client, db) = client().await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    let group = stream.group("g").lease(Duration::from_millis(500)).create().await.unwrap();
    let messages = [(0, Duration::from_millis(2_000)), (1, HOUR)];
    let batch = messages.iter().map(|(n, time)| Outgoing::new(n).expires_in(*time));
    stream.producer().send_all(batch).await.unwrap();
    // Somebody claims them and dies.
    let claimed = "SELECT count(*) FROM sqlstreams.claim(1, 1, 10, NULL::json)";
    assert_eq!(count(&db, claimed).await, 2);
    tokio::time::sleep(Duration::from_millis(2_100)).await;
    let mut consumer = Running::start(&group);
    consumer.handles(1, Duration::from_secs(20)).await;
    let consumed = consumer.stop().await;
    assert_eq!((consumed.handled, consumed.expired), (1, 1));
    assert_clean(&db).await;
}

/// Delayed, the time counts from when it is due. In plain SQL it is the same.
#[tokio::test(flavor = "multi_thread")]
async fn delays_come_before_the_end() {
    let (client, db) = client().await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    let group = stream.group("g").create().await.unwrap();
    let producer = stream.producer();
    let delay = Duration::from_millis(600);
    producer.send(&1).delay(delay).expires_in(Duration::from_secs(20)).await.unwrap();
    producer.send(&2).delay(delay).expires_at(SystemTime::now()).await.unwrap();
    producer.send(&3).delay(delay).await.unwrap();
    let waiting = stream.delayed(None, 10).await.unwrap();
    let left = waiting[0].expires_at.unwrap().duration_since(waiting[0].deliver_at).unwrap();
    assert_eq!((left, waiting[2].expires_at), (Duration::from_secs(20), None));
    let mut consumer = Running::start(&group);
    let mut handled = Vec::new();
    while handled.len() < 2 {
        handled.push(consumer.handled.recv().await.unwrap());
    }
    let consumed = consumer.stop().await;
    // They come together, and handlers run side by side.
    handled.sort_unstable();
    assert_eq!((handled, consumed.expired), (vec![1, 3], 1));

    producer.send(&4).expires_in(Duration::ZERO).await.unwrap();
    producer.send(&5).expires_in(HOUR).await.unwrap();
    db.batch_execute("INSERT INTO sqlstreams.message_log_1 (payload, expires_at) VALUES ('6', 'infinity'), ('7', '-infinity')").await.unwrap();
    let sql = "SELECT payload::text::bigint FROM sqlstreams.claim(1, 1, 10, NULL::json)";
    let rows = db.query(sql, &[]).await.unwrap();
    assert_eq!(rows.iter().map(|row| row.get::<_, i64>(0)).collect::<Vec<_>>(), [5, 6]);

    // And of exceptions.
    for (id, payload) in [(8, 1), (9, 2)] {
        db.batch_execute(&format!("INSERT INTO sqlstreams.exception_queue_1 (group_id, message_id, state, due_at)
            SELECT 1, id, 'ready', clock_timestamp() FROM sqlstreams.message_log_1 WHERE payload::text = '{payload}' AND {id} > 0")).await.unwrap();
    }
    let sql = "SELECT payload::text::bigint FROM sqlstreams.claim_exceptions(1, 1, gen_random_uuid(), 10, false, NULL, NULL::json)";
    let rows = db.query(sql, &[]).await.unwrap();
    assert_eq!(rows.iter().map(|row| row.get::<_, i64>(0)).collect::<Vec<_>>(), [1]);
    assert_eq!(count(&db, "SELECT count(*) FROM sqlstreams.exception_queue_1").await, 1);
}

/// Everything that a message may carry, in plain SQL.
#[tokio::test]
async fn sql_can_say_it_all() {
    let (client, db) = client().await;
    for (name, payload_type, payload) in [
        ("s", "json", "{\"a\": 1}"),
        ("j", "jsonb", "[1]"),
        ("t", "text", "é"),
        ("b", "bytea", "\\x00ff"),
    ] {
        db.query("SELECT sqlstreams.create_stream($1, $2)", &[&name, &payload_type]).await.unwrap();
        let send = async |more: &str| {
            let sql = format!(
                "SELECT id, delayed, duplicate, differs FROM sqlstreams.produce($1, $2{more})"
            );
            let row = db.query_one(&sql, &[&name, &payload]).await.unwrap();
            (
                row.get::<_, i64>(0),
                row.get::<_, bool>(1),
                row.get::<_, bool>(2),
                row.get::<_, bool>(3),
            )
        };
        assert_eq!(send("").await, (1, false, false, false), "{name}");
        assert_eq!(
            send(", p_key => 'k', p_idempotency_key => 'a'").await,
            (2, false, false, false)
        );
        assert_eq!(send(", p_idempotency_key => 'a'").await, (2, false, true, false));
        let later = ", p_delay => '1 hour', p_expires_in => '1 minute', p_headers => '{}'";
        assert_eq!(send(later).await, (1, true, false, false));
        assert_eq!(send(", p_deliver_at => now(), p_expires_at => 'infinity'").await.0, 3);
    }
    let bytes = client.stream::<Vec<u8>>("b").codec::<sqlstreams::Bytes>().open().await.unwrap();
    assert_eq!(bytes.read(&[1]).await.unwrap()[0].payload, [0, 255]);
    assert_eq!(bytes.count_delayed().await.unwrap(), 1);
    for (call, state) in [
        ("produce('nope', '1')", "SQ001"),
        ("produce('s', '{')", "22P02"),
        ("produce('s', '1', p_idempotency_key => '')", "SQ004"),
        ("produce('s', '1', p_idempotency_key => repeat('x', 1025))", "SQ004"),
        ("produce('s', '1', p_headers => '[]')", "SQ004"),
        ("produce('s', NULL)", "SQ004"),
        ("produce('s', '1', p_deliver_at => '294270-01-01', p_expires_in => '100 years')", "22008"),
    ] {
        let error = db.query(&format!("SELECT sqlstreams.{call}"), &[]).await.unwrap_err();
        assert_eq!(error.code().unwrap().code(), state, "{call}: {error:?}");
    }
}

#[tokio::test]
async fn times_that_cannot_be_are_refused() {
    let (client, _db) = client().await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    let producer = stream.producer();
    let error = producer.send(&1).expires_in(Duration::MAX).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidMessage);
    assert!(error.to_string().contains("time to expire"), "{error}");
    let year = HOUR * 24 * 365;
    producer.send(&1).delay(year * 9_999).expires_in(year * 9_999).await.unwrap();
    producer.send(&2).expires_in(year * 9_999).await.unwrap();
    let group = stream.group("g").create().await.unwrap();
    let consumed = group.consumer().until_caught_up().run(async |_: Delivery<u64>| {}).await;
    assert_eq!(consumed.unwrap().handled, 1);
}
