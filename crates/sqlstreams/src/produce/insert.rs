//! Inserting in a transaction of our own, again and again where something goes wrong that need not stay so.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio_postgres::types::ToSql;

use super::attempt::{AGAIN, Failure, INSERT_LIMIT, attempt, trouble};
use super::keys;
use super::receipt::Receipt;
use crate::backoff::Backoff;
use crate::client::within;
use crate::error::{Error, ErrorKind, Result};
use crate::message::Encoded;
use crate::partitions;
use crate::stream::StreamInner;

/// One statement takes so many messages and about so many bytes at most; a larger batch takes several, in one transaction.
pub(crate) const STATEMENT_MESSAGES: usize = 5_000;
pub(crate) const STATEMENT_BYTES: usize = 8 * 1024 * 1024;

/// So long after a connection first broke new ones are tried.
const PATIENCE: Duration = Duration::from_secs(10);
/// So long it is tried to make partitions where something keeps everybody from it.
const NO_ROOM: Duration = Duration::from_secs(60);
/// So many transactions of one batch may be lost before the error is reported.
const MOST_LOST: u32 = 10;

/// So many times room is made for one batch.
const MOST_ROOM: u32 = 6;

/// A message of a batch that the stream cannot store.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct InvalidMessage {
    /// Its place in the batch, counted from 0.
    pub place: usize,
    /// Why, in the words of the codec or the server.
    pub reason: String,
}

/// Inserts all messages in one transaction and returns what became of each, in order. When messages are refused, the error says which
/// is the first.
pub(crate) async fn insert(
    stream: &Arc<StreamInner>,
    messages: &[Encoded],
) -> Result<Vec<Receipt>> {
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
/// of them, and goes on with another connection when one breaks.
pub(crate) async fn insert_unchecked(
    stream: &Arc<StreamInner>,
    messages: &[Encoded],
) -> Result<Vec<Receipt>> {
    if messages.is_empty() {
        return Ok(Vec::new());
    }
    let (mut made_room, mut lost) = (0, 0);
    let mut patience = Patience::new(PATIENCE);
    let mut no_room = Patience::new(NO_ROOM);
    loop {
        let result = match attempt(stream, chunks(messages)).await {
            Err(Failure::OutOfPartitions(error)) if made_room < MOST_ROOM => {
                // Others use it up as well: more each time.
                match make_room(stream, messages.len() << (made_room + 1)).await {
                    // Others have made some, or something keeps everybody from it: an ANALYZE of the whole log, say.
                    Ok(0) => {
                        no_room.wait(out_of_partitions(error)).await?;
                        continue;
                    }
                    Ok(_) => {
                        made_room += 1;
                        continue;
                    }
                    Err(failure) => Err(failure),
                }
            }
            result => result,
        };
        match result {
            Ok(receipts) => {
                if let Some(last) = receipts.iter().rfind(|r| !r.is_duplicate() && !r.delayed) {
                    partitions::look_after(stream, last.id);
                }
                keys::look_after(stream, messages);
                return Ok(receipts);
            }
            Err(Failure::Trouble(error)) => {
                stream.client.forget_idle_connections();
                patience.wait(error).await?;
            }
            Err(Failure::Lost(error)) if lost == MOST_LOST => return Err(error),
            // The database has just answered, however long that took.
            Err(Failure::Lost(_)) => {
                lost += 1;
                patience = Patience::new(PATIENCE);
            }
            Err(Failure::OutOfPartitions(error)) => return Err(out_of_partitions(error)),
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
        let payloads: Vec<Option<&[u8]>> =
            chunk.iter().map(|m| m.payload.as_ref().map(|payload| payload.0.as_slice())).collect();
        let query = &client.inner.queries.invalid_payloads;
        let doing = "check the payloads";
        let params: [&(dyn ToSql + Sync); 2] = [&stream.payload_type.as_str(), &payloads];
        let rows = within(INSERT_LIMIT, client.query(query, &params, doing), doing).await??;
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

fn out_of_partitions(error: tokio_postgres::Error) -> Error {
    let text = "could not produce: no partition of the log takes the message, and none could be made in time";
    Error::new(ErrorKind::Database, text)
        .with_hint("Look whether somebody has the log locked (`sqlstreams maintain status`); if others use partitions up as fast as they are made, make the stream with a larger partition size.")
        .with_source(error)
}

async fn make_room(stream: &StreamInner, messages: usize) -> Result<u32, Failure> {
    let made = within(INSERT_LIMIT, partitions::ensure(stream, messages), "make partitions").await;
    made.and_then(|made| made).map_err(trouble)
}

/// Bears with trouble for a while, counted from when it began.
struct Patience {
    limit: Duration,
    troubled_since: Option<Instant>,
    backoff: Backoff,
}

impl Patience {
    fn new(limit: Duration) -> Self {
        Self { limit, troubled_since: None, backoff: Backoff::new(AGAIN) }
    }

    /// Returns the error when it has been enough.
    async fn wait(&mut self, error: Error) -> Result<()> {
        if self.troubled_since.get_or_insert_with(Instant::now).elapsed() > self.limit {
            return Err(error);
        }
        tokio::time::sleep(self.backoff.pause()).await;
        Ok(())
    }
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
        Encoded {
            key: None,
            routing_key: None,
            headers: None,
            payload: Some(Payload(vec![b'x'; bytes])),
            idempotency_key: None,
            deliver: None,
            expires: None,
            expected: None,
        }
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
