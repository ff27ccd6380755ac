//! Handlers' connections: how many there are, and what becomes of them, and of the message, when they or the handler come to
//! an end that nobody wanted.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use sqlstreams::{CancellationToken, Client, Consumed, Delivery, Health, RetryPolicy, Transaction};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use crate::support::{client, cluster, connect, count, database, eventually, numbers, until};

const NOT_FOR_EVER: Duration = Duration::from_secs(60);
/// The client's sessions: all but that which asks.
const SESSIONS: &str = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()";
const SLEEPING: &str = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()
     AND state = 'active' AND query LIKE '%pg_sleep(300)%'";

/// Tries again at once, so often.
fn at_once(attempts: u32) -> RetryPolicy {
    RetryPolicy::attempts(attempts).backoff(Duration::ZERO, 1.0, Duration::ZERO)
}

async fn last_error(db: &tokio_postgres::Client) -> String {
    let sql = "SELECT last_error FROM sqlstreams.exception_queue_1 WHERE state = 'dead'";
    db.query_one(sql, &[]).await.unwrap().get(0)
}

/// Of the database.
fn name(url: &str) -> &str {
    url.rsplit('/').next().unwrap().split('?').next().unwrap()
}

/// The most of something that there was at once.
#[derive(Clone, Default)]
struct Most(Arc<(AtomicUsize, AtomicUsize)>);

impl Most {
    fn enter(&self) {
        let now = self.0.0.fetch_add(1, Ordering::SeqCst) + 1;
        self.0.1.fetch_max(now, Ordering::SeqCst);
    }

    fn leave(&self) {
        self.0.0.fetch_sub(1, Ordering::SeqCst);
    }

    fn get(&self) -> usize {
        self.0.1.load(Ordering::SeqCst)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn consumers_that_come_and_go_leave_the_pool_as_large_as_it_was() {
    const POOL: usize = 4;
    let url = database().await;
    let client = Client::builder(&url).pool_size(POOL).connect().await.unwrap();
    let db = connect(&url).await;
    let stream = numbers(&client, "s", 0).await;
    let group = stream.group("g").create().await.unwrap();
    assert!(count(&db, SESSIONS).await <= 2, "they are opened when they are needed");

    for cycle in 0..24_u64 {
        stream.producer().send_all([cycle; 8].iter().map(sqlstreams::Outgoing::new)).await.unwrap();
        let consumer = group.consumer().concurrency(POOL * 2);
        let consumer = if cycle % 2 == 0 { consumer.until_caught_up() } else { consumer };
        let consuming = consumer.run_transactional(async |_: Delivery<u64>, tx: Transaction| {
            tx.execute("SELECT pg_sleep(0.005)", &[]).await.map(drop)
        });
        // All connections are out when it starts, now and then.
        let calls = futures_util::future::try_join_all((0..8).map(|_| group.status()));
        let limit = match cycle % 2 {
            0 => NOT_FOR_EVER,
            _ => Duration::from_millis(fastrand::u64(1..60)),
        };
        let (consumed, calls) = tokio::join!(timeout(limit, consuming), calls);
        calls.unwrap();
        if cycle % 2 == 0 {
            consumed.expect("it hangs").unwrap();
        }
    }
    let calls = futures_util::future::try_join_all((0..60).map(|_| group.status()));
    timeout(NOT_FOR_EVER, calls).await.expect("they hang").unwrap();
    until("no more sessions than there may be", Duration::from_secs(10), async || {
        count(&db, SESSIONS).await <= POOL as i64 + 1
    })
    .await;

    let last = numbers(&client, "last", 60).await;
    let (handlers, sessions) = (Most::default(), Arc::new(AtomicUsize::new(0)));
    let (inside, seen) = (handlers.clone(), sessions.clone());
    let consumer = last.group("g").consumer().concurrency(40).until_caught_up();
    let consumed = consumer.run_transactional(move |message: Delivery<u64>, tx: Transaction| {
        let (inside, seen) = (inside.clone(), seen.clone());
        async move {
            inside.enter();
            sleep(Duration::from_millis(30)).await;
            if message.payload >= 30 {
                let all =
                    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()";
                seen.fetch_max(count(&tx, all).await as usize, Ordering::SeqCst);
            }
            inside.leave();
        }
    });
    let consumed = timeout(NOT_FOR_EVER, consumed).await.expect("it hangs").unwrap();
    assert_eq!((consumed.handled, handlers.get()), (60, POOL - 1));
    // The pool, the listener, and `db`.
    assert!(sessions.load(Ordering::SeqCst) <= POOL + 2, "{sessions:?}");
}

/// A message whose handler always loses its connection is dead in the end, with the reason.
#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_always_loses_its_transaction_fails() {
    for (how, most, reason) in [
        ("idle", 2, "idle-in-transaction timeout"),
        ("SET TRANSACTION READ ONLY", 2, "read-only transaction"),
        ("SELECT pg_terminate_backend(pg_backend_pid())", 6, "connection"),
    ] {
        let url = database().await;
        let db = connect(&url).await;
        if how == "idle" {
            let name = name(&url);
            let set =
                format!("ALTER DATABASE {name} SET idle_in_transaction_session_timeout = 200");
            db.batch_execute(&set).await.unwrap();
        }
        let client = Client::builder(&url).pool_size(4).connect().await.unwrap();
        let stream = numbers(&client, "s", 1).await;
        let runs = Arc::new(AtomicUsize::new(0));
        let count = runs.clone();
        let consumer = stream.group("g").retry(at_once(2)).consumer().until_caught_up();
        let consumed = consumer.run_transactional(move |_: Delivery<u64>, tx: Transaction| {
            count.fetch_add(1, Ordering::SeqCst);
            async move {
                match how {
                    "idle" => sleep(Duration::from_millis(700)).await,
                    sql => {
                        let _ = tx.batch_execute(sql).await;
                    }
                }
            }
        });
        let consumed = timeout(NOT_FOR_EVER, consumed).await.unwrap_or_else(|_| {
            panic!("{how}: run {} times, and no end", runs.load(Ordering::SeqCst))
        });
        assert_eq!((consumed.unwrap().handled, runs.load(Ordering::SeqCst) <= most), (0, true));
        let error = last_error(&db).await;
        assert!(error.contains(reason), "{how}: {error}");
    }
}

/// What a handler has left running on the server is cancelled, and nobody waits for it.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_handler_has_running_ends_with_its_time() {
    const POOL: usize = 4;
    let url = database().await;
    let client = Client::builder(&url).pool_size(POOL).connect().await.unwrap();
    let db = connect(&url).await;
    let stream = numbers(&client, "s", 9).await;
    let consumer = stream.group("g").retry(at_once(2)).consumer().concurrency(3);
    let consumer = consumer.timeout(Duration::from_millis(300)).until_caught_up();
    let consuming = tokio::spawn(
        consumer
            .run_transactional(async |_: Delivery<u64>, tx: Transaction| {
                tx.execute("SELECT pg_sleep(300)", &[]).await.map(drop)
            })
            .into_future(),
    );
    let (start, mut most) = (Instant::now(), 0);
    while !consuming.is_finished() {
        assert!(start.elapsed() < Duration::from_secs(15), "18 calls of 300 ms, three at a time");
        most = most.max(count(&db, SESSIONS).await);
        sleep(Duration::from_millis(10)).await;
    }
    let consumed = consuming.await.unwrap().unwrap();
    assert_eq!((consumed.handled, consumed.failed), (0, 18));
    // The pool and the listener; and one for each request to cancel, which is not there for long.
    assert!(most <= POOL as i64 + 1 + 3, "{most} sessions");
    until("cancelled", Duration::from_secs(3), async || count(&db, SLEEPING).await == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_handler_has_running_ends_with_its_consumer() {
    let (client, db) = client().await;
    let stream = numbers(&client, "s", 3).await;
    let group = stream.group("g").create().await.unwrap();
    let consuming = tokio::spawn(
        group
            .consumer()
            .run_transactional(async |_: Delivery<u64>, tx: Transaction| {
                tx.execute("SELECT pg_sleep(300)", &[]).await.map(drop)
            })
            .into_future(),
    );
    eventually(async || count(&db, SLEEPING).await == 3).await;
    consuming.abort();
    until("cancelled", Duration::from_secs(3), async || count(&db, SLEEPING).await == 0).await;
}

/// A transaction that is never dropped costs its message, not the connections of the others.
#[tokio::test(flavor = "multi_thread")]
async fn transactions_that_are_never_dropped_stop_nobody() {
    let url = database().await;
    let client = Client::builder(&url).pool_size(3).connect().await.unwrap();
    let db = connect(&url).await;
    let stream = numbers(&client, "s", 30).await;
    let consumer = stream.group("g").retry(at_once(1)).consumer().until_caught_up();
    let consumed = consumer.run_transactional(async |message: Delivery<u64>, tx: Transaction| {
        tx.execute("SELECT 1", &[]).await.unwrap();
        match message.payload {
            0..3 => std::mem::forget(tx),
            3..6 => {
                tokio::spawn(async move {
                    std::future::pending::<()>().await;
                    drop(tx);
                });
            }
            6..9 => {
                tokio::spawn(async move { tx.execute("SELECT pg_sleep(300)", &[]).await });
            }
            _ => {}
        }
    });
    let consumed = timeout(NOT_FOR_EVER, consumed).await.expect("it hangs").unwrap();
    assert_eq!((consumed.handled, consumed.failed), (21, 9));
    until("they are closed", Duration::from_secs(10), async || {
        count(&db, SESSIONS).await <= 4 && count(&db, SLEEPING).await == 0
    })
    .await;
}

/// A transactional consumer with a message, in a database that takes no more connections.
struct Refused {
    url: String,
    admin: tokio_postgres::Client,
    health: Health,
    stop: CancellationToken,
    consuming: JoinHandle<sqlstreams::Result<Consumed>>,
}

impl Refused {
    async fn start() -> Self {
        let url = database().await;
        let client = Client::connect(&url).await.unwrap();
        let admin = connect(&cluster().url("postgres")).await;
        let stream = numbers(&client, "s", 0).await;
        let stop = CancellationToken::new();
        let consumer = stream.group("g").consumer().stop_on(stop.clone());
        let health = consumer.health();
        let consuming = tokio::spawn(
            consumer.run_transactional(async |_: Delivery<u64>, _tx: Transaction| {}).into_future(),
        );
        eventually(async || health.snapshot().listening).await;
        let refused = Self { url, admin, health, stop, consuming };
        refused.allow_connections(false).await;
        stream.producer().send(&1).await.unwrap();
        refused
    }

    async fn allow_connections(&self, allowed: bool) {
        let alter = format!("ALTER DATABASE {} ALLOW_CONNECTIONS {allowed}", name(&self.url));
        self.admin.batch_execute(&alter).await.unwrap();
    }
}

/// Handlers that get no transaction are trouble, for whoever watches.
#[tokio::test(flavor = "multi_thread")]
async fn health_tells_of_handlers_without_a_transaction() {
    let refused = Refused::start().await;
    let Refused { health, stop, .. } = &refused;
    eventually(async || {
        let trouble = health.snapshot().trouble;
        trouble.is_some_and(|trouble| trouble.contains("not currently accepting connections"))
    })
    .await;
    // It stays, although the consumer's other calls are answered.
    for _ in 0..50 {
        assert!(health.snapshot().trouble.is_some());
        sleep(Duration::from_millis(20)).await;
    }
    refused.allow_connections(true).await;
    eventually(async || health.snapshot().trouble.is_none()).await;
    eventually(async || health.snapshot().consumed.handled == 1).await;
    stop.cancel();
    refused.consuming.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_tells_what_the_server_said() {
    let (client, db) = client().await;
    db.batch_execute("CREATE TABLE effect (id int PRIMARY KEY); INSERT INTO effect VALUES (7)")
        .await
        .unwrap();
    let stream = numbers(&client, "s", 1).await;
    let consumer = stream.group("g").retry(at_once(1)).consumer().until_caught_up();
    let consumed = consumer.run_transactional(async |_: Delivery<u64>, tx: Transaction| {
        tx.execute("INSERT INTO effect VALUES (7)", &[]).await.map(drop)
    });
    assert_eq!(consumed.await.unwrap().failed, 1);
    let error = last_error(&db).await;
    for part in ["duplicate key value", "effect_pkey", "Key (id)=(7) already exists", "23505"] {
        assert!(error.contains(part), "{error}");
    }
}

/// That the connection breaks is not the message's fault: the same whether the handler notices or the commit does.
#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_is_cut_costs_no_attempt() {
    for notices in [true, false] {
        let (client, db) = client().await;
        let stream = numbers(&client, "s", 1).await;
        let (runs, db) = (Arc::new(AtomicUsize::new(0)), Arc::new(db));
        let (calls, admin) = (runs.clone(), db.clone());
        let consumer = stream.group("g").retry(at_once(1)).consumer().until_caught_up();
        let consumed = consumer.run_transactional(move |_: Delivery<u64>, tx: Transaction| {
            let (first, admin) = (calls.fetch_add(1, Ordering::SeqCst) == 0, admin.clone());
            async move {
                let pid: i32 = tx.query_one("SELECT pg_backend_pid()", &[]).await?.get(0);
                if first {
                    admin.execute("SELECT pg_terminate_backend($1)", &[&pid]).await?;
                    sleep(Duration::from_millis(100)).await;
                    if notices {
                        tx.execute("SELECT 1", &[]).await?;
                    }
                }
                Ok::<_, tokio_postgres::Error>(())
            }
        });
        let consumed = timeout(NOT_FOR_EVER, consumed).await.expect("it hangs").unwrap();
        assert_eq!((consumed.handled, consumed.failed), (1, 0), "{notices}");
        assert_eq!(runs.load(Ordering::SeqCst), 2);
    }
}

/// A consumer that is stopped does not wait for transactions that its handlers cannot have.
#[tokio::test(flavor = "multi_thread")]
async fn stopping_does_not_wait_for_a_transaction() {
    let mut refused = Refused::start().await;
    eventually(async || refused.health.snapshot().in_flight == 1).await;
    refused.stop.cancel();
    let stopped = timeout(Duration::from_secs(5), &mut refused.consuming).await;
    stopped.expect("it waits").unwrap().unwrap();
    let free =
        "SELECT count(*) FROM sqlstreams.consumer_lease_1 WHERE expires_at > clock_timestamp()";
    refused.allow_connections(true).await;
    let db = connect(&refused.url).await;
    assert_eq!(count(&db, free).await, 0, "it has handed the message back");
}

/// A connection belongs to the runtime of the handler that it was opened for: who blocks that is nobody else's business.
#[tokio::test(flavor = "multi_thread")]
async fn handlers_of_one_runtime_do_not_wait_for_those_of_another() {
    let (client, _db) = client().await;
    let (first, second) = (numbers(&client, "a", 60).await, numbers(&client, "b", 20).await);
    let (blocks, blocked) = tokio::sync::oneshot::channel();
    let blocks = std::sync::Mutex::new(Some(blocks));
    let blocking = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let consumer = first.group("g").consumer().concurrency(3).until_caught_up();
        let handler = move |message: Delivery<u64>, tx: Transaction| {
            let blocks = (message.payload == 59).then(|| blocks.lock().unwrap().take()).flatten();
            async move {
                tx.execute("SELECT pg_sleep(0.01)", &[]).await.unwrap();
                if let Some(blocks) = blocks {
                    // The others are done by now, and their connections idle.
                    sleep(Duration::from_millis(300)).await;
                    blocks.send(()).unwrap();
                    std::thread::sleep(Duration::from_secs(5));
                }
            }
        };
        runtime.block_on(consumer.run_transactional(handler)).unwrap()
    });
    blocked.await.unwrap();
    let start = Instant::now();
    let consumer = second.group("g").consumer().concurrency(3).until_caught_up();
    let consumed = consumer.run_transactional(async |_: Delivery<u64>, tx: Transaction| {
        tx.execute("SELECT 1", &[]).await.map(drop)
    });
    assert_eq!(consumed.await.unwrap().handled, 20);
    assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
    let blocking = tokio::task::spawn_blocking(move || blocking.join().unwrap()).await.unwrap();
    assert_eq!(blocking.handled, 60);
}
