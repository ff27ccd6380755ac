//! The transaction in which a handler's writes and the settling of its message commit together.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{join, join_all};
use tokio::time::timeout;
use tokio_postgres::types::ToSql;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::held::Source;
use super::protocol::{ANSWER, Protocol};
use crate::backoff::Backoff;
use crate::client::{answered, run};
use crate::error::{Error, ErrorKind, Result};
use crate::pool::Pooled;

/// The mark is gone when the handler ends the transaction: settling refuses to go on in another one.
macro_rules! begin {
    () => {
        "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; SET LOCAL sqlstreams.transaction = 'lent'"
    };
}
const BEGIN: &str = begin!();
const MARK: &str = "lent";
const COMMIT_AND_BEGIN: &str = concat!("COMMIT; ", begin!());
/// How long a rollback is waited for, behind what the handler may have left running.
const ROLLED_BACK: Duration = Duration::from_secs(1);
/// The pause between two looks at what became of a commit, growing from the first to the second.
const AGAIN: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// An open transaction, handed to a handler by [`run_transactional`](crate::ConsumerBuilder::run_transactional).
///
/// It can be used as a [`tokio_postgres::Client`], and messages can be sent in it ([`Stream::send_in`](crate::Stream::send_in)).
/// It commits by itself after the handler has returned `Ok`, together with the settling of the message, and rolls back
/// otherwise. It is READ COMMITTED: settling refuses anything else, and what was refused is rolled back and tried again. Do not
/// commit or roll back yourself; savepoints are fine. What still uses it when the handler has returned, or was dropped, finds
/// the connection closed, and what it has running is cancelled.
///
/// The connection serves other messages afterwards. So say `SET LOCAL` and `pg_advisory_xact_lock`: a plain `SET`, a session's
/// advisory lock or a temporary table without `ON COMMIT DROP` would be there for them, too.
#[derive(Debug)]
pub struct Transaction {
    connection: Arc<tokio_postgres::Client>,
}

impl Deref for Transaction {
    type Target = tokio_postgres::Client;

    fn deref(&self) -> &tokio_postgres::Client {
        &self.connection
    }
}

/// Our side of it. Dropped, the connection is closed, whatever runs on it and whoever has it, and with it the transaction.
pub(crate) struct Open {
    connection: Option<Pooled>,
}

/// How the attempt to settle and commit ended.
pub(crate) enum Committed {
    Yes,
    /// Rolled back: an earlier handler has settled all of them.
    Before,
    /// The messages belong to somebody else now.
    Lost,
    /// These have to be handled again, for this reason; the others are settled, by this transaction or before.
    Unsettled(Vec<i64>, Error),
    /// Rolled back, as the connection broke before the commit.
    Broken(Error),
    /// Rolled back, for this reason, which is the handler's doing.
    No(Error),
}

impl Open {
    /// Begins one, as soon as a connection is to be had.
    pub(crate) async fn begin(protocol: &Protocol) -> Result<Self> {
        let client = &protocol.stream.client;
        let open = Self { connection: Some(client.inner.pool.get_for_handler().await?) };
        let begun = open.execute(BEGIN, "begin a handler's transaction").await;
        if begun.as_ref().is_err_and(Error::is_of_connection) {
            client.forget_idle_connections();
        }
        begun.map(|()| open)
    }

    /// For the handler.
    pub(crate) fn transaction(&self) -> Option<Transaction> {
        self.connection.as_ref().map(|connection| Transaction { connection: connection.share() })
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.connection.as_ref().is_none_or(|connection| connection.is_closed())
    }

    /// Rolls back what a handler has done. An error says that its connection broke, so that it could not do better.
    pub(crate) async fn roll_back(mut self) -> Result<()> {
        self.look_for_breakage()?;
        let Some(connection) = &self.connection else { return Ok(()) };
        if connection.is_shared() {
            return Ok(());
        }
        let doing = "roll a handler's transaction back";
        // Without an answer something still runs there, which is cancelled when this is dropped.
        match timeout(ROLLED_BACK, connection.batch_execute("ROLLBACK")).await {
            Ok(Ok(())) => self.connection = None,
            Ok(Err(error)) => {
                let error = Error::from_driver(error, doing);
                if error.is_of_connection() {
                    return Err(error);
                }
            }
            Err(_) => {}
        }
        Ok(())
    }

    /// Without a handler having used it.
    pub(crate) async fn give_back(self) {
        if let Err(error) = self.roll_back().await {
            tracing::debug!(
                error = &error as &dyn std::error::Error,
                "lost a connection on which nothing was done"
            );
        }
    }

    /// An error says that the connection is closed, and why.
    pub(crate) fn look_for_breakage(&mut self) -> Result<()> {
        let Some(closed) = self.connection.take_if(|connection| connection.is_closed()) else {
            return Ok(());
        };
        let doing = "run a handler's transaction";
        Err(match closed.reason() {
            Some(reason) => Error::from_driver(reason, doing),
            None => {
                let text = format!("the connection broke while trying to {doing}");
                Error::new(ErrorKind::Connection, text)
            }
        })
    }

    /// Settles messages that came from one source each and commits. With `more` messages to come, and nobody who waits for the
    /// connection, it begins the next transaction in the same write and returns that.
    pub(crate) async fn commit(
        mut self,
        protocol: &Protocol,
        messages: &[(Source, Vec<i64>)],
        over: &CancellationToken,
        more: bool,
    ) -> (Committed, Option<Self>) {
        if let Err(error) = self.look_for_breakage() {
            return (Committed::not(error), None);
        }
        if self.connection.as_ref().is_none_or(Pooled::is_shared) {
            return (Committed::No(Error::kept_transaction()), None);
        }
        let more = more && !protocol.stream.client.inner.pool.is_waited_for();
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
                    open.give_back().await;
                }
                let found = look(protocol, messages, over, error).await;
                (if matches!(found, Committed::Yes) { Committed::Before } else { found }, None)
            }
            Some(_) if !error.is_of_connection() || is_of_handler(&error) => {
                (Committed::No(error), self.go_on(begun))
            }
            _ => {
                drop(self);
                tracing::info!(
                    error = &error as &dyn std::error::Error,
                    "a handler's commit got no answer; looking what became of it"
                );
                (look(protocol, messages, over, error).await, None)
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
}

impl Committed {
    /// The connection broke before the commit was sent.
    fn not(error: Error) -> Self {
        match is_of_handler(&error) {
            true => Self::No(error),
            false => Self::Broken(error),
        }
    }
}

/// Whether trouble with the connection was the handler's own doing: it sat still for longer than the server lets it, or has
/// made the transaction read-only.
pub(crate) fn is_of_handler(error: &Error) -> bool {
    matches!(error.sql_state(), Some("25P03" | "25006"))
}

impl Drop for Open {
    fn drop(&mut self) {
        if let Some(connection) = self.connection.take() {
            connection.abandon();
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
    reason: Error,
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
            Ok(ids) => return Committed::Unsettled(ids, reason),
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
