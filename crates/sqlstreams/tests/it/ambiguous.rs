//! Commits whose answer never comes: what was acknowledged is stored once, and nothing is stored twice.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use sqlstreams::{CancellationToken, Client, ErrorKind, Outgoing, Producer, Stream};
use sqlstreams_dev::{Cluster, StopMode};
use tokio_postgres::Client as Db;

use crate::proxy::{Cut, Place, Proxy};
use crate::support::{connect, count, database};

/// An empty stream whose connections go through a proxy, and a plain connection that does not.
async fn through_proxy() -> (Proxy, Stream<u64>, Db) {
    stream_through_proxy(&database().await).await
}

async fn stream_through_proxy(url: &str) -> (Proxy, Stream<u64>, Db) {
    let proxy = Proxy::start(url).await;
    let client = Client::connect(&proxy.url).await.unwrap();
    let stream = client.stream("numbers").partition_size(1000).create().await.unwrap();

    // The first message has the partitions looked after, on the side. Wait for that, lest it be what is cut.
    let (tell, mut looked_after) = tokio::sync::mpsc::unbounded_channel();
    let mut upkeep = None;
    proxy.set(move |statement| {
        if statement.sql.contains("ensure_partitions") {
            upkeep = Some(statement.pid);
        } else if statement.sql == "COMMIT" && upkeep == Some(statement.pid) {
            tell.send(()).unwrap();
            upkeep = None;
        }
        None
    });
    stream.producer().send(&0).await.unwrap();
    looked_after.recv().await.unwrap();
    proxy.set(|_| None);
    let db = connect(url).await;
    db.batch_execute("DELETE FROM sqlstreams.message_log_1").await.unwrap();
    (proxy, stream, db)
}

/// What the log holds, by id.
async fn stored(db: &Db) -> BTreeMap<i64, u64> {
    let sql = "SELECT id, payload::text::bigint FROM sqlstreams.message_log_1";
    let rows = db.query(sql, &[]).await.unwrap();
    rows.iter().map(|row| (row.get(0), row.get::<_, i64>(1) as u64)).collect()
}

/// What one sender was told.
#[derive(Default)]
struct Told {
    acknowledged: Vec<(i64, u64)>,
    /// Payloads of which nobody knows.
    unknown: Vec<u64>,
    /// Sends that failed with nothing stored. Each was sent again.
    failed: usize,
}

/// Sends numbers until told to stop, in batches of up to `most`. Where nothing was stored, says an error, the same again.
async fn send_numbers(
    producer: Producer<u64>,
    next: Arc<AtomicU64>,
    most: u64,
    stop: CancellationToken,
) -> Told {
    let mut told = Told::default();
    while !stop.is_cancelled() {
        let size = fastrand::u64(1..=most);
        let first = next.fetch_add(size, Ordering::Relaxed);
        let payloads: Vec<u64> = (first..first + size).collect();
        loop {
            let result = match payloads.as_slice() {
                [payload] => producer.send(payload).await.map(|receipt| vec![receipt]),
                payloads => producer.send_all(payloads.iter().map(Outgoing::new)).await,
            };
            match result {
                Ok(receipts) => {
                    assert_eq!(receipts.len(), payloads.len());
                    let ids = receipts.iter().map(|receipt| receipt.id);
                    told.acknowledged.extend(ids.zip(payloads));
                    break;
                }
                Err(error) if error.kind() == ErrorKind::CommitUnknown => {
                    println!("{error:?}");
                    told.unknown.extend(payloads);
                    break;
                }
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Connection, "{error:?}");
                    told.failed += 1;
                    if stop.is_cancelled() {
                        break;
                    }
                }
            }
        }
    }
    told
}

/// Checks what all were told against the log, and sums it up.
async fn check(db: &Db, told: Vec<Told>) -> Told {
    let log = stored(db).await;
    let payloads: BTreeSet<u64> = log.values().copied().collect();
    assert_eq!(payloads.len(), log.len(), "a message is stored twice");
    let mut sum = Told::default();
    for told in told {
        for (id, payload) in &told.acknowledged {
            assert_eq!(log.get(id), Some(payload), "message {id} was acknowledged");
        }
        sum.acknowledged.extend(told.acknowledged);
        sum.unknown.extend(told.unknown);
        sum.failed += told.failed;
    }
    let known: BTreeSet<u64> =
        sum.acknowledged.iter().map(|(_, payload)| *payload).chain(sum.unknown.clone()).collect();
    let surprises: Vec<_> = payloads.difference(&known).collect();
    assert!(surprises.is_empty(), "stored, though an error said they are not: {surprises:?}");
    println!(
        "{} acknowledged, {} unknown, {} failed sends, {} stored",
        sum.acknowledged.len(),
        sum.unknown.len(),
        sum.failed,
        log.len()
    );
    sum
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn connections_cut_at_random_points_lose_nothing_and_repeat_nothing() {
    const CUTS: usize = 500;
    let (proxy, stream, db) = through_proxy().await;
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    proxy.set(move |statement| {
        let odds = match statement.sql {
            "COMMIT" => 0.25,
            sql if sql.contains("INSERT") => 0.1,
            _ => 0.03,
        };
        let places = [Place::Before, Place::Sent, Place::InReply(random.usize(1..40))];
        (random.f64() < odds).then(|| Cut::Close(places[random.usize(..places.len())]))
    });
    let stop = CancellationToken::new();
    let next = Arc::new(AtomicU64::new(0));
    let senders: Vec<_> = [1, 1, 1, 60, 60, 7000]
        .map(|most| send_numbers(stream.producer(), next.clone(), most, stop.clone()))
        .map(tokio::spawn)
        .into();
    let started = Instant::now();
    while proxy.cuts() < CUTS {
        assert!(started.elapsed() < Duration::from_secs(120), "only {} cuts", proxy.cuts());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    stop.cancel();
    proxy.set(|_| None);
    let mut told = Vec::new();
    for sender in senders {
        told.push(sender.await.unwrap());
    }
    let sum = check(&db, told).await;
    println!("{} cuts in {:?}", proxy.cuts(), started.elapsed());
    assert!(sum.acknowledged.len() > CUTS, "too little got through");
    assert!(sum.unknown.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_cut_at_each_point_is_not_even_noticed() {
    let (proxy, stream, db) = through_proxy().await;
    let producer = stream.producer();
    let mut sent = BTreeMap::new();
    for text in ["BEGIN", "INSERT", "pg_current_xact_id", "COMMIT"] {
        for place in [Place::Before, Place::Sent, Place::InReply(3), Place::InReply(usize::MAX)] {
            let cuts = proxy.cuts();
            proxy.cut_next(text, Cut::Close(place));
            let payload = sent.len() as u64;
            let receipt = producer.send(&payload).await.unwrap();
            sent.insert(receipt.id, payload);
            assert_eq!(proxy.cuts(), cuts + 1, "{text} {place:?}");
        }
    }
    assert_eq!(stored(&db).await, sent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_that_hangs_is_waited_for() {
    let (proxy, stream, db) = through_proxy().await;
    let producer = stream.producer();
    // The server's process stands still while COMMIT is on its way to it and its client goes away.
    let (tell, stopped) = std::sync::mpsc::channel();
    let mut tell = Some(tell);
    proxy.set(move |statement| {
        let tell = tell.take_if(|_| statement.sql == "COMMIT")?;
        signal(statement.pid, "STOP");
        tell.send(statement.pid).unwrap();
        Some(Cut::Close(Place::Sent))
    });
    let sending = tokio::spawn(async move { producer.send(&2).await });
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(!sending.is_finished(), "nobody can know yet");
    signal(stopped.recv().unwrap(), "CONT");
    let receipt = sending.await.unwrap().unwrap();
    assert_eq!(stored(&db).await, BTreeMap::from([(receipt.id, 2)]));
}

fn signal(pid: i32, name: &str) {
    let sent = Command::new("kill").args([format!("-{name}"), pid.to_string()]).status().unwrap();
    assert!(sent.success());
}

/// A commit that does not end for more than 5 s after its client is gone is ended, and the messages go again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_that_hangs_for_long_is_ended() {
    let (proxy, stream, db) = through_proxy().await;
    db.batch_execute(
        "CREATE FUNCTION hang() RETURNS trigger LANGUAGE plpgsql AS
             $$ BEGIN PERFORM pg_advisory_xact_lock_shared(1); RETURN NULL; END $$;
         CREATE CONSTRAINT TRIGGER hang AFTER INSERT ON sqlstreams.message_log_1
             DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION hang();
         SELECT pg_advisory_lock(1)",
    )
    .await
    .unwrap();
    proxy.cut_next("COMMIT", Cut::Close(Place::Sent));
    let producer = stream.producer();
    let sending = tokio::spawn(async move { producer.send(&1).await });
    let waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted";
    let pid = "SELECT coalesce(min(pid), 0)::bigint FROM pg_locks WHERE locktype = 'advisory' AND NOT granted";
    let started = Instant::now();
    while count(&db, waiting).await == 0 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let first = count(&db, pid).await;
    // Then a second transaction waits in the place of the first.
    while [0, first].contains(&count(&db, pid).await) {
        assert!(started.elapsed() < Duration::from_secs(30), "it still waits");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(started.elapsed() > Duration::from_secs(5));
    assert!(!sending.is_finished());
    db.batch_execute("SELECT pg_advisory_unlock(1)").await.unwrap();
    let receipt = sending.await.unwrap().unwrap();
    assert_eq!(stored(&db).await, BTreeMap::from([(receipt.id, 1)]));
}

/// One that only waits for a synchronous standby is let be: stored means that the standby has it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_that_waits_for_a_standby_is_not_ended() {
    let start = || Cluster::builder().durable(true).start().unwrap();
    let cluster = tokio::task::spawn_blocking(start).await.unwrap();
    let (proxy, stream, db) = stream_through_proxy(&cluster.url("postgres")).await;
    for sql in ["ALTER SYSTEM SET synchronous_standby_names = 'none'", "SELECT pg_reload_conf()"] {
        db.batch_execute(sql).await.unwrap();
    }
    while count(&db, "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'").await
        == 0
    {
        // Until the servers' processes have read the setting.
        let probe = connect(&cluster.url("postgres")).await;
        // Something to commit each time.
        let write = "DROP TABLE IF EXISTS t; CREATE TABLE t ()";
        tokio::spawn(async move { probe.batch_execute(write).await });
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    proxy.cut_next("COMMIT", Cut::Close(Place::Sent));
    let producer = stream.producer();
    let sending = tokio::spawn(async move { producer.send(&1).await });
    tokio::time::sleep(Duration::from_secs(7)).await;
    assert_eq!((proxy.cuts(), sending.is_finished()), (1, false));
    for sql in ["ALTER SYSTEM RESET synchronous_standby_names", "SELECT pg_reload_conf()"] {
        db.batch_execute(sql).await.unwrap();
    }
    let receipt = sending.await.unwrap().unwrap();
    assert_eq!(stored(&db).await, BTreeMap::from([(receipt.id, 1)]));
    tokio::task::spawn_blocking(move || drop(cluster)).await.unwrap();
}

/// Neither end learns that the packets vanish: the client waits 15 s for its answer, then ends the open transaction.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_falls_silent_does_not_hold_a_send_for_ever() {
    let (proxy, stream, db) = through_proxy().await;
    let mut sent = BTreeMap::new();
    let mut sending = Vec::new();
    for (payload, place) in [(1, Place::Before), (2, Place::Sent)] {
        let cuts = proxy.cuts();
        proxy.cut_next("COMMIT", Cut::Freeze(place));
        let producer = stream.producer();
        sending.push((payload, tokio::spawn(async move { producer.send(&payload).await })));
        while proxy.cuts() == cuts {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    for (payload, sending) in sending {
        sent.insert(sending.await.unwrap().unwrap().id, payload);
    }
    assert_eq!(stored(&db).await, sent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_server_that_is_killed_leaves_nothing_lost_and_nothing_twice() {
    let start = || Arc::new(Cluster::builder().durable(true).start().unwrap());
    let cluster = tokio::task::spawn_blocking(start).await.unwrap();
    let url = cluster.url("postgres");
    let client = Client::connect(&url).await.unwrap();
    let stream = client.stream::<u64>("numbers").create().await.unwrap();
    let stop = CancellationToken::new();
    let next = Arc::new(AtomicU64::new(0));
    let senders: Vec<_> = [1, 1, 1, 1, 50, 50]
        .map(|most| send_numbers(stream.producer(), next.clone(), most, stop.clone()))
        .map(tokio::spawn)
        .into();
    for round in 0..6 {
        tokio::time::sleep(Duration::from_millis(400)).await;
        restart(&cluster, (round % 2 == 0).then_some(StopMode::Immediate)).await;
    }
    tokio::time::sleep(Duration::from_millis(400)).await;
    stop.cancel();
    let mut told = Vec::new();
    for sender in senders {
        told.push(sender.await.unwrap());
    }
    let sum = check(&connect(&url).await, told).await;
    assert!(sum.acknowledged.len() > 100, "no load");
    assert!(sum.unknown.is_empty());

    // Every pooled connection is stale after this, and the caller of send does not notice.
    restart(&cluster, Some(StopMode::Fast)).await;
    stream.producer().send(&u64::from(u32::MAX)).await.unwrap();
}

/// Stops, or kills, and starts again.
async fn restart(cluster: &Arc<Cluster>, mode: Option<StopMode>) {
    let cluster = cluster.clone();
    let restart = move || {
        match mode {
            Some(mode) => cluster.stop(mode).unwrap(),
            None => cluster.kill().unwrap(),
        }
        cluster.start_again().unwrap();
    };
    tokio::task::spawn_blocking(restart).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_that_is_read_only_for_a_while_is_waited_for() {
    let (_proxy, stream, db) = through_proxy().await;
    let name: String = db.query_one("SELECT current_database()", &[]).await.unwrap().get(0);
    let alter = |to| {
        format!(
            "SET default_transaction_read_only = off; ALTER DATABASE {name} SET default_transaction_read_only = {to}"
        )
    };
    db.batch_execute(&alter("on")).await.unwrap();
    let sql = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()";
    assert!(count(&db, sql).await > 0);
    let producer = stream.producer();
    let sending = tokio::spawn(async move { producer.send(&1).await });
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(!sending.is_finished());
    db.batch_execute(&alter("off")).await.unwrap();
    sending.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_send_leaves_no_transaction_open() {
    let (_proxy, stream, db) = through_proxy().await;
    let producer = stream.producer();
    let first = producer.send_all([Outgoing::new(&1)]).await.unwrap()[0];
    db.batch_execute("BEGIN; LOCK TABLE sqlstreams.message_log_1").await.unwrap();
    // More often than the pool has connections.
    for _ in 0..20 {
        let sending = producer.send_all([Outgoing::new(&2)]);
        assert!(tokio::time::timeout(Duration::from_millis(50), sending).await.is_err());
    }
    db.batch_execute("COMMIT").await.unwrap();
    let third = producer.send_all([Outgoing::new(&3)]);
    let third = tokio::time::timeout(Duration::from_secs(20), third).await.unwrap().unwrap()[0];
    let open = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND xact_start IS NOT NULL AND pid <> pg_backend_pid()";
    let started = Instant::now();
    while count(&db, open).await > 0 {
        assert!(started.elapsed() < Duration::from_secs(20), "a transaction is still open");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(stored(&db).await, BTreeMap::from([(first.id, 1), (third.id, 3)]));
}

/// A transaction as a producer's, on a connection of its own.
struct Open {
    db: Db,
    xid: String,
    pid: i32,
    ids: Vec<i64>,
    produced_at: Vec<SystemTime>,
}

impl Open {
    async fn insert(url: &str, messages: i32) -> Self {
        let db = connect(url).await;
        db.batch_execute("BEGIN").await.unwrap();
        let rows = db
            .query(
                "INSERT INTO sqlstreams.message_log_1 (payload) SELECT '1' FROM generate_series(1, $1)
                 RETURNING id, produced_at, pg_current_xact_id()::text, pg_backend_pid()",
                &[&messages],
            )
            .await
            .unwrap();
        Self {
            xid: rows[0].get(2),
            pid: rows[0].get(3),
            ids: rows.iter().map(|row| row.get(0)).collect(),
            produced_at: rows.iter().map(|row| row.get(1)).collect(),
            db,
        }
    }

    /// What `by` gets to hear.
    async fn resolve(&self, by: &Db, terminate: bool) -> Result<String, String> {
        let row = by
            .query_one(
                "SELECT sqlstreams.resolve_commit(1, $1, $2, $3, $4, $5)",
                &[&self.xid, &self.pid, &self.ids, &self.produced_at, &terminate],
            )
            .await;
        row.map(|row| row.get(0)).map_err(|e| e.code().unwrap().code().to_owned())
    }
}

#[tokio::test]
async fn what_resolve_commit_answers() {
    let url = database().await;
    let client = Client::connect(&url).await.unwrap();
    client.stream::<u64>("numbers").partition_size(1000).create().await.unwrap();
    let db = connect(&url).await;
    let answer = |word: &str| Ok::<_, String>(word.to_owned());

    let mut open = Open::insert(&url, 3).await;
    assert_eq!(open.resolve(&db, false).await, answer("in_progress"));
    open.db.batch_execute("COMMIT").await.unwrap();
    assert_eq!(open.resolve(&db, true).await, answer("stored"));
    // Neither a number that was never given out nor one of another, aborted transaction changes that.
    open.xid = "4000000000".to_owned();
    assert_eq!(open.resolve(&db, true).await, answer("stored"));
    // The same ids, and a committed transaction, but another insert's: so it looks after a crash.
    let produced_at = open.produced_at.clone();
    open.produced_at.iter_mut().for_each(|at| *at += Duration::from_micros(1));
    assert_eq!(open.resolve(&db, true).await, answer("missing"));
    open.produced_at[1..].copy_from_slice(&produced_at[1..]);
    assert_eq!(open.resolve(&db, true).await, Err("XX001".to_owned()), "some of them");

    let rolled_back = Open::insert(&url, 2).await;
    rolled_back.db.batch_execute("ROLLBACK").await.unwrap();
    assert_eq!(rolled_back.resolve(&db, true).await, answer("missing"));

    // Only the session that the transaction runs in is ended.
    let mut hanging = Open::insert(&url, 1).await;
    let pid = std::mem::replace(&mut hanging.pid, open.pid);
    assert_eq!(hanging.resolve(&db, true).await, answer("in_progress"));
    assert!(open.db.simple_query("SELECT 1").await.is_ok());
    hanging.pid = pid;
    assert_eq!(hanging.resolve(&db, true).await, answer("in_progress"));
    while hanging.resolve(&db, false).await == answer("in_progress") {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(hanging.resolve(&db, true).await, answer("missing"));

    open.produced_at = produced_at;
    db.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ").await.unwrap();
    assert_eq!(open.resolve(&db, false).await, Err("SQ003".to_owned()));
    db.batch_execute("ROLLBACK").await.unwrap();

    // The log goes on and loses its first partition; ids beyond its end were never in it.
    let mut far = Open::insert(&url, 1).await;
    far.db.batch_execute("COMMIT").await.unwrap();
    far.ids = vec![1_000_000];
    let detach =
        "ALTER TABLE sqlstreams.message_log_1 DETACH PARTITION sqlstreams.message_log_1_p0";
    db.batch_execute(detach).await.unwrap();
    assert_eq!(open.resolve(&db, false).await, answer("gone"));
    assert_eq!(far.resolve(&db, false).await, answer("missing"));
}
