//! Inserting in a transaction of our own, with what may go wrong there.

use std::sync::Arc;

use tokio_postgres::error::SqlState;

use super::executor::Batch;
use crate::error::{Error, ErrorKind, Result};
use crate::message::Encoded;
use crate::partitions;
use crate::stream::StreamInner;

/// One statement takes so many messages and about so many bytes at most; a larger batch takes several, in one transaction.
pub(crate) const STATEMENT_MESSAGES: usize = 5_000;
pub(crate) const STATEMENT_BYTES: usize = 8 * 1024 * 1024;

/// Where a message was stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Receipt {
    /// Its id in the stream.
    pub id: i64,
}

/// A message of a batch that the stream cannot store.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct InvalidMessage {
    /// Its place in the batch, counted from 0.
    pub place: usize,
    /// Why, in the words of the codec or the server.
    pub reason: String,
}

/// Inserts all messages in one transaction and returns their ids in order. When messages are refused, the error says which
/// is the first.
pub(crate) async fn insert(stream: &Arc<StreamInner>, messages: &[Encoded]) -> Result<Vec<i64>> {
    let error = match insert_unchecked(stream, messages).await {
        Err(error) if error.may_be_a_message() => error,
        result => return result,
    };
    Err(match invalid(stream, messages).await?.first() {
        Some(refused) => at_fault(refused, messages.len()).with_source(error),
        None => error,
    })
}

/// The same, leaving it to the caller to find out which messages were refused. Makes partitions when the log has run out
/// of them.
pub(crate) async fn insert_unchecked(
    stream: &Arc<StreamInner>,
    messages: &[Encoded],
) -> Result<Vec<i64>> {
    if messages.is_empty() {
        return Ok(Vec::new());
    }
    let mut made_room = 0;
    loop {
        match try_insert(stream, messages).await {
            Ok(ids) => {
                if let Some(last) = ids.last() {
                    partitions::look_after(stream, *last);
                }
                stream.ring();
                return Ok(ids);
            }
            Err(Failure::OutOfPartitions(_)) if made_room < 3 => {
                made_room += 1;
                partitions::ensure(stream, messages.len()).await?;
            }
            Err(Failure::OutOfPartitions(e)) => return Err(Error::from_driver(e, "produce")),
            Err(Failure::Other(error)) => return Err(error),
        }
    }
}

/// Asks the server which of the messages it would not take.
pub(crate) async fn invalid(
    stream: &StreamInner,
    messages: &[Encoded],
) -> Result<Vec<InvalidMessage>> {
    let client = &stream.client;
    let mut found = Vec::new();
    for (start, chunk) in chunks(messages) {
        let payloads: Vec<&[u8]> = chunk.iter().map(|m| m.payload.0.as_slice()).collect();
        let rows = client
            .query(
                &client.inner.queries.invalid_payloads,
                &[&stream.payload_type.as_str(), &payloads],
                "check the payloads",
            )
            .await?;
        found.extend(rows.iter().map(|row| InvalidMessage {
            place: start + usize::try_from(row.get::<_, i32>(0)).unwrap_or_default(),
            reason: row.get(1),
        }));
    }
    Ok(found)
}

/// The error for one message of a refused batch.
pub(crate) fn at_fault(message: &InvalidMessage, of: usize) -> Error {
    let error = match of {
        1 => Error::new(ErrorKind::InvalidMessage, message.reason.clone()),
        _ => Error::new(
            ErrorKind::InvalidMessage,
            format!("message {} of {of}: {}", message.place + 1, message.reason),
        )
        .with_hint("Nothing of the batch was stored."),
    };
    error.at_place(message.place)
}

enum Failure {
    OutOfPartitions(tokio_postgres::Error),
    Other(Error),
}

async fn try_insert(stream: &StreamInner, messages: &[Encoded]) -> Result<Vec<i64>, Failure> {
    let mut connection = stream.client.connection("produce").await.map_err(Failure::Other)?;
    let mut parts = chunks(messages);
    if let (Some((_, all)), None) = (parts.next(), parts.next()) {
        // A single statement is a transaction by itself.
        return Batch { stream, messages: all }
            .insert(&connection)
            .await
            .map_err(|e| failure(e, true));
    }
    // Dropped before it has committed, it rolls back.
    let tx = connection.transaction().await.map_err(|e| failure(e, false))?;
    let mut ids = Vec::with_capacity(messages.len());
    for (_, messages) in chunks(messages) {
        ids.extend(
            Batch { stream, messages }.insert(tx.client()).await.map_err(|e| failure(e, false))?,
        );
    }
    tx.commit().await.map_err(|e| failure(e, true))?;
    Ok(ids)
}

/// `committing`: the statement that failed was the one that commits.
fn failure(error: tokio_postgres::Error, committing: bool) -> Failure {
    let db = error.as_db_error();
    // A check violation without a constraint is a row that no partition takes. (The text may be in any language.)
    if db.is_some_and(|db| *db.code() == SqlState::CHECK_VIOLATION && db.constraint().is_none()) {
        return Failure::OutOfPartitions(error);
    }
    let reported = db.is_some();
    if db.is_some_and(|db| *db.code() == SqlState::UNDEFINED_TABLE) {
        let gone =
            Error::new(ErrorKind::UnknownStream, "the stream was dropped").with_source(error);
        return Failure::Other(gone);
    }
    let translated = Error::from_driver(error, "produce");
    Failure::Other(match translated.kind() {
        ErrorKind::Connection if committing && !reported => Error::new(
            ErrorKind::CommitUnknown,
            "the connection broke while the messages were being committed",
        )
        .with_hint("They may or may not be stored: look for them before sending them again.")
        .with_source(translated),
        _ => translated,
    })
}

/// The batch in pieces of statement size, each with the place of its first message.
fn chunks(messages: &[Encoded]) -> impl Iterator<Item = (usize, &[Encoded])> {
    let mut start = 0;
    std::iter::from_fn(move || {
        let rest = messages.get(start..).filter(|rest| !rest.is_empty())?;
        let mut bytes = 0;
        let fitting = rest
            .iter()
            .take(STATEMENT_MESSAGES)
            .take_while(|m| {
                bytes += m.bytes();
                bytes <= STATEMENT_BYTES
            })
            .count();
        let chunk = &rest[..fitting.max(1)];
        let place = start;
        start += chunk.len();
        Some((place, chunk))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::payload::Payload;

    fn message(bytes: usize) -> Encoded {
        Encoded { key: None, routing_key: None, headers: None, payload: Payload(vec![b'x'; bytes]) }
    }

    #[test]
    fn batches_are_cut_by_count_and_by_bytes() {
        let many = vec![message(10); STATEMENT_MESSAGES * 2 + 1];
        assert_eq!(
            chunks(&many).map(|(at, c)| (at, c.len())).collect::<Vec<_>>(),
            [(0, 5000), (5000, 5000), (10000, 1)]
        );
        let large = vec![message(STATEMENT_BYTES / 2), message(STATEMENT_BYTES), message(1)];
        assert_eq!(
            chunks(&large).map(|(at, c)| (at, c.len())).collect::<Vec<_>>(),
            [(0, 1), (1, 1), (2, 1)]
        );
        assert_eq!(chunks(&[]).count(), 0);
    }
}
