//! The caller's connection or transaction, as something that a message can be inserted with.

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};

use super::keys;
use super::receipt::{Duplicate, Receipt};
use crate::error::{Error, ErrorKind, Result};
use crate::message::{Encoded, When};
use crate::payload::Payload;
use crate::queries::Query;
use crate::stream::StreamInner;

/// Connections and transactions that [`Stream::send_in`](crate::Stream::send_in) can insert with.
///
/// Implemented here for the types of tokio-postgres 0.7; not meant to be implemented elsewhere.
pub trait Executor: sealed::Sealed + Sync {
    /// Inserts a batch and returns what became of each message, in order.
    #[doc(hidden)]
    fn insert(&self, batch: Batch<'_>) -> impl Future<Output = Result<Vec<Receipt>>> + Send;
}

/// Messages on their way into one stream's log.
#[doc(hidden)]
#[derive(Debug, Clone, Copy)]
pub struct Batch<'a> {
    pub(crate) stream: &'a Arc<StreamInner>,
    pub(crate) messages: &'a [Encoded],
}

/// What became of a message. Of one that was stored, its id and the time together tell it from every other, also from one that
/// got the same id after a crash.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Written {
    pub(crate) receipt: Receipt,
    pub(crate) produced_at: SystemTime,
    pub(crate) delayed: Option<DelayedBy>,
}

/// Of a message that is delayed: for how long, and the row by which its transaction is told.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DelayedBy {
    pub(crate) due_in: Duration,
    pub(crate) witness: (i64, i64),
}

/// What became of a batch.
#[derive(Debug, Default)]
pub(crate) struct Inserted {
    pub(crate) written: Vec<Written>,
    /// The xid, and the pid of its backend.
    pub(crate) transaction: Option<(String, i32)>,
}

impl Inserted {
    /// Of messages with nothing to be answered but where they are.
    fn plain(row: &Row) -> Self {
        // NULL where a trigger let no row through.
        let ids: Vec<i64> = row.get::<_, Option<_>>(0).unwrap_or_default();
        let times: Vec<SystemTime> = row.get::<_, Option<_>>(1).unwrap_or_default();
        let stored = |(id, produced_at)| Written {
            receipt: Receipt { id, delayed: false, duplicate: None },
            produced_at,
            delayed: None,
        };
        Self {
            written: ids.into_iter().zip(times).map(stored).collect(),
            transaction: Some((row.get(2), row.get(3))),
        }
    }
}

mod sealed {
    pub trait Sealed {}
}

impl sealed::Sealed for tokio_postgres::Client {}
impl sealed::Sealed for tokio_postgres::Transaction<'_> {}

impl Executor for tokio_postgres::Client {
    async fn insert(&self, batch: Batch<'_>) -> Result<Vec<Receipt>> {
        batch.insert_in(self).await
    }
}

impl Executor for tokio_postgres::Transaction<'_> {
    async fn insert(&self, batch: Batch<'_>) -> Result<Vec<Receipt>> {
        batch.insert_in(self.client()).await
    }
}

impl Batch<'_> {
    /// In a transaction of the caller's.
    async fn insert_in(&self, connection: &tokio_postgres::Client) -> Result<Vec<Receipt>> {
        let inserted =
            self.insert(connection).await.map_err(|e| Error::from_driver(e, "produce"))?;
        complete(self.messages.len(), inserted.written.len())?;
        keys::look_after(self.stream, self.messages);
        Ok(inserted.written.into_iter().map(|written| written.receipt).collect())
    }

    /// One statement, whatever the number of messages.
    pub(crate) async fn insert(
        &self,
        connection: &tokio_postgres::Client,
    ) -> Result<Inserted, tokio_postgres::Error> {
        let keys = self.column(|message| message.key.as_deref());
        let routing_keys = self.column(|message| message.routing_key.as_deref());
        let headers = self.column(|message| message.headers.as_deref());
        let payloads: Vec<Option<&Payload>> =
            self.messages.iter().map(|m| m.payload.as_ref()).collect();
        let mut params: Vec<&(dyn ToSql + Sync)> = vec![&keys, &routing_keys, &headers];
        let queries = &self.stream.queries;
        if self.messages.iter().all(Encoded::is_plain) {
            params.push(&payloads);
            let rows = self.send(connection, &queries.insert, &params).await?;
            return Ok(rows.first().map(Inserted::plain).unwrap_or_default());
        }
        let idempotency_keys: Vec<Option<&str>> =
            self.messages.iter().map(|m| m.idempotency_key.as_deref()).collect();
        let (deliver_at, delays) = times(self.messages, |m| m.deliver);
        let (expires_at, expires_in) = times(self.messages, |m| m.expires);
        let expected: Vec<Option<i64>> = self.column(|message| message.expected);
        let more: [&(dyn ToSql + Sync); 7] = [
            &idempotency_keys,
            &deliver_at,
            &delays,
            &expires_at,
            &expires_in,
            &expected,
            &payloads,
        ];
        params.extend(more);
        let rows = self.send(connection, &queries.produce, &params).await?;
        let written = |row: &Row| Written {
            receipt: Receipt {
                id: row.get(0),
                delayed: row.get(4),
                duplicate: row.get::<_, bool>(2).then(|| match row.get(3) {
                    false => Duplicate::SamePayload,
                    true => Duplicate::OtherPayload,
                }),
            },
            produced_at: row.get(1),
            delayed: row.get::<_, bool>(4).then(|| DelayedBy {
                due_in: milliseconds(row.get(5)),
                witness: (row.get(6), row.get(7)),
            }),
        };
        Ok(Inserted {
            written: rows.iter().map(written).collect(),
            transaction: rows.first().map(|row| (row.get(8), row.get(9))),
        })
    }

    /// What each message has of something; nothing where none has any.
    fn column<'m, V>(&'m self, of: impl Fn(&'m Encoded) -> Option<V>) -> Vec<Option<V>> {
        match self.messages.iter().any(|message| of(message).is_some()) {
            true => self.messages.iter().map(of).collect(),
            false => Vec::new(),
        }
    }

    /// The payloads come last: their type is the stream's.
    async fn send(
        &self,
        connection: &tokio_postgres::Client,
        query: &Query,
        params: &[&(dyn ToSql + Sync)],
    ) -> Result<Vec<Row>, tokio_postgres::Error> {
        let types = query.types.iter().cloned().chain([self.stream.payload_type.array_type()]);
        let typed: Vec<(&(dyn ToSql + Sync), Type)> = params.iter().copied().zip(types).collect();
        connection.query_typed(&query.sql, &typed).await
    }
}

/// Which message is where can be told only if all were stored: somebody's trigger on the log may have left some out.
pub(super) fn complete(sent: usize, stored: usize) -> Result<()> {
    match stored == sent {
        true => Ok(()),
        false => {
            let text = format!("{stored} of {sent} messages were stored");
            Err(Error::new(ErrorKind::Database, text)
                .with_hint("A trigger on the log has left the others out. It must not."))
        }
    }
}

/// As columns, which are empty where no message has any: times, or seconds.
fn times(
    messages: &[Encoded],
    of: impl Fn(&Encoded) -> Option<When>,
) -> (Vec<Option<SystemTime>>, Vec<Option<f64>>) {
    if messages.iter().all(|message| of(message).is_none()) {
        return (Vec::new(), Vec::new());
    }
    let when = || messages.iter().map(&of);
    (
        when().map(|w| w.and_then(When::at)).collect(),
        when().map(|w| w.and_then(When::after)).collect(),
    )
}

/// A span that may be over already, or not there at all.
fn milliseconds(number: Option<i64>) -> Duration {
    Duration::from_millis(number.and_then(|ms| u64::try_from(ms).ok()).unwrap_or_default())
}
