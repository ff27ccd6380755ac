//! Delayed messages, while they wait.

use std::time::SystemTime;

use tokio_postgres::Row;

use crate::error::{Error, ErrorKind, Result};
use crate::message::{Headers, RawMessage};
use crate::payload::{Codec, Payload};
use crate::stream::Stream;

/// A message that is not due yet; from [`Stream::delayed`].
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Delayed<T> {
    /// Its id while it waits, as its [receipt](crate::Receipt) has it. In the stream it gets another.
    pub id: i64,
    /// When it is due, by the database's clock.
    pub deliver_at: SystemTime,
    /// When it was sent, by the database's clock.
    pub sent_at: SystemTime,
    /// From when on nobody gets it any more.
    pub expires_at: Option<SystemTime>,
    /// What it is about.
    pub key: Option<String>,
    /// What groups select it by.
    pub routing_key: Option<String>,
    /// Headers, empty when it was sent without.
    pub headers: Headers,
    /// Whether it is a [tombstone](crate::Outgoing::tombstone).
    pub tombstone: bool,
    /// What was sent.
    pub payload: T,
}

impl<T, C> Stream<T, C> {
    /// Takes a delayed message back, by the id that its [receipt](crate::Receipt::delayed) has: nobody will get it. Its
    /// idempotency key, if it has one, stays known.
    ///
    /// False when there is none of that id: it is in the stream already, was cancelled before, or never was.
    ///
    /// # Errors
    /// The database's.
    pub async fn cancel_delayed(&self, id: i64) -> Result<bool> {
        let client = &self.inner.client;
        let cancel = &client.inner.queries.cancel_delayed;
        let row = client.query_one(cancel, &[&self.inner.id, &id], "cancel the message").await?;
        Ok(row.get(0))
    }

    /// How many messages are not due yet. Counts them all: with millions of them, it takes a moment.
    ///
    /// # Errors
    /// The database's.
    pub async fn count_delayed(&self) -> Result<u64> {
        let client = &self.inner.client;
        let count = &client.inner.queries.count_delayed;
        let row = client.query_one(count, &[&self.inner.id], "count delayed messages").await?;
        Ok(u64::try_from(row.get::<_, i64>(0)).unwrap_or_default())
    }
}

impl<T, C: Codec<T>> Stream<T, C> {
    /// Messages that are not due yet, at most so many, the first due first. `after` is where the list before ended: the
    /// `deliver_at` and `id` of its last message.
    ///
    /// # Errors
    /// [`InvalidMessage`](ErrorKind::InvalidMessage) for a payload that cannot be decoded, or the database's.
    pub async fn delayed(
        &self,
        after: Option<(SystemTime, i64)>,
        limit: u32,
    ) -> Result<Vec<Delayed<T>>> {
        let (at, id) = (after.map(|after| after.0), after.map_or(0, |after| after.1));
        let list = &self.inner.queries.list_delayed;
        let doing = "list delayed messages";
        let rows = self.inner.client.query(list, &[&at, &id, &i64::from(limit)], doing).await?;
        rows.iter().map(Delayed::from_row::<C>).collect()
    }
}

impl<T> Delayed<T> {
    fn from_row<C: Codec<T>>(row: &Row) -> Result<Self> {
        let payload = row.get::<_, Option<Payload>>(6);
        let raw = RawMessage {
            id: row.get(0),
            key: row.get(3),
            routing_key: row.get(4),
            headers: row.get(5),
            produced_at: row.get(2),
            tombstone: payload.is_none(),
            payload: payload.into(),
            expires: None,
            lane: None,
            superseded: false,
        };
        let id = raw.id;
        let message = raw.decode::<T, C>().map_err(|reason| {
            Error::new(ErrorKind::InvalidMessage, format!("delayed message {id}: {reason}"))
        })?;
        Ok(Self {
            id,
            deliver_at: row.get(1),
            sent_at: message.produced_at,
            expires_at: row.get(7),
            key: message.key,
            routing_key: message.routing_key,
            headers: message.headers,
            tombstone: message.tombstone,
            payload: message.payload,
        })
    }
}
