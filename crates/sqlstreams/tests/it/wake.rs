//! Wake-ups: hints that make a message arrive at once, and whose failure makes it arrive a little later.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use sqlstreams::{Client, MAX_NAME_BYTES, Stream};
use tokio_postgres::{AsyncMessage, NoTls};

use crate::running::Running;
use crate::support::{connect, database, until};

/// A stream, as known to a client that consumes and to one that only produces.
async fn two_clients(url: &str) -> (Stream<u64>, Stream<u64>) {
    let consuming = Client::connect(url).await.unwrap();
    let producing = Client::connect(url).await.unwrap();
    let stream = consuming.stream::<u64>("orders").create().await.unwrap();
    (stream, producing.stream::<u64>("orders").open().await.unwrap())
}

async fn listening(consumer: &Running) {
    until("it listens", Duration::from_secs(60), async || consumer.health.snapshot().listening)
        .await;
}

/// Idle consumers look about once a second: messages that come at once time after time are not found by looking. The machine
/// may have other things to do for a while.
async fn assert_woken(consumer: &mut Running, send: impl AsyncFn(u64)) {
    let (mut latencies, mut in_a_row) = (Vec::new(), 0);
    while in_a_row < 4 {
        assert!(latencies.len() < 16, "found by polling: {latencies:?}");
        let latency = consumer.latency(&send).await;
        in_a_row = if latency < Duration::from_millis(200) { in_a_row + 1 } else { 0 };
        latencies.push(latency);
    }
    println!("{latencies:?}");
}

async fn send(to: &Stream<u64>, payload: u64) {
    to.producer().send(&payload).await.unwrap();
}

/// Counts the notifications of an installation from now on.
async fn notifications(url: &str) -> Arc<AtomicUsize> {
    let (client, mut connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
    let count = Arc::new(AtomicUsize::new(0));
    let counted = count.clone();
    tokio::spawn(async move {
        while let Some(Ok(message)) = std::future::poll_fn(|cx| connection.poll_message(cx)).await {
            if let AsyncMessage::Notification(_) = message {
                counted.fetch_add(1, Ordering::SeqCst);
            }
        }
    });
    let row = client.query_one("SELECT sqlstreams.ring_channel()", &[]).await.unwrap();
    client.batch_execute(&format!("LISTEN {}", row.get::<_, &str>(0))).await.unwrap();
    // Dropped, the client would end the connection.
    tokio::spawn(async move {
        std::future::pending::<()>().await;
        drop(client);
    });
    count
}

#[tokio::test(flavor = "multi_thread")]
async fn tb_061_a_listener_that_was_killed_listens_again() {
    let url = database().await;
    let (stream, elsewhere) = two_clients(&url).await;
    let mut consumer = Running::start(&stream.group("g").create().await.unwrap());
    listening(&consumer).await;
    assert_woken(&mut consumer, async |n| send(&elsewhere, n).await).await;

    let db = connect(&url).await;
    for _ in 0..2 {
        let sql = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND classid = 1397836883 AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";
        let listener: i32 = db.query_one(sql, &[]).await.unwrap().get(0);
        db.execute("SELECT pg_terminate_backend($1)", &[&listener]).await.unwrap();
        until("another session listens", Duration::from_secs(30), async || {
            let rows = db.query(sql, &[]).await.unwrap();
            rows.first().is_some_and(|row| row.get::<_, i32>(0) != listener)
        })
        .await;
    }
    listening(&consumer).await;
    assert_woken(&mut consumer, async |n| send(&elsewhere, n).await).await;
    consumer.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_listener_messages_are_found_by_polling() {
    let url = database().await;
    let client = Client::builder(&url).listener(false).connect().await.unwrap();
    let stream = client.stream::<u64>("orders").create().await.unwrap();
    let elsewhere = Client::connect(&url).await.unwrap();
    let elsewhere = elsewhere.stream::<u64>("orders").open().await.unwrap();
    let mut consumer = Running::start(&stream.group("g").create().await.unwrap());
    for _ in 0..3 {
        let latency = consumer.latency(async |n| send(&elsewhere, n).await).await;
        println!("{latency:?}");
        assert!(latency < Duration::from_secs(5), "{latency:?}");
    }
    assert!(!consumer.health.snapshot().listening);
    consumer.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn plain_inserts_ring_where_the_stream_says_so() {
    let url = database().await;
    let (stream, _) = two_clients(&url).await;
    let mut consumer = Running::start(&stream.group("g").create().await.unwrap());
    listening(&consumer).await;
    let (db, rings) = (connect(&url).await, notifications(&url).await);
    let insert = async |payloads: std::ops::Range<u64>| {
        let values: Vec<String> = payloads.map(|n| format!("('{n}')")).collect();
        let insert = "INSERT INTO sqlstreams.message_log_1 (payload) VALUES";
        for value in values {
            db.batch_execute(&format!(
                "BEGIN; {insert} {value}, {value}; {insert} {value}; COMMIT"
            ))
            .await
            .unwrap();
        }
    };

    // They do not by themselves, and are found all the same.
    insert(0..3).await;
    consumer.handles(2, Duration::from_secs(20)).await;
    assert_eq!(rings.load(Ordering::SeqCst), 0);

    // Once per transaction.
    stream.set_notify(true).await.unwrap();
    let sent = AtomicUsize::new(0);
    assert_woken(&mut consumer, async |n| {
        sent.fetch_add(1, Ordering::SeqCst);
        insert(n..n + 1).await;
    })
    .await;
    let sent = sent.into_inner();
    until("the rings are heard", Duration::from_secs(20), async || {
        rings.load(Ordering::SeqCst) == sent
    })
    .await;

    // One that rolls back does not ring.
    db.batch_execute(
        "BEGIN; INSERT INTO sqlstreams.message_log_1 (payload) VALUES ('99'); ROLLBACK",
    )
    .await
    .unwrap();
    stream.set_notify(false).await.unwrap();
    insert(20..21).await;
    consumer.handles(20, Duration::from_secs(20)).await;
    assert_eq!(rings.load(Ordering::SeqCst), sent);
    consumer.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tb_057_tb_060_rings_of_many_producers_are_one() {
    const SENDERS: u64 = 128;
    let url = database().await;
    let (stream, elsewhere) = two_clients(&url).await;
    let consumer = Running::start(&stream.group("g").create().await.unwrap());
    let rings = notifications(&url).await;
    let started = Instant::now();
    let senders: Vec<_> = (0..SENDERS)
        .map(|_| {
            let producer = elsewhere.producer();
            tokio::spawn(async move {
                let mut sent = 0;
                while started.elapsed() < Duration::from_secs(3) {
                    producer.send(&sent).await.unwrap();
                    sent += 1;
                }
                sent
            })
        })
        .collect();
    let mut messages = 0;
    for sender in senders {
        messages += sender.await.unwrap();
    }
    until("all are handled", Duration::from_secs(60), async || {
        consumer.health.snapshot().consumed.handled == messages
    })
    .await;
    let (took, rings) = (started.elapsed(), rings.load(Ordering::SeqCst) as u64);
    println!("{messages} messages in {took:?}, {rings} rings");
    assert!(rings > 0 && rings <= messages / 8, "{rings} rings for {messages} messages");
    // A ring is at least a millisecond after the one before.
    assert!(u128::from(rings) <= took.as_millis() + 10, "{rings} rings in {took:?}");
    consumer.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tb_059_producing_and_settling_do_not_depend_on_rings() {
    let url = database().await;
    let (stream, elsewhere) = two_clients(&url).await;
    let mut consumer = Running::start(&stream.group("g").create().await.unwrap());
    listening(&consumer).await;
    let db = connect(&url).await;

    // A ring that fails: the server's queue is full, say, since a session listens and idles in a transaction.
    db.batch_execute(
        "CREATE OR REPLACE FUNCTION sqlstreams.ring(p_streams bigint[]) RETURNS void LANGUAGE plpgsql AS
         $$ BEGIN RAISE EXCEPTION 'too many notifications in the NOTIFY queue' USING ERRCODE = '54000'; END $$",
    )
    .await
    .unwrap();
    let producer = elsewhere.producer();
    for n in 0..200 {
        producer.send(&n).await.unwrap();
    }
    consumer.handles(199, Duration::from_secs(20)).await;
    consumer.stop().await;
}

/// Inside other transactions a ring that cannot be stored would make the commit fail. So there is none while the queue fills up.
#[tokio::test(flavor = "multi_thread")]
async fn tb_059_nothing_rings_while_the_queue_of_notifications_fills_up() {
    let url = database().await;
    let (stream, elsewhere) = two_clients(&url).await;
    stream.set_notify(true).await.unwrap();
    let mut consumer = Running::start(&stream.group("g").create().await.unwrap());
    listening(&consumer).await;
    let (db, rings) = (connect(&url).await, notifications(&url).await);
    // To fill the server's, of gigabytes, takes minutes.
    let usage = async |usage: f64| {
        db.batch_execute(&format!(
            "SET allow_system_table_mods = on;
             CREATE OR REPLACE FUNCTION pg_catalog.pg_notification_queue_usage() RETURNS float8 LANGUAGE sql VOLATILE AS 'SELECT {usage}::float8'"
        ))
        .await
        .unwrap();
    };
    usage(0.6).await;
    for n in 0..3 {
        elsewhere.producer().send(&n).await.unwrap();
        consumer.handles(n, Duration::from_secs(20)).await;
    }
    assert_eq!(rings.load(Ordering::SeqCst), 0);
    usage(0.4).await;
    elsewhere.producer().send(&9).await.unwrap();
    until("it rings again", Duration::from_secs(20), async || rings.load(Ordering::SeqCst) > 0)
        .await;
    consumer.handles(9, Duration::from_secs(20)).await;
    consumer.stop().await;
}

/// A wake-up holds numbers, however long the names are.
#[tokio::test(flavor = "multi_thread")]
async fn tb_065_the_longest_names_ring_too() {
    let url = database().await;
    let schema = "ö".repeat(31);
    let name = "漢".repeat(MAX_NAME_BYTES / 3);
    let client = async || Client::builder(&url).schema(&schema).connect().await.unwrap();
    let stream = client().await.stream::<u64>(&name).notify(true).create().await.unwrap();
    let elsewhere = client().await.stream::<u64>(&name).open().await.unwrap();
    let mut consumer = Running::start(&stream.group(&name).create().await.unwrap());
    listening(&consumer).await;
    assert_woken(&mut consumer, async |n| send(&elsewhere, n).await).await;
    consumer.stop().await;
    // What is too long is refused by name, not when it is to be rung for.
    let long = "漢".repeat(1_366);
    assert!(client().await.stream::<u64>(&long).create().await.is_err());
    assert!(stream.group(&long).create().await.is_err());
}
