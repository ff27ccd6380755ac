//! A group whose consumers run in this process and in others.

use std::time::Duration;

use sqlstreams::{CancellationToken, Client, Consumed, Group, Outgoing, Stream};
use tokio::task::JoinHandle;

use crate::child::{Place, Process};
use crate::journal::{Journal, Script};
use crate::support::{client_at, count, database, numbers, until};

/// A stream with a group, consumers of which run here and in other processes.
pub struct Scene {
    pub db: tokio_postgres::Client,
    pub stream: Stream<u64>,
    pub group: Group<u64>,
    pub place: Place,
    pub journal: Journal,
}

/// A consumer in this process, with a client of its own.
pub struct Local {
    pub stop: CancellationToken,
    pub running: JoinHandle<sqlstreams::Result<Consumed>>,
}

impl Scene {
    pub async fn new(name: &'static str, messages: u64, lease: Duration) -> Self {
        Self::at(database().await, name, messages, lease).await
    }

    /// In the database at `url`, whose schema may have to be installed.
    pub async fn at(url: String, name: &'static str, messages: u64, lease: Duration) -> Self {
        let (client, db) = client_at(&url).await;
        let stream = numbers(&client, name, messages).await;
        let group = stream.group("g").lease(lease).create().await.unwrap();
        let place = Place { url, stream: name, group: "g" };
        Self { db, stream, group, place, journal: Journal::default() }
    }

    pub fn process(&self, number: u32, concurrency: usize, script: Script) -> Process {
        Process::start(&self.place, concurrency, script, number, &self.journal)
    }

    pub async fn local(&self, number: u32, concurrency: usize, script: Script) -> Local {
        let client = Client::connect(&self.place.url).await.unwrap();
        self.local_through(client, number, concurrency, script).await
    }

    pub async fn local_through(
        &self,
        client: Client,
        number: u32,
        concurrency: usize,
        script: Script,
    ) -> Local {
        let stream = client.stream::<u64>(self.place.stream).open().await.unwrap();
        let stop = CancellationToken::new();
        let consumer = stream.group("g").open().await.unwrap().consumer();
        let consumer = consumer.concurrency(concurrency).stop_on(stop.clone());
        let running = tokio::spawn(consumer.run(self.journal.handler(number, script)));
        Local { stop, running }
    }

    pub async fn produce(&self, payloads: std::ops::Range<u64>) {
        let payloads: Vec<u64> = payloads.collect();
        self.stream.producer().send_all(payloads.iter().map(Outgoing::new)).await.unwrap();
    }

    /// Whether everything that was produced is done or dead.
    pub async fn is_resolved(&self) -> bool {
        let sql = format!(
            "SELECT sqlstreams.is_resolved({0}, {1}, sqlstreams.stream_head({0}))::int::bigint",
            self.stream.id(),
            self.group.id()
        );
        count(&self.db, &sql).await == 1
    }

    pub async fn until_resolved(&self, seconds: u64) {
        until("everything is resolved", Duration::from_secs(seconds), async || {
            self.is_resolved().await
        })
        .await;
    }

    /// How many messages leases hold.
    pub async fn pending(&self) -> i64 {
        let sql = format!(
            "SELECT coalesce(sum(upper(r) - lower(r)), 0)::bigint FROM sqlstreams.consumer_lease_{}, unnest(pending) AS r",
            self.stream.id()
        );
        count(&self.db, &sql).await
    }
}

impl Local {
    pub async fn stop(self) -> Consumed {
        self.stop.cancel();
        self.running.await.unwrap().unwrap()
    }
}
