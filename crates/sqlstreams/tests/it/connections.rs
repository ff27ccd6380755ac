//! The life of connections: servers that restart, take no writes or hang, and sessions that are ended.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sqlstreams::{Client, Group, Health, Stream};
use sqlstreams_dev::{Cluster, StopMode};
use tokio_postgres::Client as Db;

use crate::proxy::{Cut, Place, Proxy};
use crate::running::Running;
use crate::support::{connect, database, until};

/// What "within seconds" is at most, on a busy machine.
const SECONDS: Duration = Duration::from_secs(30);

async fn cluster() -> Arc<Cluster> {
    let start = || Arc::new(Cluster::builder().durable(false).start().unwrap());
    tokio::task::spawn_blocking(start).await.unwrap()
}

async fn stop(cluster: &Arc<Cluster>) {
    let cluster = cluster.clone();
    tokio::task::spawn_blocking(move || cluster.stop(StopMode::Fast).unwrap()).await.unwrap();
}

async fn start_again(cluster: &Arc<Cluster>) {
    let cluster = cluster.clone();
    tokio::task::spawn_blocking(move || cluster.start_again().unwrap()).await.unwrap();
}

async fn stream_and_group(url: &str) -> (Stream<u64>, Group<u64>) {
    let client = Client::connect(url).await.unwrap();
    let stream = client.stream::<u64>("orders").create().await.unwrap();
    let group = stream.group("g").create().await.unwrap();
    (stream, group)
}

async fn sends(stream: &Stream<u64>, payload: u64) {
    stream.producer().send(&payload).await.unwrap();
}

/// What the consumer says of its trouble, as soon as it says anything.
async fn trouble(health: &Health) -> String {
    until("it says what is wrong", SECONDS, async || health.snapshot().trouble.is_some()).await;
    let snapshot = health.snapshot();
    assert!(!snapshot.connected);
    snapshot.trouble.unwrap_or_default()
}

async fn well(health: &Health) {
    until("it is well again", SECONDS, async || {
        let health = health.snapshot();
        health.trouble.is_none() && health.connected && health.listening
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tb_063_a_server_that_is_down_for_long_is_asked_now_and_then() {
    let cluster = cluster().await;
    let proxy = Proxy::start(&cluster.url("postgres")).await;
    let (stream, group) = stream_and_group(&proxy.url).await;
    let mut consumer = Running::start(&group);
    sends(&stream, 1).await;
    consumer.handles(1, SECONDS).await;
    well(&consumer.health).await;

    stop(&cluster).await;
    let trouble = trouble(&consumer.health).await;
    assert!(trouble.contains("connect"), "{trouble}");
    let tried = proxy.connections();
    tokio::time::sleep(Duration::from_secs(6)).await;
    let tried = proxy.connections() - tried;
    println!("in 6 s without a server: {tried} tries");
    // The consumer and what it looks for, and the maintenance: each with pauses of a second at most that grow.
    assert!(tried <= 60, "{tried} tries in 6 s");
    assert!(tried > 0, "it has given up");
    assert!(consumer.health.snapshot().trouble.is_some());

    start_again(&cluster).await;
    sends(&stream, 2).await;
    consumer.handles(2, SECONDS).await;
    well(&consumer.health).await;
    consumer.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_of_the_server_is_waited_out() {
    let cluster = cluster().await;
    let (stream, group) = stream_and_group(&cluster.url("postgres")).await;
    let mut consumer = Running::start(&group);
    for n in 0..3 {
        sends(&stream, n).await;
        consumer.handles(n, SECONDS).await;
        stop(&cluster).await;
        start_again(&cluster).await;
    }
    sends(&stream, 9).await;
    consumer.handles(9, SECONDS).await;
    well(&consumer.health).await;
    consumer.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tb_061_consumers_survive_the_end_of_every_session() {
    let url = database().await;
    let (stream, group) = stream_and_group(&url).await;
    let mut consumer = Running::start(&group);
    let db = connect(&url).await;
    for n in 0..10 {
        sends(&stream, n).await;
        consumer.handles(n, SECONDS).await;
        let sql = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()";
        db.execute(sql, &[]).await.unwrap();
    }
    well(&consumer.health).await;
    assert_eq!(consumer.stop().await.handled, 10);
}

async fn read_only(db: &Db, on: bool) {
    let sql = format!("ALTER SYSTEM SET default_transaction_read_only = {on}");
    // The second one is for this very session, which is read-only like all others.
    db.batch_execute("SET default_transaction_read_only = off").await.unwrap();
    db.batch_execute(&sql).await.unwrap();
    db.batch_execute("SELECT pg_reload_conf()").await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_takes_no_writes_for_a_while_is_waited_out() {
    let cluster = cluster().await;
    let url = cluster.url("postgres");
    let proxy = Proxy::start(&url).await;
    let (stream, group) = stream_and_group(&proxy.url).await;
    let mut consumer = Running::start(&group);
    let db = connect(&url).await;
    for n in 0..2 {
        sends(&stream, n).await;
        consumer.handles(n, SECONDS).await;
        read_only(&db, true).await;
        // It has nothing to write just now, and notices all the same.
        let trouble = trouble(&consumer.health).await;
        assert!(trouble.contains("read-only"), "{trouble}");
        let tried = proxy.connections();
        tokio::time::sleep(Duration::from_secs(2)).await;
        let tried = proxy.connections() - tried;
        assert!(tried <= 30, "{tried} tries in 2 s");
        read_only(&db, false).await;
        well(&consumer.health).await;
    }
    sends(&stream, 9).await;
    consumer.handles(9, SECONDS).await;
    consumer.stop().await;
}

/// The two servers stand for a primary and a standby that takes over: what was installed on one is on the other.
#[tokio::test(flavor = "multi_thread")]
async fn of_several_hosts_the_new_primary_is_found() {
    let (first, second) = (cluster().await, cluster().await);
    let password = "a password that both know";
    for cluster in [&first, &second] {
        let db = connect(&cluster.url("postgres")).await;
        db.batch_execute(&format!("ALTER ROLE postgres PASSWORD '{password}'")).await.unwrap();
    }
    let (a, b) = (first.port(), second.port());
    let url = |ports: &str, hosts: &str| {
        format!(
            "host={hosts} port={ports} user=postgres password='{password}' dbname=postgres target_session_attrs=read-write"
        )
    };
    let both = url(&format!("{a},{b}"), "127.0.0.1,127.0.0.1");
    for port in [a, b] {
        stream_and_group(&url(&port.to_string(), "127.0.0.1")).await;
    }
    let admin = async |port: u16| {
        connect(&format!(
            "host=127.0.0.1 port={port} user=postgres password='{password}' dbname=postgres"
        ))
        .await
    };
    let (on_a, on_b) = (admin(a).await, admin(b).await);
    read_only(&on_b, true).await;

    let client = Client::connect(&both).await.unwrap();
    let stream = client.stream::<u64>("orders").open().await.unwrap();
    let group = stream.group("g").open().await.unwrap();
    let mut consumer = Running::start(&group);
    well(&consumer.health).await;
    let mut n = 0;
    for (old, new) in [(&on_a, &on_b), (&on_b, &on_a), (&on_a, &on_b)] {
        // Several connections of the pool are in use.
        let producer = stream.producer();
        futures_util::future::try_join_all((n..n + 20).map(|n| {
            let producer = producer.clone();
            async move { producer.send(&n).await }
        }))
        .await
        .unwrap();
        until("all are handled", SECONDS, async || {
            consumer.health.snapshot().consumed.handled == n + 20
        })
        .await;
        n += 20;
        read_only(old, true).await;
        read_only(new, false).await;
        // Everything moves, also the listener of a consumer that has nothing to do.
        let sql =
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND classid = 1397836883";
        until("it listens there", SECONDS, async || crate::support::count(new, sql).await == 1)
            .await;
        until("nothing is left on the old one", SECONDS, async || {
            let sql = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'sqlstreams'";
            crate::support::count(old, sql).await == 0
        })
        .await;
    }
    sends(&stream, 1_000).await;
    consumer.handles(1_000, SECONDS).await;
    well(&consumer.health).await;
    consumer.stop().await;
}

/// A stream and a group whose connections go through a proxy, and the stream with connections that do not.
struct Behind {
    url: String,
    proxy: Proxy,
    stream: Stream<u64>,
    group: Group<u64>,
    elsewhere: Stream<u64>,
}

impl Behind {
    async fn start() -> Self {
        let url = database().await;
        let proxy = Proxy::start(&url).await;
        let (stream, group) = stream_and_group(&proxy.url).await;
        let elsewhere = Client::connect(&url).await.unwrap();
        let elsewhere = elsewhere.stream::<u64>("orders").open().await.unwrap();
        Self { url, proxy, stream, group, elsewhere }
    }
}

/// Bytes are swallowed both ways, on all connections there are, and nobody says that they are closed.
#[tokio::test(flavor = "multi_thread")]
async fn frozen_connections_are_given_up() {
    let Behind { proxy, stream, group, elsewhere, .. } = Behind::start().await;
    let mut consumer = Running::start(&group);
    // Several connections lie in the pool.
    futures_util::future::join_all((0..20).map(|_| group.status())).await;
    sends(&stream, 1).await;
    consumer.handles(1, SECONDS).await;
    well(&consumer.health).await;

    proxy.set(|_| Some(Cut::Freeze(Place::Before)));
    let trouble = trouble(&consumer.health).await;
    assert!(trouble.contains("answer"), "{trouble}");
    sends(&elsewhere, 2).await;
    // From now on new connections work. The old ones never will.
    proxy.set(|_| None);
    let thawed = Instant::now();
    consumer.handles(2, SECONDS).await;
    well(&consumer.health).await;
    println!("handled {:?} after the network was back", thawed.elapsed());
    // Our own producer rings again, too.
    sends(&stream, 3).await;
    consumer.handles(3, SECONDS).await;
    consumer.stop().await;
}

/// All at once freeze while nothing happens, and new ones work: nobody waits for one connection of the pool after the other.
#[tokio::test(flavor = "multi_thread")]
async fn a_pool_of_frozen_connections_is_given_up_at_once() {
    let Behind { url, proxy, stream, group, elsewhere } = Behind::start().await;
    let mut consumer = Running::start(&group);
    sends(&stream, 1).await;
    consumer.handles(1, SECONDS).await;
    well(&consumer.health).await;
    futures_util::future::join_all((0..20).map(|_| group.status())).await;
    tokio::time::sleep(Duration::from_secs(1)).await;

    // By their processes: those that exist now.
    let db = connect(&url).await;
    let rows = db.query("SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()", &[]).await.unwrap();
    let frozen: Vec<i32> = rows.iter().map(|row| row.get(0)).collect();
    assert!(frozen.len() > 4, "{frozen:?}");
    proxy.set(move |statement| {
        frozen.contains(&statement.pid).then_some(Cut::Freeze(Place::Before))
    });
    let started = Instant::now();
    sends(&elsewhere, 2).await;
    consumer.handles(2, SECONDS).await;
    println!("handled after {:?}", started.elapsed());
    well(&consumer.health).await;
    println!("well after {:?}", started.elapsed());
    assert!(started.elapsed() < Duration::from_secs(25));
    consumer.stop().await;
}

/// Frozen, or behind a dead network, in the midst of a transaction that holds up all messages which come later.
#[tokio::test(flavor = "multi_thread")]
async fn a_producer_that_vanishes_holds_others_up_for_seconds() {
    let Behind { proxy, stream, elsewhere, .. } = Behind::start().await;
    let mut consumer = Running::start(&elsewhere.group("g").open().await.unwrap());
    let mut writer = None;
    proxy.set(move |statement| {
        if statement.sql.contains("INSERT INTO") {
            writer = Some(statement.pid);
        }
        (statement.sql == "COMMIT" && writer == Some(statement.pid))
            .then_some(Cut::Freeze(Place::Before))
    });
    let producer = stream.producer();
    let sending = tokio::spawn(async move { producer.send(&1).await });
    until("it is about to commit", SECONDS, async || proxy.cuts() == 1).await;
    // Nor can it have its transaction ended by way of another connection.
    proxy.set(|_| Some(Cut::Freeze(Place::Before)));

    let started = Instant::now();
    sends(&elsewhere, 2).await;
    consumer.handles(2, SECONDS).await;
    println!("held up for {:?}", started.elapsed());
    assert_eq!(consumer.stop().await.handled, 1);
    sending.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn where_no_connection_is_left_to_listen_on_the_pool_looks_for_messages() {
    const POOL: usize = 3;
    let url = database().await;
    let db = connect(&url).await;
    let role = format!("limited_{}", fastrand::u64(..));
    db.batch_execute(&format!(
        "CREATE ROLE {role} LOGIN PASSWORD 'secret' CONNECTION LIMIT {POOL};
         GRANT CREATE ON DATABASE {} TO {role}",
        url.rsplit('/').next().unwrap()
    ))
    .await
    .unwrap();
    let proxy = Proxy::start(&url).await;
    let address = proxy.url.rsplit('@').next().unwrap();
    let limited = format!("postgres://{role}:secret@{address}");
    let client = Client::builder(&limited).pool_size(POOL).connect().await.unwrap();
    let stream = client.stream::<u64>("orders").create().await.unwrap();
    let mut groups = Vec::new();
    for n in 0..10 {
        groups.push(stream.group(format!("g{n}")).create().await.unwrap());
    }
    // The pool uses up what there is.
    let mut all = 0;
    while all < POOL {
        futures_util::future::join_all((0..20).map(|_| groups[0].status())).await;
        let sql = format!("SELECT count(*) FROM pg_stat_activity WHERE usename = '{role}'");
        all = crate::support::count(&db, &sql).await as usize;
    }
    let mut consumers: Vec<_> = groups.iter().map(Running::start).collect();
    for n in 0..2 {
        sends(&stream, n).await;
        for consumer in &mut consumers {
            consumer.handles(n, SECONDS).await;
            assert!(!consumer.health.snapshot().listening);
        }
    }
    tokio::time::sleep(Duration::from_secs(4)).await;
    let sent = proxy.count();
    tokio::time::sleep(Duration::from_secs(4)).await;
    let sent = sent.load(std::sync::atomic::Ordering::SeqCst);
    println!("{sent} statements in 4 s");
    assert!((1..=20).contains(&sent), "{sent} statements in 4 s");

    // As soon as one may be opened it is.
    db.batch_execute(&format!("ALTER ROLE {role} CONNECTION LIMIT {}", POOL + 1)).await.unwrap();
    for consumer in &consumers {
        well(&consumer.health).await;
    }
    for consumer in consumers {
        consumer.stop().await;
    }
    drop((groups, stream, client, proxy));
    db.batch_execute(&format!("DROP OWNED BY {role}; DROP ROLE {role}")).await.unwrap();
}

/// Which limit was reached, and so what helps.
#[tokio::test]
async fn too_many_connections_of_a_role_or_to_a_database_are_told_apart() {
    let url = database().await;
    let db = connect(&url).await;
    let name = url.rsplit('/').next().unwrap().split('?').next().unwrap();
    db.batch_execute(&format!(
        "CREATE ROLE limited LOGIN PASSWORD 'x' CONNECTION LIMIT 0; CREATE ROLE other LOGIN PASSWORD 'x'; ALTER DATABASE {name} CONNECTION LIMIT 0"
    ))
    .await
    .unwrap();
    for (role, limit) in [("limited", "ALTER ROLE"), ("other", "ALTER DATABASE")] {
        let (_, address) = url.split_once('@').unwrap();
        let error = Client::connect(&format!("postgres://{role}:x@{address}")).await.unwrap_err();
        assert!(error.hint().unwrap().contains(limit), "{role}: {error:?}");
    }
}
