//! The transaction in which a handler's writes and the settling of its message commit together.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use deadpool_postgres::Object;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::timeout;
use tokio_postgres::types::ToSql;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::held::Source;
use super::protocol::{ANSWER, Protocol};
use crate::client::run;
use crate::error::{Error, Result};
use crate::wake::jittered;

const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED";
/// The pause between two looks at what became of a commit, growing from the first to the second.
const AGAIN: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// An open transaction, handed to a handler by [`run_transactional`](crate::ConsumerBuilder::run_transactional).
///
/// It can be used as a [`tokio_postgres::Client`], and messages can be sent in it ([`Stream::send_in`](crate::Stream::send_in)).
/// It commits by itself after the handler has returned `Ok`, together with the settling of the message, and rolls back
/// otherwise. It is READ COMMITTED. Do not commit or roll back yourself; savepoints are fine.
#[derive(Debug)]
pub struct Transaction {
    connection: Arc<Object>,
}

impl Deref for Transaction {
    type Target = tokio_postgres::Client;

    fn deref(&self) -> &tokio_postgres::Client {
        &self.connection
    }
}

/// Our side of it. Dropped, the connection is closed, and with it the transaction.
pub(crate) struct Open {
    connection: Option<Arc<Object>>,
    _permit: Option<OwnedSemaphorePermit>,
}

/// How the attempt to settle and commit ended.
pub(crate) enum Committed {
    Yes,
    /// The messages belong to somebody else now.
    Lost,
    /// These have to be handled again; the others are settled, by this transaction or before.
    Unsettled(Vec<i64>),
    /// Rolled back, for this reason.
    No(Error),
}

impl Open {
    /// Begins one, as soon as a connection is to be had.
    pub(crate) async fn begin(protocol: &Protocol) -> Result<Self> {
        let doing = "begin a handler's transaction";
        let client = &protocol.stream.client;
        // Closed never.
        let permit = client.inner.transactions.clone().acquire_owned().await.ok();
        let connection = client.connection(doing).await?;
        let open = Self { connection: Some(Arc::new(connection)), _permit: permit };
        open.execute(BEGIN, doing).await?;
        Ok(open)
    }

    /// For the handler.
    pub(crate) fn transaction(&self) -> Option<Transaction> {
        self.connection.clone().map(|connection| Transaction { connection })
    }

    pub(crate) async fn roll_back(mut self) {
        let done = self.execute("ROLLBACK", "roll a handler's transaction back").await;
        if done.is_ok() {
            self.give_back();
        }
    }

    /// Settles messages that came from one source each and commits.
    pub(crate) async fn commit(
        mut self,
        protocol: &Protocol,
        messages: &[(Source, Vec<i64>)],
        over: &CancellationToken,
    ) -> Committed {
        // A handler that has kept the transaction may be writing to it still.
        if self.connection.as_ref().is_none_or(|shared| Arc::strong_count(shared) > 1) {
            self.roll_back().await;
            return Committed::No(Error::kept_transaction());
        }
        match self.settle_and_commit(protocol, messages).await {
            Ok(()) => {
                self.give_back();
                Committed::Yes
            }
            Err(error) => match error.sql_state() {
                Some("SQ008") => {
                    self.give_back();
                    Committed::Lost
                }
                Some("SQ009") => {
                    self.give_back();
                    look(protocol, messages, over).await
                }
                Some(_) if !error.is_of_connection() => {
                    // The COMMIT that followed has rolled back.
                    self.give_back();
                    Committed::No(error)
                }
                _ => {
                    drop(self);
                    tracing::info!(
                        error = &error as &dyn std::error::Error,
                        "a handler's commit got no answer; looking what became of it"
                    );
                    look(protocol, messages, over).await
                }
            },
        }
    }

    /// In one write: a settle that fails makes the commit a rollback.
    async fn settle_and_commit(
        &self,
        protocol: &Protocol,
        messages: &[(Source, Vec<i64>)],
    ) -> Result<()> {
        let doing = "commit a handler's transaction";
        let Some(connection) = &self.connection else { return Ok(()) };
        let settle = &protocol.stream.client.inner.queries.settle_in_transaction;
        let work = async {
            let (last, others) = match messages.split_last() {
                Some(split) => split,
                None => return connection.batch_execute("COMMIT").await,
            };
            for (source, ids) in others {
                let (token, exceptions) = proof(*source);
                run(
                    connection,
                    settle,
                    &[&protocol.stream.id, &protocol.group, &token, ids, &exceptions],
                )
                .await?;
            }
            let (token, exceptions) = proof(last.0);
            let params: [&(dyn ToSql + Sync); 5] =
                [&protocol.stream.id, &protocol.group, &token, &last.1, &exceptions];
            let settled = run(connection, settle, &params);
            let (settled, committed) =
                futures_util::future::join(settled, connection.batch_execute("COMMIT")).await;
            settled.and(committed)
        };
        match timeout(ANSWER, work).await {
            Ok(result) => result.map_err(|e| Error::from_driver(e, doing)),
            Err(_) => Err(Error::no_answer(doing, ANSWER)),
        }
    }

    async fn execute(&self, sql: &str, doing: &str) -> Result<()> {
        let Some(connection) = &self.connection else { return Ok(()) };
        match timeout(ANSWER, connection.batch_execute(sql)).await {
            Ok(result) => result.map_err(|e| Error::from_driver(e, doing)),
            Err(_) => Err(Error::no_answer(doing, ANSWER)),
        }
    }

    /// No transaction is open on it any more: others may use the connection.
    fn give_back(&mut self) {
        self.connection = None;
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        // Whoever else holds the connection puts it back when done: nothing but the handler can, and that is gone or at fault.
        if let Some(connection) = self.connection.take().and_then(Arc::into_inner) {
            drop(Object::take(connection));
        }
    }
}

/// What became of messages whose commit got no answer, until that is known or the messages are not ours any more.
async fn look(
    protocol: &Protocol,
    messages: &[(Source, Vec<i64>)],
    over: &CancellationToken,
) -> Committed {
    let mut pause = AGAIN.0;
    loop {
        let mut unsettled = Ok(Vec::new());
        for (source, ids) in messages {
            let (token, exceptions) = proof(*source);
            match (protocol.unsettled(token, ids, exceptions).await, &mut unsettled) {
                (Ok(some), Ok(all)) => all.extend(some),
                (Err(error), all) => *all = Err(error),
                (Ok(_), Err(_)) => {}
            }
        }
        match unsettled {
            Ok(ids) if ids.is_empty() => return Committed::Yes,
            Ok(ids) => return Committed::Unsettled(ids),
            Err(error) => {
                tracing::debug!(
                    error = &error as &dyn std::error::Error,
                    "could not look what was settled"
                )
            }
        }
        tokio::select! {
            () = over.cancelled() => return Committed::Lost,
            () = tokio::time::sleep(jittered(pause)) => {}
        }
        pause = (pause * 2).min(AGAIN.1);
    }
}

/// What proves that messages are ours, and whether they are exceptions.
fn proof(source: Source) -> (Uuid, bool) {
    match source {
        Source::Lease(token) => (token, false),
        Source::Exception(token) => (token, true),
    }
}
