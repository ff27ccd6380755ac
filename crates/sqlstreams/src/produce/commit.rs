//! Committing, and finding out what became of a commit whose answer never came.
//!
//! Invariant: COMMIT is sent only when everything by which the transaction can be recognised has arrived. So a connection
//! that breaks before has stored nothing, and one that breaks later can be asked about (`sql/functions/commit.sql`).

use std::time::{Duration, Instant, SystemTime};

use futures_util::future::join;
use tokio::sync::oneshot;
use tokio_util::task::AbortOnDropHandle;

use super::attempt::{AGAIN, refused};
use super::connection::Borrowed;
use super::executor::Written;
use crate::backoff::Backoff;
use crate::client::{BEGIN, transact, within};
use crate::error::{Error, ErrorKind, Result};
use crate::stream::StreamInner;
use crate::wake::{Bell, Turn};

/// A commit that is not answered for so long is asked about elsewhere.
const COMMIT_LIMIT: Duration = Duration::from_secs(15);
/// A ring, which waits for the commit before it, takes so long at most, or the connection is of no use any more.
const RING_LIMIT: Duration = Duration::from_secs(20);
/// An answer to that question takes so long at most, or the question is asked again.
const RESOLVE_LIMIT: Duration = Duration::from_secs(10);
/// A transaction that still runs so long after its client is gone is ended: its COMMIT may never have arrived.
const TERMINATE_AFTER: Duration = Duration::from_secs(5);
/// So long it is tried to find out.
const GIVE_UP_AFTER: Duration = Duration::from_secs(60);
/// Delayed messages that are due before this are told of.
const SOON: Duration = Duration::from_secs(3);
/// All rows were stored or none, so that a few tell.
const SAMPLE: usize = 1_000;

/// A transaction that was not committed yet, and the messages that it stores.
#[derive(Debug)]
pub(super) struct Transaction {
    pub(super) xid: String,
    pub(super) pid: i32,
    pub(super) written: Vec<Written>,
    /// Those that are not due yet.
    pub(super) delayed: Vec<Written>,
}

impl Transaction {
    /// Consumers look for delayed messages about once a second: what is due sooner is told.
    fn tell_of_delayed(&self, stream: &StreamInner) {
        let due = self.delayed.iter().filter_map(|written| written.delayed).map(|by| by.due_in);
        if due.min().is_some_and(|due| due < SOON) {
            stream.delayed_some();
        }
    }
}

/// How a commit ended, once that is certain.
#[derive(Debug)]
pub(super) enum Committed {
    Stored,
    /// It was lost, for this reason: nothing is stored, nor will be.
    Lost(Error),
}

/// Commits, come what may. An error is either the server's refusal, when nothing is stored, or says
/// [`CommitUnknown`](ErrorKind::CommitUnknown).
pub(super) async fn commit(
    connection: Borrowed,
    stream: &StreamInner,
    transaction: &Transaction,
) -> Result<Committed> {
    let (tell, told) = oneshot::channel();
    let turn = Bell::turn(&stream.client);
    let rings = turn.is_some();
    let committing = send_commit(connection, stream.id, turn, tell);
    // Dropped before the answer, it closes the connection.
    let committing =
        AbortOnDropHandle::new(stream.client.inner.background.handle().spawn(committing));
    let answer = within(COMMIT_LIMIT, told, "commit").await;
    let lost = match answer {
        Ok(Ok(Ok(()))) => {
            committing.detach();
            stream.committed(rings);
            transaction.tell_of_delayed(stream);
            return Ok(Committed::Stored);
        }
        Ok(Ok(Err(error))) => {
            // Only a plain ERROR means that it was rolled back. A session that is ended while it waits for a standby has
            // committed all the same, and a server that panics may have.
            let refused = refused(&error);
            let error = Error::from_driver(error, "commit the messages");
            if refused && error.kind() != ErrorKind::Connection {
                committing.detach();
                return Err(error);
            }
            error
        }
        // It ends without an answer only with the client's thread.
        Ok(Err(_)) => {
            return Err(unknown("the client ended while the messages were being committed"));
        }
        Err(silence) => silence,
    };
    drop(committing);
    stream.client.forget_idle_connections();
    if transaction.written.is_empty() && transaction.delayed.is_empty() {
        // All were duplicates of what others have committed.
        return Ok(Committed::Stored);
    }
    tracing::info!(
        stream = stream.name,
        error = &lost as &dyn std::error::Error,
        "a commit was not answered, finding out what became of it"
    );
    match resolve(stream, transaction).await? {
        true => {
            stream.committed(false);
            transaction.tell_of_delayed(stream);
            Ok(Committed::Stored)
        }
        false => Ok(Committed::Lost(lost)),
    }
}

/// Commits and, in the same write, rings, if it is our turn. Nobody waits for the answer to the ring, except the connection.
async fn send_commit(
    connection: Borrowed,
    stream: i64,
    turn: Option<Turn>,
    tell: oneshot::Sender<Result<(), tokio_postgres::Error>>,
) {
    let commit = async {
        // Whoever does not wait any more does not want to know.
        let _ = tell.send(connection.batch_execute("COMMIT").await);
    };
    let ring = async {
        match &turn {
            Some(turn) => within(RING_LIMIT, turn.ring(&connection, stream), "ring").await,
            None => Ok(Ok(())),
        }
    };
    // Written in this order, at the first poll.
    let ((), rang) = join(commit, ring).await;
    if matches!(rang, Ok(Ok(()))) {
        connection.give_back();
    }
}

/// Whether the transaction's messages are stored.
async fn resolve(stream: &StreamInner, transaction: &Transaction) -> Result<bool> {
    let started = Instant::now();
    let mut running_since = None;
    let mut backoff = Backoff::new(AGAIN);
    loop {
        let terminate =
            running_since.is_some_and(|since: Instant| since.elapsed() > TERMINATE_AFTER);
        let error = match ask(stream, transaction, terminate).await {
            Ok(Answer::Stored) => return Ok(true),
            Ok(Answer::Missing) => return Ok(false),
            Ok(Answer::Gone) => {
                return Err(undecided("the part of the log that they belong to was removed since"));
            }
            Ok(Answer::InProgress) => {
                running_since.get_or_insert_with(Instant::now);
                undecided("their transaction still runs")
            }
            Ok(Answer::Standby) => undecided("the database is a standby now"),
            Err(error) if error.kind() == ErrorKind::UnknownStream => return Err(error),
            Err(error) if error.is_retryable() => {
                undecided("the database cannot be asked").with_source(error)
            }
            Err(error) => return Err(undecided("the database cannot say").with_source(error)),
        };
        if started.elapsed() > GIVE_UP_AFTER {
            return Err(error);
        }
        tokio::time::sleep(backoff.pause()).await;
    }
}

enum Answer {
    Stored,
    Missing,
    Gone,
    InProgress,
    Standby,
}

async fn ask(stream: &StreamInner, transaction: &Transaction, terminate: bool) -> Result<Answer> {
    const DOING: &str = "find out whether the messages were stored";
    // One that is delayed is in the log by now, perhaps, or cancelled: where there is no other, its witness tells.
    let first = transaction.delayed.first().filter(|_| transaction.written.is_empty());
    let witness = first.and_then(|written| written.delayed).map(|by| by.witness).unzip();
    let sample = || transaction.written.iter().chain(first).take(SAMPLE);
    let ids: Vec<i64> = sample().map(|written| written.receipt.id).collect();
    let produced_at: Vec<SystemTime> = sample().map(|written| written.produced_at).collect();
    let query = &stream.client.inner.queries.resolve_commit;
    let asked = within(
        RESOLVE_LIMIT,
        async {
            let connection = Borrowed::take(&stream.client, DOING).await?;
            let rows = transact(
                &connection,
                BEGIN,
                query,
                &[
                    &stream.id,
                    &transaction.xid,
                    &transaction.pid,
                    &ids,
                    &produced_at,
                    &terminate,
                    &witness.0,
                    &witness.1,
                ],
            )
            .await
            .map_err(|e| Error::from_driver(e, DOING))?;
            let word: String = rows.first().map(|row| row.get(0)).unwrap_or_default();
            let answer = match word.as_str() {
                "stored" => Answer::Stored,
                "missing" => Answer::Missing,
                "gone" => Answer::Gone,
                "in_progress" => Answer::InProgress,
                // Closed, so that the next connection may find the primary.
                "standby" => return Ok(Answer::Standby),
                word => {
                    let text = format!("could not {DOING}: the answer was {word:?}");
                    return Err(Error::new(ErrorKind::Database, text));
                }
            };
            connection.give_back();
            Ok(answer)
        },
        DOING,
    );
    let answer = asked.await.and_then(|answer| answer);
    if matches!(answer, Ok(Answer::Standby) | Err(_)) {
        stream.client.forget_idle_connections();
    }
    answer
}

fn undecided(why: &str) -> Error {
    unknown(format!("the connection broke while the messages were being committed, and {why}"))
}

pub(super) fn unknown(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::CommitUnknown, message)
        .with_hint("They may or may not be stored: look for them before sending them again.")
}
