//! pgmq: its SQL, installed by its crate without an extension.

use std::sync::Arc;

use anyhow::Result;
use async_trait::async_trait;
use futures_util::future::try_join_all;
use tokio_postgres::Client;

use super::sql::{CONNECTIONS, Database, NAP};
use crate::messages::{Messages, Seen};
use crate::peer::{Peer, Processes, SENDERS};
use crate::place::{Place, connect};

const BATCH: usize = 500;
const READ: i32 = 1_000;
/// Seconds until a message that was read is shown again.
const HIDDEN: i32 = 60;

pub(crate) struct Pgmq {
    database: Database,
}

pub(crate) async fn open(place: Arc<Place>) -> Result<Box<dyn Peer>> {
    let database = Database::create(place, "pgmq").await?;
    let installer = pgmq::PGMQueueExt::new(database.url.clone(), 1).await?;
    installer.install_sql_from_embedded().await?;
    installer.connection.close().await;
    Ok(Box::new(Pgmq { database }))
}

#[async_trait]
impl Peer for Pgmq {
    fn settings(&self) -> Vec<String> {
        vec![
            "the SQL of its crate 0.33.7; its functions called through tokio-postgres".into(),
            format!("produce: pgmq.send_batch of {BATCH}, {CONNECTIONS} connections"),
            format!("send: pgmq.send from each of {SENDERS} connections"),
            format!(
                "consume: {CONNECTIONS} workers: pgmq.read of {READ}, then pgmq.delete of all; delete \
                 instead of archive favours it"
            ),
        ]
    }

    fn processes(&self) -> Processes {
        self.database.processes()
    }

    async fn fresh(&mut self) -> Result<()> {
        connect(&self.database.url).await?.query("SELECT pgmq.create('bench')", &[]).await?;
        self.database.open_connections().await
    }

    async fn rest(&mut self) -> Result<()> {
        self.database.close_connections();
        connect(&self.database.url).await?.query("SELECT pgmq.drop_queue('bench')", &[]).await?;
        Ok(())
    }

    async fn produce(&self, messages: Messages) -> Result<()> {
        let send = "SELECT pgmq.send_batch('bench', $1::text[]::jsonb[])";
        self.database.produce(messages, BATCH, send).await
    }

    async fn send(&self, messages: Messages) -> Result<()> {
        self.database.send(messages, "SELECT pgmq.send('bench', $1::text::jsonb)").await
    }

    async fn consume(&self, seen: Arc<Seen>) -> Result<()> {
        let workers = self.database.workers().into_iter();
        try_join_all(workers.map(|db| tokio::spawn(work(db, seen.clone()))))
            .await?
            .into_iter()
            .collect()
    }
}

async fn work(db: Arc<Client>, seen: Arc<Seen>) -> Result<()> {
    let read = db.prepare("SELECT msg_id, message::text FROM pgmq.read('bench', $1, $2)").await?;
    let delete = db.prepare("SELECT count(*) FROM pgmq.delete('bench', $1::bigint[])").await?;
    while !seen.is_complete() {
        let messages = db.query(&read, &[&HIDDEN, &READ]).await?;
        if messages.is_empty() {
            tokio::time::sleep(NAP).await;
            continue;
        }
        let ids = messages.iter().map(|message| message.get(0)).collect::<Vec<i64>>();
        db.query_one(&delete, &[&ids]).await?;
        for message in &messages {
            seen.payload(message.get::<_, &str>(1).as_bytes());
        }
    }
    Ok(())
}
