//! What the tests share: a cluster, a database per test, and streams in it.

use std::future::{Ready, ready};
use std::panic::Location;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use sqlstreams::{Client, Delivery, Stream};
use sqlstreams_dev::Cluster;

/// The cluster of this test run. Its watchdog removes it when the process ends.
pub fn cluster() -> &'static Cluster {
    static CLUSTER: OnceLock<Cluster> = OnceLock::new();
    CLUSTER.get_or_init(|| Cluster::builder().durable(false).start().expect("a private cluster"))
}

/// The URL of a new, empty database.
pub async fn database() -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let cluster = tokio::task::spawn_blocking(cluster).await.unwrap();
    let name = format!("test_{}", COUNT.fetch_add(1, Ordering::Relaxed));
    let admin = connect(&cluster.url("postgres")).await;
    admin.batch_execute(&format!("CREATE DATABASE {name}")).await.unwrap();
    cluster.url(&name)
}

/// A plain connection, for looking behind the crate.
pub async fn connect(url: &str) -> tokio_postgres::Client {
    let (client, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

/// A client with the schema installed in a new database, and a plain connection to that.
pub async fn client() -> (Client, tokio_postgres::Client) {
    client_at(&database().await).await
}

/// The same in this database.
pub async fn client_at(url: &str) -> (Client, tokio_postgres::Client) {
    (Client::connect(url).await.unwrap(), connect(url).await)
}

/// A new JSON stream of numbers with `count` messages, 0 and up.
pub async fn numbers(client: &Client, name: &str, count: u64) -> Stream<u64> {
    let stream = client.stream::<u64>(name).create().await.unwrap();
    let payloads: Vec<u64> = (0..count).collect();
    stream.producer().send_all(payloads.iter().map(sqlstreams::Outgoing::new)).await.unwrap();
    stream
}

/// One number out of the database.
pub async fn count(db: &tokio_postgres::Client, sql: &str) -> i64 {
    db.query_one(sql, &[]).await.unwrap().get(0)
}

/// A handler that counts what it handles. Of each hundred messages one always fails, and one the first time.
pub fn mostly(
    handled: &Arc<AtomicU32>,
) -> impl Fn(Delivery<u64>) -> Ready<Result<(), &'static str>> + use<> {
    let handled = handled.clone();
    move |message| {
        ready(match (message.payload % 100, message.attempt()) {
            (0, _) => Err("always"),
            (1, 1) => Err("once"),
            _ => {
                handled.fetch_add(1, Ordering::SeqCst);
                Ok(())
            }
        })
    }
}

/// Looks again and again until something holds; fails after so long.
pub async fn until(what: &str, limit: Duration, mut holds: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + limit;
    while !holds().await {
        assert!(Instant::now() < deadline, "not within {limit:?}: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The same for half a minute, where the place in the test says enough.
#[track_caller]
pub fn eventually(holds: impl AsyncFnMut() -> bool) -> impl Future<Output = ()> {
    let place = Location::caller();
    async move { until(&place.to_string(), Duration::from_secs(30), holds).await }
}
