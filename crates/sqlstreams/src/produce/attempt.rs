//! One attempt at a batch: a connection, a transaction, the inserts, the commit.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join;
use tokio_postgres::error::{Severity, SqlState};

use super::commit::{self, Committed, Transaction};
use super::connection::Borrowed;
use super::executor::{Batch, Inserted, Written, complete};
use super::receipt::Receipt;
use crate::client::within;
use crate::error::{Error, ErrorKind, Result};
use crate::message::Encoded;
use crate::stream::StreamInner;

/// For errors.
pub(super) const DOING: &str = "produce";

/// A statement that is not answered for so long is given up. One that waits for a lock may well take long.
pub(super) const INSERT_LIMIT: Duration = Duration::from_secs(60);

/// Unlike `BEGIN` this one ends by itself when its client does not go on with it, frozen perhaps or behind a dead network:
/// as long as it is open no message that came later is delivered. A plan for these very payloads would hold copies of them all.
const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL idle_in_transaction_session_timeout = '15s'; SET LOCAL plan_cache_mode = force_generic_plan";

/// The pause before something is tried again, growing from the first to the second.
pub(super) const AGAIN: (Duration, Duration) =
    (Duration::from_millis(10), Duration::from_millis(500));

/// Nothing was stored, but for `Other` that says [`CommitUnknown`](ErrorKind::CommitUnknown).
pub(super) enum Failure {
    OutOfPartitions(tokio_postgres::Error),
    /// The connection broke, none came about, or the server takes no writes at present.
    Trouble(Error),
    /// The commit did not get through, or the server ended the transaction in favour of another.
    Lost(Error),
    Other(Error),
}

/// Inserts the parts of a batch, one statement each, and commits. Returns what became of each message, in order.
pub(super) async fn attempt(
    stream: &Arc<StreamInner>,
    parts: impl Iterator<Item = (usize, &[Encoded])>,
) -> Result<Vec<Receipt>, Failure> {
    let connection = Borrowed::take(&stream.client, DOING).await.map_err(trouble)?;
    let (transaction, receipts) = match write(&connection, stream, parts).await {
        Ok(written) => written,
        Err(failure) => {
            if !matches!(failure, Failure::Trouble(_)) {
                connection.roll_back().await;
            }
            return Err(failure);
        }
    };
    match commit::commit(connection, stream, &transaction).await.map_err(Failure::Other)? {
        Committed::Stored => Ok(receipts),
        Committed::Lost(error) => Err(Failure::Lost(error)),
    }
}

/// Begins a transaction and inserts the messages.
async fn write(
    connection: &tokio_postgres::Client,
    stream: &Arc<StreamInner>,
    parts: impl Iterator<Item = (usize, &[Encoded])>,
) -> Result<(Transaction, Vec<Receipt>), Failure> {
    let mut batches = parts.map(|(_, messages)| Batch { stream, messages });
    let first = batches.next().unwrap_or(Batch { stream, messages: &[] });
    // In one write, in this order.
    let mut sent = first.messages.len();
    let answers = join(connection.batch_execute(BEGIN), first.insert(connection));
    let (begun, inserted) = within(INSERT_LIMIT, answers, DOING).await.map_err(Failure::Trouble)?;
    if begun.as_ref().is_err_and(refused) && !inserted.as_ref().is_err_and(refused) {
        let text = "BEGIN was cancelled, and the messages may have been committed without it";
        return Err(Failure::Other(commit::unknown(text)));
    }
    let Inserted { mut written, transaction } = begun.and(inserted).map_err(failure)?;
    for batch in batches {
        sent += batch.messages.len();
        let more = within(INSERT_LIMIT, batch.insert(connection), DOING).await;
        written.extend(more.map_err(Failure::Trouble)?.map_err(failure)?.written);
    }
    complete(sent, written.len()).map_err(Failure::Other)?;
    match transaction {
        Some((xid, pid)) => {
            let receipts = written.iter().map(|written| written.receipt).collect();
            // What others have stored says nothing about this transaction.
            let written = written.into_iter().filter(|w: &Written| !w.receipt.is_duplicate());
            let (delayed, written) = written.partition(|w| w.receipt.delayed);
            let transaction = Transaction { xid, pid, written, delayed };
            Ok((transaction, receipts))
        }
        None => Err(Failure::Other(Error::new(ErrorKind::Database, "the transaction has no id"))),
    }
}

/// Whether it was the server that said no. A BEGIN that it refused would leave the insert to commit by itself.
pub(super) fn refused(error: &tokio_postgres::Error) -> bool {
    error.as_db_error().is_some_and(|db| db.parsed_severity() == Some(Severity::Error))
}

fn failure(error: tokio_postgres::Error) -> Failure {
    let db = error.as_db_error();
    // A check violation without a constraint is a row that no partition takes. (The text may be in any language.)
    if db.is_some_and(|db| *db.code() == SqlState::CHECK_VIOLATION && db.constraint().is_none()) {
        return Failure::OutOfPartitions(error);
    }
    // Large batches with the same keys, or a server that is stricter by default.
    let again = [SqlState::T_R_DEADLOCK_DETECTED, SqlState::T_R_SERIALIZATION_FAILURE];
    if db.is_some_and(|db| again.contains(db.code())) {
        return Failure::Lost(Error::from_driver(error, DOING));
    }
    let gone = [SqlState::UNDEFINED_TABLE, SqlState::UNDEFINED_FUNCTION];
    if db.is_some_and(|db| gone.contains(db.code())) {
        let gone =
            Error::new(ErrorKind::UnknownStream, "the stream was dropped").with_source(error);
        return Failure::Other(gone);
    }
    trouble(Error::from_driver(error, DOING))
}

/// A read-only server may be one that another takes over from. A login that is refused will be refused again.
pub(super) fn trouble(error: Error) -> Failure {
    let refused = error
        .sql_state()
        .is_some_and(|state| ["28", "3D", "42"].iter().any(|class| state.starts_with(class)));
    match error.kind() {
        ErrorKind::Connection | ErrorKind::ReadOnly if !refused => Failure::Trouble(error),
        _ => Failure::Other(error),
    }
}
