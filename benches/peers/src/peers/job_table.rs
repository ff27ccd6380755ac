//! A table of jobs with FOR UPDATE SKIP LOCKED, as it is commonly written.

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

pub(crate) struct JobTable {
    database: Database,
}

pub(crate) async fn open(place: Arc<Place>) -> Result<Box<dyn Peer>> {
    Ok(Box::new(JobTable { database: Database::create(place, "job_table").await? }))
}

#[async_trait]
impl Peer for JobTable {
    fn settings(&self) -> Vec<String> {
        vec![
            "id, json payload, created_at; no state, attempts or due time, which favours it".into(),
            format!("produce: INSERT … SELECT unnest of {BATCH}, {CONNECTIONS} connections"),
            format!("send: a prepared INSERT from each of {SENDERS} connections"),
            format!(
                "consume: {CONNECTIONS} workers: SELECT … FOR UPDATE SKIP LOCKED LIMIT {BATCH}, then \
                 DELETE of all and COMMIT in one round trip"
            ),
        ]
    }

    fn processes(&self) -> Processes {
        self.database.processes()
    }

    async fn fresh(&mut self) -> Result<()> {
        let sql = "DROP TABLE IF EXISTS jobs;
                   CREATE TABLE jobs (id bigserial PRIMARY KEY, payload json NOT NULL,
                                      created_at timestamptz NOT NULL DEFAULT now())";
        connect(&self.database.url).await?.batch_execute(sql).await?;
        self.database.open_connections().await
    }

    async fn rest(&mut self) -> Result<()> {
        self.database.close_connections();
        Ok(connect(&self.database.url).await?.batch_execute("DROP TABLE IF EXISTS jobs").await?)
    }

    async fn produce(&self, messages: Messages) -> Result<()> {
        let insert = "INSERT INTO jobs (payload) SELECT unnest($1::text[])::json";
        self.database.produce(messages, BATCH, insert).await
    }

    async fn send(&self, messages: Messages) -> Result<()> {
        let insert = "INSERT INTO jobs (payload) VALUES ($1::text::json)";
        self.database.send(messages, insert).await
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
    let select = format!(
        "SELECT id, payload::text FROM jobs ORDER BY id FOR UPDATE SKIP LOCKED LIMIT {BATCH}"
    );
    let select = db.prepare(&select).await?;
    let delete = db.prepare("DELETE FROM jobs WHERE id = ANY($1)").await?;
    while !seen.is_complete() {
        // Polled together they travel together, in this order.
        let ((), jobs) = tokio::try_join!(db.batch_execute("BEGIN"), db.query(&select, &[]))?;
        let ids = jobs.iter().map(|job| job.get(0)).collect::<Vec<i64>>();
        if ids.is_empty() {
            db.batch_execute("COMMIT").await?;
            tokio::time::sleep(NAP).await;
            continue;
        }
        let params = [&ids as &(dyn tokio_postgres::types::ToSql + Sync)];
        tokio::try_join!(db.execute(&delete, &params), db.batch_execute("COMMIT"))?;
        // Handled before the commit in truth; counted after it, so that what counts is done.
        for job in &jobs {
            seen.payload(job.get::<_, &str>(1).as_bytes());
        }
    }
    Ok(())
}
