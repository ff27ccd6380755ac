//! PgQ: Debian's package, loaded without an extension.

use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use async_trait::async_trait;
use bytes::{BufMut, Bytes, BytesMut};
use futures_util::SinkExt as _;
use futures_util::future::try_join_all;

use super::sql::{CONNECTIONS, Database};
use crate::messages::{Messages, Seen};
use crate::peer::{Peer, Processes, SENDERS};
use crate::place::{Place, connect};

const BATCH: usize = 1_000;
/// How many events of a batch are fetched at once.
const FETCH: usize = 5_000;
/// How often the queue is cut into batches. Its own daemon does it once a second at most.
const TICK: Duration = Duration::from_millis(50);

pub(crate) struct Pgq {
    database: Database,
}

pub(crate) async fn open(place: Arc<Place>) -> Result<Box<dyn Peer>> {
    let major = place.cluster.major();
    let script = place.tool(&format!("usr/share/postgresql/{major}/contrib/pgq.sql"))?;
    let sql = std::fs::read_to_string(script).context("could not read pgq.sql")?;
    // The server may not be able to enter the folder that they are in.
    let folder = place.folder("pgq")?;
    for library in ["pgq_lowlevel", "pgq_triggers"] {
        let from = place.tool(&format!("usr/lib/postgresql/{major}/lib/{library}.so"))?;
        std::fs::copy(from, folder.join(library).with_extension("so"))?;
    }
    let database = Database::create(place, "pgq").await?;
    let db = connect(&database.url).await?;
    db.batch_execute(&with_libraries_in(&folder, &sql)).await.context("could not load pgq.sql")?;
    Ok(Box::new(Pgq { database }))
}

fn with_libraries_in(folder: &Path, sql: &str) -> String {
    sql.replace("$libdir", &folder.display().to_string())
}

#[async_trait]
impl Peer for Pgq {
    fn settings(&self) -> Vec<String> {
        vec![
            format!("Debian's pgq3; a tick every {TICK:?} by this program instead of pgqd's 1 s"),
            format!(
                "produce: COPY into the current table, {BATCH} a commit, {CONNECTIONS} connections"
            ),
            format!("send: pgq.insert_event from each of {SENDERS} connections"),
            format!(
                "consume: one consumer, as it has it: next_batch, get_batch_cursor of {FETCH}, \
                 finish_batch"
            ),
        ]
    }

    fn processes(&self) -> Processes {
        self.database.processes()
    }

    async fn fresh(&mut self) -> Result<()> {
        let db = connect(&self.database.url).await?;
        db.batch_execute(
            "SELECT pgq.create_queue('bench');
             SELECT pgq.set_queue_config('bench', 'ticker_max_lag', '0');
             SELECT pgq.set_queue_config('bench', 'ticker_idle_period', '0');
             SELECT pgq.set_queue_config('bench', 'ticker_max_count', '1');
             SELECT pgq.register_consumer('bench', 'reader')",
        )
        .await?;
        self.database.open_connections().await
    }

    async fn rest(&mut self) -> Result<()> {
        self.database.close_connections();
        let db = connect(&self.database.url).await?;
        Ok(db.batch_execute("SELECT pgq.drop_queue('bench', true)").await?)
    }

    async fn produce(&self, messages: Messages) -> Result<()> {
        let parts = messages.split(CONNECTIONS);
        let parts = self.database.producers(CONNECTIONS).into_iter().zip(parts);
        let parts = parts.map(|(db, part)| {
            tokio::spawn(async move {
                let table = db.query_one("SELECT pgq.current_event_table('bench')", &[]).await?;
                let table: &str = table.get(0);
                // The id is the column's default.
                let copy = format!("COPY {table} (ev_time, ev_type, ev_data) FROM STDIN");
                for batch in part.batches(BATCH) {
                    let mut sink = pin!(db.copy_in::<_, Bytes>(&copy).await?);
                    sink.send(lines(&batch)).await?;
                    sink.finish().await?;
                }
                anyhow::Ok(())
            })
        });
        try_join_all(parts).await?.into_iter().collect()
    }

    async fn send(&self, messages: Messages) -> Result<()> {
        self.database.send(messages, "SELECT pgq.insert_event('bench', 'bench', $1)").await
    }

    async fn consume(&self, seen: Arc<Seen>) -> Result<()> {
        tokio::try_join!(self.tick(&seen), self.read(&seen)).map(drop)
    }
}

impl Pgq {
    /// Cuts the queue into batches until all is read.
    async fn tick(&self, seen: &Seen) -> Result<()> {
        let db = &self.database.workers()[1];
        let tick = db.prepare("SELECT pgq.ticker('bench')").await?;
        while !seen.is_complete() {
            db.query(&tick, &[]).await?;
            tokio::time::sleep(TICK).await;
        }
        Ok(())
    }

    async fn read(&self, seen: &Seen) -> Result<()> {
        let db = &self.database.workers()[0];
        let next = db.prepare("SELECT pgq.next_batch('bench', 'reader')").await?;
        // It can return rows by itself, too, which is slower than FETCH.
        let open = db.prepare("SELECT pgq.get_batch_cursor($1, 'events', 0)").await?;
        let finish = db.prepare("SELECT pgq.finish_batch($1)").await?;
        let fetch = format!("FETCH {FETCH} FROM events");
        while !seen.is_complete() {
            let Some(batch) = db.query_one(&next, &[]).await?.get::<_, Option<i64>>(0) else {
                tokio::time::sleep(TICK / 10).await;
                continue;
            };
            db.batch_execute("BEGIN").await?;
            db.query(&open, &[&batch]).await?;
            let mut events = Vec::new();
            loop {
                let fetched = db.query(&fetch, &[]).await?;
                let last = fetched.len() < FETCH;
                events.extend(fetched);
                if last {
                    break;
                }
            }
            db.query(&finish, &[&batch]).await?;
            db.batch_execute("COMMIT").await?;
            for event in &events {
                seen.payload(event.get::<_, &str>("ev_data").as_bytes());
            }
        }
        Ok(())
    }
}

/// The text form of COPY. Payloads hold neither backslashes, tabs nor line ends.
fn lines(batch: &[String]) -> Bytes {
    let mut lines = BytesMut::with_capacity(batch.iter().map(|payload| payload.len() + 16).sum());
    for payload in batch {
        lines.put(&b"now\tbench\t"[..]);
        lines.put(payload.as_bytes());
        lines.put_u8(b'\n');
    }
    lines.freeze()
}
