//! The transaction in which a handler's writes and the settling of its message commit together.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use deadpool_postgres::Object;
use futures_util::FutureExt;
use futures_util::future::{join, join_all};
use tokio_postgres::types::ToSql;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::handler_pool::HandlerPool;
use super::held::Source;
use super::protocol::{ANSWER, Protocol};
use crate::backoff::Backoff;
use crate::client::{answered, run};
use crate::error::{Error, Result};

/// The mark is gone when the handler ends the transaction: settling refuses to go on in another one.
const BEGIN: &str =
    "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL sqlstreams.transaction = 'lent'";
const MARK: &str = "lent";
const COMMIT_AND_BEGIN: &str =
    "COMMIT; BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL sqlstreams.transaction = 'lent'";
/// Ends a transaction that somebody still uses: what they send after this finds no connection.
const HANG_UP: &str = "ROLLBACK; SELECT pg_terminate_backend(pg_backend_pid())";
/// The pause between two looks at what became of a commit, growing from the first to the second.
const AGAIN: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// An open transaction, handed to a handler by [`run_transactional`](crate::ConsumerBuilder::run_transactional).
///
/// It can be used as a [`tokio_postgres::Client`], and messages can be sent in it ([`Stream::send_in`](crate::Stream::send_in)).
/// It commits by itself after the handler has returned `Ok`, together with the settling of the message, and rolls back
/// otherwise. It is READ COMMITTED: settling refuses anything else, and what was refused is rolled back and tried again. Do not
/// commit or roll back yourself; savepoints are fine. What still uses it when the handler has returned, or was dropped, finds
/// the connection closed.
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
        let connection = HandlerPool::get(client, doing).await?;
        let open = Self { connection: Some(Arc::new(connection)) };
        open.execute(BEGIN, doing).await?;
        Ok(open)
    }

    /// For the handler.
    pub(crate) fn transaction(&self) -> Option<Transaction> {
        self.connection.clone().map(|connection| Transaction { connection })
    }

    pub(crate) async fn roll_back(self) {
        if self.is_kept() {
            return;
        }
        let done = self.execute("ROLLBACK", "roll a handler's transaction back").await;
        if done.is_ok() {
            self.go_on(false);
        }
    }

    /// Settles messages that came from one source each and commits. With `more` messages to come, and nobody who waits for the
    /// connection, it begins the next transaction in the same write and returns that.
    pub(crate) async fn commit(
        self,
        protocol: &Protocol,
        messages: &[(Source, Vec<i64>)],
        over: &CancellationToken,
        more: bool,
    ) -> (Committed, Option<Self>) {
        if self.is_kept() {
            return (Committed::No(Error::kept_transaction()), None);
        }
        let more = more && !protocol.stream.client.inner.handler_pool.is_waited_for();
        let (settled, begun) = self.settle_and_commit(protocol, messages, more).await;
        let error = match settled {
            Ok(()) => return (Committed::Yes, self.go_on(begun)),
            Err(error) => error,
        };
        // The COMMIT that followed has rolled back.
        match error.sql_state() {
            Some("SQ008") => (Committed::Lost, self.go_on(begun)),
            Some("SQ009") => {
                if let Some(open) = self.go_on(begun) {
                    open.roll_back().await;
                }
                (look(protocol, messages, over).await, None)
            }
            Some(_) if !error.is_of_connection() => (Committed::No(error), self.go_on(begun)),
            _ => {
                drop(self);
                tracing::info!(
                    error = &error as &dyn std::error::Error,
                    "a handler's commit got no answer; looking what became of it"
                );
                (look(protocol, messages, over).await, None)
            }
        }
    }

    /// In one write: a settle that fails makes the commit a rollback. The second says whether another transaction has begun.
    async fn settle_and_commit(
        &self,
        protocol: &Protocol,
        messages: &[(Source, Vec<i64>)],
        more: bool,
    ) -> (Result<()>, bool) {
        let doing = "commit a handler's transaction";
        let Some(connection) = &self.connection else { return (Ok(()), false) };
        let settles =
            messages.iter().map(|(source, ids)| settle(connection, protocol, *source, ids));
        let end = if more { COMMIT_AND_BEGIN } else { "COMMIT" };
        let mut begun = false;
        let work = async {
            let (settled, ended) = join(join_all(settles), connection.batch_execute(end)).await;
            begun = more && ended.is_ok();
            // The first error is the reason for the others.
            settled.into_iter().collect::<Result<Vec<_>, _>>().and(ended)
        };
        let settled = answered(ANSWER, work, doing).await;
        (settled, begun)
    }

    /// After a commit or a rollback: with the transaction that has begun behind it, if one has.
    fn go_on(mut self, begun: bool) -> Option<Self> {
        if begun {
            return Some(self);
        }
        // Others may use the connection.
        self.connection = None;
        None
    }

    async fn execute(&self, sql: &str, doing: &str) -> Result<()> {
        let Some(connection) = &self.connection else { return Ok(()) };
        answered(ANSWER, connection.batch_execute(sql), doing).await
    }

    /// Whether the handler, or something it has started, may be writing still.
    fn is_kept(&self) -> bool {
        self.connection.as_ref().is_none_or(|c| Arc::strong_count(c) > 1)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        match self.connection.take().map(Arc::try_unwrap) {
            None => {}
            Some(Ok(connection)) => drop(Object::take(connection)),
            // On its way at the first poll, before whatever the others send from now on.
            Some(Err(kept)) => {
                let _ = kept.batch_execute(HANG_UP).now_or_never();
            }
        }
    }
}

/// Settles messages that came from one source in the transaction that is open.
async fn settle(
    connection: &tokio_postgres::Client,
    protocol: &Protocol,
    source: Source,
    ids: &[i64],
) -> Result<(), tokio_postgres::Error> {
    let Protocol { stream, group } = protocol;
    match (source, ids) {
        // Mostly one message, in every handler's transaction: that has to be cheap.
        (Source::Lease { token, seq }, [id]) => {
            let params: [&(dyn ToSql + Sync); 5] = [group, &seq, &token, id, &MARK];
            run(connection, &stream.queries.settle_message, &params).await.map(drop)
        }
        _ => {
            let (token, exceptions) = proof(source);
            let query = &stream.client.inner.queries.settle_in_transaction;
            let params: [&(dyn ToSql + Sync); 6] =
                [&stream.id, group, &token, &ids, &exceptions, &MARK];
            run(connection, query, &params).await.map(drop)
        }
    }
}

/// What became of messages whose commit got no answer, until that is known or the messages are not ours any more.
async fn look(
    protocol: &Protocol,
    messages: &[(Source, Vec<i64>)],
    over: &CancellationToken,
) -> Committed {
    let mut backoff = Backoff::new(AGAIN);
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
            () = tokio::time::sleep(backoff.pause()) => {}
        }
    }
}

/// What proves that messages are ours, and whether they are exceptions.
fn proof(source: Source) -> (Uuid, bool) {
    match source {
        Source::Lease { token, .. } => (token, false),
        Source::Exception(token) => (token, true),
    }
}
