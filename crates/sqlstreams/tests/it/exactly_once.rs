//! Exactly once, whatever is killed: business rows are compared with the log.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use sqlstreams::{
    CancellationToken, Client, Delivery, Outcome, Outgoing, RetryPolicy, Stream, Transaction,
};
use sqlstreams_dev::Cluster;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use crate::support::{connect, count, until};

const MESSAGES: i64 = 6_000;
const TROUBLE: Duration = Duration::from_secs(8);

type DbResult<T> = Result<T, tokio_postgres::Error>;

/// Handlers fail, panic and lose their leases; consumers are dropped, backends terminated and the server is killed, all at
/// random. In the end there is one business row for each message.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn business_rows_are_messages_whatever_is_killed() {
    let start = || Arc::new(Cluster::builder().durable(true).start().unwrap());
    let cluster = tokio::task::spawn_blocking(start).await.unwrap();
    let url = cluster.url("postgres");
    let client = Client::connect(&url).await.unwrap();
    let stream = client.stream::<i64>("payments").create().await.unwrap();
    connect(&url)
        .await
        .batch_execute(
            "CREATE TABLE effect (message bigint NOT NULL, payload bigint NOT NULL, worker int NOT NULL)",
        )
        .await
        .unwrap();
    let retry = RetryPolicy::attempts(1_000_000).backoff(
        Duration::from_millis(20),
        1.0,
        Duration::from_millis(20),
    );
    stream.group("g").lease(Duration::from_secs(1)).retry(retry).create().await.unwrap();

    let calm = CancellationToken::new();
    let stop = CancellationToken::new();
    let workers: Vec<_> =
        (0..3).map(|n| tokio::spawn(worker(n, url.clone(), calm.clone(), stop.clone()))).collect();
    let produced = tokio::spawn(produce(stream, calm.clone()));
    let trouble = Arc::new(Trouble::default());
    let disturbed = tokio::spawn(disturb(url.clone(), calm.clone(), trouble.clone()));

    sleep(TROUBLE / 2).await;
    let crashing = cluster.clone();
    let crash = move || {
        crashing.kill().unwrap();
        crashing.start_again().unwrap();
    };
    tokio::task::spawn_blocking(crash).await.unwrap();
    sleep(TROUBLE / 2).await;
    until("there was trouble enough", Duration::from_secs(120), async || trouble.is_enough()).await;
    calm.cancel();
    disturbed.await.unwrap();
    produced.await.unwrap();

    let db = connect(&url).await;
    let resolved = "SELECT sqlstreams.is_resolved(1, 1, sqlstreams.stream_head(1))::int::bigint";
    let deadline = Instant::now() + Duration::from_secs(60);
    while count(&db, resolved).await == 0 {
        let left = "SELECT sqlstreams.stream_head(1) - count(DISTINCT message) FROM effect";
        assert!(Instant::now() < deadline, "{} messages are left", count(&db, left).await);
        sleep(Duration::from_millis(50)).await;
    }
    stop.cancel();
    let mut lives = 0;
    for worker in workers {
        lives += worker.await.unwrap();
    }
    println!("{lives} consumers, {trouble:?}");
    assert!(lives > 10, "too few consumers");
    let messages = count(&db, "SELECT count(*) FROM sqlstreams.message_log_1").await;
    assert!(messages >= MESSAGES);
    let log = "sqlstreams.message_log_1";
    let the_same = "m.id = message AND m.payload::text = effect.payload::text";
    for (sql, expected) in [
        (&*format!("SELECT count(*) FROM effect JOIN {log} AS m ON {the_same}"), messages),
        ("SELECT count(DISTINCT message) FROM effect", messages),
        ("SELECT count(*) FROM effect", messages),
        ("SELECT count(*) FROM sqlstreams.exception_queue_1", 0),
        ("SELECT count(*) FROM sqlstreams.consumer_lease_1", 0),
        ("SELECT count(*) FROM sqlstreams.consumer_done_1", 0),
    ] {
        assert_eq!(count(&db, sql).await, expected, "{sql}");
    }
}

/// Sends messages while the server comes and goes, until it is calm. What of a batch that failed is stored is sent again, as
/// other messages.
async fn produce(stream: Stream<i64>, calm: CancellationToken) {
    let producer = stream.producer();
    for first in (0..).step_by(10).take_while(|n| *n < MESSAGES || !calm.is_cancelled()) {
        let batch: Vec<i64> = (first..first + 10).collect();
        while producer.send_all(batch.iter().map(Outgoing::new)).await.is_err() {
            sleep(Duration::from_millis(50)).await;
        }
        sleep(Duration::from_millis(8)).await;
    }
}

/// Consumers one after the other, each with a client of its own; until it is calm they are dropped after a while. Returns how
/// many there were.
async fn worker(number: i32, url: String, calm: CancellationToken, stop: CancellationToken) -> u32 {
    for lives in 1.. {
        let Ok(client) = Client::builder(&url).pool_size(5).connect().await else {
            sleep(Duration::from_millis(50)).await;
            continue;
        };
        let Ok(stream) = client.stream::<i64>("payments").open().await else { continue };
        let consumer = stream.group("g").consumer().concurrency(4).stop_on(stop.clone());
        let mut running: JoinHandle<_> = if number == 2 {
            tokio::spawn(consumer.batch_size(20).run_transactional_batches(
                move |batch: Vec<Delivery<i64>>, tx: Transaction| async move {
                    let mut outcomes = Vec::new();
                    for message in &batch {
                        tx.batch_execute("SAVEPOINT one").await?;
                        let outcome = handle(message, &tx, number).await?;
                        if outcome != Outcome::Done {
                            tx.batch_execute("ROLLBACK TO one").await?;
                        }
                        outcomes.push(outcome);
                    }
                    DbResult::Ok(outcomes)
                },
            ))
        } else {
            tokio::spawn(consumer.run_transactional(
                move |message: Delivery<i64>, tx: Transaction| async move {
                    handle(&message, &tx, number).await
                },
            ))
        };
        let life = Duration::from_millis(300 + fastrand::u64(0..900));
        tokio::select! {
            ended = &mut running => {
                ended.unwrap().unwrap();
                return lives;
            }
            () = async {
                sleep(life).await;
                if calm.is_cancelled() {
                    std::future::pending::<()>().await;
                }
            } => running.abort(),
        }
    }
    0
}

async fn handle(message: &Delivery<i64>, tx: &Transaction, worker: i32) -> DbResult<Outcome> {
    let row: [&(dyn tokio_postgres::types::ToSql + Sync); 3] =
        [&message.id, &message.payload, &worker];
    tx.execute("INSERT INTO effect VALUES ($1, $2, $3)", &row).await?;
    // Now and then long enough to be overtaken by another who has the message.
    match fastrand::u8(..) {
        0..40 => sleep(Duration::from_millis(fastrand::u64(0..20))).await,
        40..44 => sleep(Duration::from_millis(fastrand::u64(100..600))).await,
        _ => {}
    }
    match fastrand::u8(..) {
        0..15 => Ok(Outcome::Retry("by chance".into())),
        15..20 => Ok(Outcome::Delay(Duration::from_millis(10))),
        20..22 => panic!("by chance"),
        _ => Ok(Outcome::Done),
    }
}

/// What happened to the consumers, beside the crash of the server.
#[derive(Debug, Default)]
struct Trouble {
    terminated: AtomicI64,
    stolen: AtomicU64,
}

impl Trouble {
    fn is_enough(&self) -> bool {
        self.terminated.load(Ordering::Relaxed) > 10 && self.stolen.load(Ordering::Relaxed) > 3
    }
}

/// Terminates backends and ends leases until it is calm.
async fn disturb(url: String, calm: CancellationToken, trouble: Arc<Trouble>) {
    while !calm.is_cancelled() {
        let connected = tokio_postgres::connect(&url, tokio_postgres::NoTls).await;
        let Ok((db, connection)) = connected else {
            sleep(Duration::from_millis(50)).await;
            continue;
        };
        tokio::spawn(connection);
        while !calm.is_cancelled() {
            sleep(Duration::from_millis(20 + fastrand::u64(0..100))).await;
            let kill = "SELECT count(pg_terminate_backend(pid)) FROM (SELECT pid FROM pg_stat_activity
                        WHERE backend_type = 'client backend' AND pid <> pg_backend_pid() ORDER BY random() LIMIT 1) AS x";
            let Ok(row) = db.query_one(kill, &[]).await else { break };
            trouble.terminated.fetch_add(row.get(0), Ordering::Relaxed);
            if fastrand::bool() {
                let steal = "UPDATE sqlstreams.consumer_lease_1 SET expires_at = clock_timestamp()
                             WHERE expires_at > clock_timestamp() AND random() < 0.5";
                let Ok(rows) = db.execute(steal, &[]).await else { break };
                trouble.stolen.fetch_add(rows, Ordering::Relaxed);
            }
        }
    }
}
