//! What peers on PostgreSQL have in common.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use futures_util::future::try_join_all;
use tokio_postgres::Client;

use crate::messages::Messages;
use crate::peer::{Processes, SENDERS};
use crate::place::{Place, connect_many};

/// How many connections produce in batches, and how many consume.
pub(super) const CONNECTIONS: u64 = 2;
/// How long a worker that found nothing waits.
pub(super) const NAP: Duration = Duration::from_millis(2);

/// A database, and connections that are there before anything is measured.
pub(super) struct Database {
    place: Arc<Place>,
    pub(super) url: String,
    connections: Vec<Arc<Client>>,
}

impl Database {
    /// A new one of that name.
    pub(super) async fn create(place: Arc<Place>, name: &str) -> Result<Self> {
        let url = place.database(name).await?;
        Ok(Self { place, url, connections: Vec::new() })
    }

    pub(super) fn processes(&self) -> Processes {
        let server = self.place.postgres_pid().into_iter().collect();
        Processes { server, client: Vec::new(), postgres: Some(self.url.clone()) }
    }

    pub(super) async fn open_connections(&mut self) -> Result<()> {
        let connections = connect_many(&self.url, SENDERS + CONNECTIONS).await?;
        self.connections = connections.into_iter().map(Arc::new).collect();
        Ok(())
    }

    pub(super) fn close_connections(&mut self) {
        self.connections.clear();
    }

    /// Those that consume. They produce nothing.
    pub(super) fn workers(&self) -> Vec<Arc<Client>> {
        self.connections.iter().take(CONNECTIONS as usize).cloned().collect()
    }

    /// Those that produce, so many.
    pub(super) fn producers(&self, count: u64) -> Vec<Arc<Client>> {
        let others = self.connections.iter().skip(CONNECTIONS as usize);
        others.take(count as usize).cloned().collect()
    }

    /// Executes a statement with an array of payloads for each batch.
    pub(super) async fn produce(&self, messages: Messages, batch: usize, sql: &str) -> Result<()> {
        let parts = messages.split(CONNECTIONS);
        let parts = self.producers(CONNECTIONS).into_iter().zip(parts).map(|(db, part)| {
            let sql = sql.to_owned();
            tokio::spawn(async move {
                let statement = db.prepare(&sql).await?;
                for batch in part.batches(batch) {
                    db.query(&statement, &[&batch]).await?;
                }
                anyhow::Ok(())
            })
        });
        try_join_all(parts).await?.into_iter().collect()
    }

    /// Executes a statement for each payload, a connection for each sender.
    pub(super) async fn send(&self, messages: Messages, sql: &str) -> Result<()> {
        let parts = messages.split(SENDERS);
        let senders = self.producers(SENDERS).into_iter().zip(parts).map(|(db, part)| {
            let sql = sql.to_owned();
            tokio::spawn(async move {
                let statement = db.prepare(&sql).await?;
                for number in part.numbers.clone() {
                    db.query(&statement, &[&part.payload(number)]).await?;
                }
                anyhow::Ok(())
            })
        });
        try_join_all(senders).await?.into_iter().collect()
    }
}
