//! Importing messages from elsewhere.

use std::time::Duration;

use tokio_postgres::types::{ToSql, Type};

use crate::backoff::Backoff;
use crate::client::{BEGIN, transact_typed};
use crate::error::{Error, ErrorKind, Result};
use crate::message::{Encoded, Headers, Meta, holds_nul};
use crate::moment::Moment;
use crate::name::check_name;
use crate::payload::{Codec, Payload};
use crate::produce::invalid;
use crate::read::Record;
use crate::stream::{Stream, StreamInner};

/// A transaction takes so many messages, and about so many bytes, at most.
const MESSAGES: usize = 1_000;
const BYTES: usize = 8 * 1024 * 1024;
/// How often a transaction is tried whose locks others have, or whose connection broke.
const TRIES: u32 = 10;
const PAUSE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));

/// How messages are imported; see [`Stream::import`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
#[must_use]
pub struct Import {
    keep_ids: bool,
    name: Option<String>,
}

impl Import {
    /// Under new ids, drawn as for messages that are sent.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether messages keep their ids. Default: no.
    ///
    /// They have to lie above all that the stream has ever drawn or heard of, so into a new stream as a rule: readers may have gone past all others.
    /// While a transaction of the import is under way (1,000 messages), producers wait. What is there already is passed over where it is the
    /// same, so that an import may be repeated. Only the owner of the schema's tables may keep ids.
    pub fn keep_ids(mut self, keep: bool) -> Self {
        self.keep_ids = keep;
        self
    }

    /// A name under which the stream remembers how far the import has come, by the ids of where the messages are from: 1 to 200 bytes.
    /// Repeated under its name, it goes on after that, and stores each message once.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Whether a transaction may be tried again of which nobody knows whether it was committed.
    fn is_repeatable(&self) -> bool {
        self.keep_ids || self.name.is_some()
    }
}

/// What became of messages that were imported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Imported {
    /// How many were stored.
    pub stored: u64,
    /// How many were there already.
    pub skipped: u64,
    /// The id that the first of the stored ones has in this stream.
    pub first_id: Option<i64>,
    /// That of the last.
    pub last_id: Option<i64>,
}

impl<T, C: Codec<T>> Stream<T, C> {
    /// Stores messages from elsewhere, with the times that they had there. Their ids ascend.
    ///
    /// Groups receive them as they receive others. Their times do not count up with the ids then, where the stream has younger messages
    /// before them: what starts at a time ([`Start::Time`](crate::Start::Time)) finds one of several places. Idempotency keys are
    /// not imported.
    ///
    /// ```no_run
    /// # async fn f(from: sqlstreams::Stream<u64>, to: sqlstreams::Stream<u64>) -> sqlstreams::Result<()> {
    /// let how = sqlstreams::Import::new().name("from the old database");
    /// let mut after = to.imported_upto("from the old database").await?;
    /// loop {
    ///     let page = from.read_log(after, i64::MAX, 1_000).await?;
    ///     to.import(&page.records, &how).await?;
    ///     if page.upto == after {
    ///         break;
    ///     }
    ///     after = page.upto;
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`InvalidMessage`](ErrorKind::InvalidMessage) or [`TooLarge`](ErrorKind::TooLarge) for what cannot be stored, with its
    /// [place](Error::place); [`ImportConflict`](ErrorKind::ImportConflict) where an id cannot be kept;
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) for ids that do not ascend; or the database's. Every 1,000 messages or 8 MiB are a
    /// transaction: what was stored before an error stays. When the connection breaks, an import that keeps ids or has a name goes on with another;
    /// of any other nobody knows whether the last transaction was committed.
    ///
    /// # Cancellation
    /// Dropped, it ends within a transaction, which is rolled back or committed; an import that keeps ids or has a name may be repeated.
    pub async fn import(&self, records: &[Record<T>], how: &Import) -> Result<Imported> {
        if let Some(name) = &how.name {
            check_name("import", name)?;
        }
        let mut done = Imported::default();
        let mut start = 0;
        while let Some(rest) = records.get(start..).filter(|rest| !rest.is_empty()) {
            let mut chunk = Vec::new();
            let mut bytes = 0;
            for record in rest.iter().take(MESSAGES) {
                let encoded = encode::<T, C>(&self.inner, record);
                let encoded = encoded.map_err(|error| error.at_place(start + chunk.len()))?;
                bytes += encoded.bytes();
                if bytes > BYTES && !chunk.is_empty() {
                    break;
                }
                chunk.push(encoded);
            }
            let records = &rest[..chunk.len()];
            let stored = store(&self.inner, records, &chunk, how).await;
            let stored = stored.map_err(|error| match error.place() {
                Some(place) => error.at_place(start + place),
                None => error,
            })?;
            done.stored += stored.stored;
            done.skipped += stored.skipped;
            done.first_id = done.first_id.or(stored.first_id);
            done.last_id = stored.last_id.or(done.last_id);
            start += chunk.len();
        }
        if done.stored > 0 {
            self.inner.ring();
        }
        Ok(done)
    }

    /// How far the import of a [name](Import::name) has come, by the ids of where its messages are from; 0 if it has not begun.
    ///
    /// # Errors
    /// The database's.
    pub async fn imported_upto(&self, name: &str) -> Result<i64> {
        let client = &self.inner.client;
        let upto = &client.inner.queries.import_upto;
        let row = client.query_one(upto, &[&self.inner.id, &name], "look at the import").await?;
        Ok(row.get(0))
    }
}

/// A message as the stream can store it, but for the syntax of its JSON.
fn encode<T, C: Codec<T>>(stream: &StreamInner, record: &Record<T>) -> Result<Encoded> {
    let refuse = |text: &str| Err(Error::new(ErrorKind::InvalidMessage, text));
    if stream.compacted && record.key.is_none() {
        return refuse("the stream is compacted, and the message has no key");
    }
    if !stream.compacted && record.payload.is_none() {
        return refuse("the stream is not compacted and takes no tombstones");
    }
    if let Some(text) = &record.headers {
        match serde_json::from_str::<Headers>(text) {
            Err(error) => {
                return refuse(&format!("the headers are not a JSON object: {error}"));
            }
            Ok(headers) => {
                if holds_nul(&headers.into()) {
                    let text = "a header holds the character U+0000, which PostgreSQL cannot store";
                    return refuse(text);
                }
            }
        }
    }
    let meta = Meta {
        key: record.key.clone(),
        routing_key: record.routing_key.clone(),
        ..Meta::default()
    };
    let encoded = Encoded::new::<T, C>(record.payload.as_ref(), meta, stream.payload_type)?;
    Ok(Encoded { headers: record.headers.clone(), ..encoded })
}

/// One transaction, again where it met somebody else's locks, or a connection that broke.
async fn store<T>(
    stream: &StreamInner,
    records: &[Record<T>],
    encoded: &[Encoded],
    how: &Import,
) -> Result<Imported> {
    let client = &stream.client;
    let query = &stream.queries.import_messages;
    // The type of the payloads is the stream's.
    let types = query.types.iter().cloned().chain([stream.payload_type.array_type()]);
    let ids: Vec<i64> = records.iter().map(|r| r.id).collect();
    let keys: Vec<Option<&str>> = encoded.iter().map(|m| m.key.as_deref()).collect();
    let routing_keys: Vec<Option<&str>> =
        encoded.iter().map(|m| m.routing_key.as_deref()).collect();
    let headers: Vec<Option<&str>> = encoded.iter().map(|m| m.headers.as_deref()).collect();
    let produced_at: Vec<Moment> = records.iter().map(|r| Moment(r.produced_at)).collect();
    let expires_at: Vec<Option<Moment>> =
        records.iter().map(|r| r.expires_at.map(Moment)).collect();
    let payloads: Vec<Option<&Payload>> = encoded.iter().map(|m| m.payload.as_ref()).collect();
    let params: [&(dyn ToSql + Sync); 10] = [
        &stream.id,
        &how.keep_ids,
        &how.name,
        &ids,
        &keys,
        &routing_keys,
        &headers,
        &produced_at,
        &expires_at,
        &payloads,
    ];
    let params: Vec<(&(dyn ToSql + Sync), Type)> = params.into_iter().zip(types).collect();
    let doing = "import the messages";
    let mut pauses = Backoff::new(PAUSE);
    let mut tries = 1;
    loop {
        let connection = client.connection(doing).await?;
        let answer = transact_typed(&connection, BEGIN, &query.sql, &params).await;
        let answer = client.keep(connection, answer.map_err(|e| Error::from_driver(e, doing)));
        match answer {
            Ok(rows) => {
                let Some(row) = rows.first() else {
                    let text = "could not import the messages: no row came back";
                    return Err(Error::new(ErrorKind::Database, text));
                };
                let number = |at| u64::try_from(row.get::<_, i64>(at)).unwrap_or_default();
                return Ok(Imported {
                    stored: number(0),
                    skipped: number(1),
                    first_id: row.get(2),
                    last_id: row.get(3),
                });
            }
            Err(error) if error.may_be_a_message() => {
                let refused = invalid(stream, encoded).await?;
                return Err(match refused.into_iter().next() {
                    Some(refused) => Error::new(ErrorKind::InvalidMessage, refused.reason)
                        .at_place(refused.place)
                        .with_source(error),
                    None => error,
                });
            }
            Err(error) if error.kind() == ErrorKind::ImportConflict => {
                // The id is in the detail.
                let place = error.detail().and_then(|id| id.parse().ok());
                let place = place.and_then(|id: i64| ids.iter().position(|i| *i == id));
                return Err(match place {
                    Some(place) => error.at_place(place),
                    None => error,
                });
            }
            Err(error) => {
                let again = match error.kind() {
                    ErrorKind::Connection => how.is_repeatable(),
                    _ => error.is_retryable(),
                };
                if !again || tries == TRIES {
                    return Err(match error.kind() {
                        ErrorKind::Connection if !how.is_repeatable() => error.with_hint(
                            "Whether these messages are stored is not known: look at the end of the stream. An import that has a name goes on by itself.",
                        ),
                        _ if error.sql_state() == Some("55P03") => error.with_hint(
                            "Some transaction that writes to the stream stays open; ids are kept only between transactions.",
                        ),
                        _ => error,
                    });
                }
                tries += 1;
                tokio::time::sleep(pauses.pause()).await;
            }
        }
    }
}
