//! The client's own connection, beside the pool: it listens, carries the lock that shows the process alive, and is used for
//! what must not wait for a pool that others use up: looks and heartbeats.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures_util::future::poll_fn;
use tokio::sync::Notify;
use tokio::time::timeout;
use tokio_postgres::AsyncMessage;
use tokio_postgres::types::ToSql;
use tokio_postgres::{Client as PgClient, Row};

use crate::client::{Client, SOON, answered, run, transact};
use crate::connect::Driver;
use crate::error::{Error, ErrorKind, Result};
use crate::queries::Query;

/// How long the look at the own lock may take.
const PROOF: Duration = Duration::from_secs(2);
/// So many looks prove that it lasts. Traffic of others may make one of them come out well behind a pooler.
const PROOFS: usize = 3;
/// A session of which it could not be told whether it lasts is replaced after so long.
const UNSURE: Duration = Duration::from_secs(60);
/// How long a process must have held its lock before it may judge others.
const SETTLED: Duration = Duration::from_secs(5);

/// What keeps a session of ours alive and tells of its end early. Not every platform and transport has all of them.
const SETTINGS: &[&str] = &[
    "SET idle_session_timeout = 0",
    "SET idle_in_transaction_session_timeout = 0",
    "SET statement_timeout = 0",
    "SET client_connection_check_interval = '500ms'",
    "SET tcp_keepalives_idle = 10",
    "SET tcp_keepalives_interval = 3",
    "SET tcp_keepalives_count = 3",
    "SET tcp_user_timeout = '20s'",
];

/// The streams that were rung for and not looked at yet. Those of delayed messages, which are rung for when they were sent and are due
/// soon, have the stream's number below zero.
#[derive(Debug, Default)]
pub(crate) struct Rung {
    streams: Mutex<BTreeSet<i64>>,
    pub(crate) news: Notify,
    /// Somebody has rung for 0, which is no stream: a schedule was made or changed.
    pub(super) schedules: Arc<Notify>,
}

impl Rung {
    pub(crate) fn ring(&self, stream: i64) {
        if stream == 0 {
            self.schedules.notify_one();
            return;
        }
        self.lock().insert(stream);
        self.news.notify_one();
    }

    pub(crate) fn take(&self) -> BTreeSet<i64> {
        std::mem::take(&mut *self.lock())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeSet<i64>> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A process as others see it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Life {
    /// The number whose lock the session holds.
    pub(crate) owner: i64,
    /// The server's process. Should another one answer, there is a pooler in between that was not noticed before.
    pub(crate) backend: i32,
    since: Instant,
}

impl Life {
    /// Whether it has lasted long enough to judge others.
    pub(crate) fn may_judge(&self) -> bool {
        self.since.elapsed() >= SETTLED
    }
}

/// An open connection.
#[derive(Debug)]
pub(crate) struct Session {
    connection: PgClient,
    /// `None` behind a transaction pooler, where neither a lock nor a LISTEN lasts.
    pub(crate) life: Option<Life>,
    broken: Arc<AtomicBool>,
    opened: Instant,
}

/// Whether a connection is a session of its own.
enum Proof {
    Own,
    Pooled,
    Unsure,
}

impl Session {
    /// Connects. With `listen` it listens and takes a lock, as far as it proves to be a session of its own.
    pub(crate) async fn open(client: &Client, listen: bool, rung: &Arc<Rung>) -> Result<Self> {
        let inner = &client.inner;
        let (connection, driver) =
            inner.connector.open().await.map_err(|e| Error::from_connect(e, &inner.target))?;
        let broken = Arc::new(AtomicBool::new(false));
        tokio::spawn(drive(driver, Driven { rung: rung.clone(), broken: broken.clone() }));
        let mut session = Self { connection, life: None, broken, opened: Instant::now() };
        if listen {
            session.life = session.prove(client).await?;
        }
        Ok(session)
    }

    /// Takes the lock and listens, and looks whether that lasts.
    async fn prove(&self, client: &Client) -> Result<Option<Life>> {
        let queries = &client.inner.queries;
        let doing = "listen for messages";
        let rows = self.answer(run(&self.connection, &queries.become_owner, &[]), doing).await?;
        let Some(row) = rows.first() else { return Ok(None) };
        let (owner, backend): (i64, i32) = (row.get(0), row.get(1));
        let listen = format!("LISTEN {}", row.get::<_, &str>(2));
        self.answer(self.connection.batch_execute(&listen), doing).await?;

        let mut proof = Proof::Own;
        for _ in 0..PROOFS {
            proof = self.look(client, owner, backend).await?;
            if !matches!(proof, Proof::Own) {
                break;
            }
        }
        if matches!(proof, Proof::Pooled) {
            client.inner.watcher.is_pooled();
        }
        if !matches!(proof, Proof::Own) {
            // Best effort: wherever it is, the lock belongs to nobody.
            let undo = format!(
                "UNLISTEN *; SELECT pg_advisory_unlock_all() WHERE pg_backend_pid() = {backend}"
            );
            let _ = timeout(SOON, self.connection.batch_execute(&undo)).await;
            return Ok(None);
        }
        for setting in SETTINGS {
            if let Err(error) = self.answer(self.connection.batch_execute(setting), doing).await {
                if error.kind() == ErrorKind::Connection {
                    return Err(error);
                }
                tracing::debug!(setting, %error, "not available here");
            }
        }
        Ok(Some(Life { owner, backend, since: Instant::now() }))
    }

    /// A transaction pooler gives an idle server connection away as soon as somebody else wants one: looks whether the lock is
    /// still ours then.
    async fn look(&self, client: &Client, owner: i64, backend: i32) -> Result<Proof> {
        let doing = "listen for messages";
        let other = client.connection(doing).await?;
        if let Err(error) = self.answer(other.batch_execute("BEGIN"), doing).await {
            return client.keep(other, Err(error));
        }
        let params: [&(dyn ToSql + Sync); 2] = [&owner, &backend];
        let is_owner = run(&self.connection, &client.inner.queries.is_owner, &params);
        let proof = match timeout(PROOF, is_owner).await {
            Ok(Ok(rows)) if rows.first().is_some_and(|row| row.get(0)) => Proof::Own,
            Ok(Ok(_)) => Proof::Pooled,
            // No answer: the pooler has only the one connection, which `other` holds, or the server is slow.
            Ok(Err(_)) | Err(_) => Proof::Unsure,
        };
        if self.answer(other.batch_execute("ROLLBACK"), doing).await.is_err() {
            other.close();
        }
        Ok(proof)
    }

    /// One statement by itself, for those that only read.
    pub(crate) async fn read(
        &self,
        query: &Query,
        params: &[&(dyn ToSql + Sync)],
        doing: &str,
    ) -> Result<Vec<Row>> {
        self.answer(run(&self.connection, query, params), doing).await
    }

    /// One statement in a transaction of its own.
    pub(crate) async fn transact(
        &self,
        begin: &str,
        query: &Query,
        params: &[&(dyn ToSql + Sync)],
        doing: &str,
    ) -> Result<Vec<Row>> {
        self.answer(transact(&self.connection, begin, query, params), doing).await
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Acquire)
    }

    /// It turned out not to be what it was taken for.
    pub(crate) fn give_up(&self) {
        self.broken.store(true, Ordering::Release);
    }

    /// Whether another one might well be better: one that lasts.
    pub(crate) fn is_unsure(&self) -> bool {
        self.life.is_none() && self.opened.elapsed() >= UNSURE
    }

    /// Waits for the answer, not for ever; what does not answer, or cannot be written to, is of no use any more.
    async fn answer<T>(
        &self,
        call: impl Future<Output = Result<T, tokio_postgres::Error>>,
        doing: &str,
    ) -> Result<T> {
        let answer = answered(SOON, call, doing).await;
        if answer.as_ref().is_err_and(Error::is_of_connection) {
            self.give_up();
        }
        answer
    }
}

/// Marks a session as broken when the task that drives it ends, however that comes about.
struct Driven {
    rung: Arc<Rung>,
    broken: Arc<AtomicBool>,
}

impl Drop for Driven {
    fn drop(&mut self) {
        self.broken.store(true, Ordering::Release);
        self.rung.news.notify_one();
    }
}

/// Moves the bytes, and tells of rings.
async fn drive(mut driver: Driver, driven: Driven) {
    loop {
        match poll_fn(|cx| driver.poll_message(cx)).await {
            Some(Ok(AsyncMessage::Notification(ring))) => {
                // The payload is a stream's id; what is not one comes from somebody else.
                if let Ok(stream) = ring.payload().parse() {
                    driven.rung.ring(stream);
                }
            }
            Some(Ok(_)) => {}
            Some(Err(error)) => {
                tracing::info!(
                    error = &error as &dyn std::error::Error,
                    "lost the listener's connection"
                );
                break;
            }
            None => break,
        }
    }
}
