//! The caller's connection or transaction, as something that a message can be inserted with.

use std::future::Future;
use std::time::SystemTime;

use tokio_postgres::types::{ToSql, Type};

use crate::error::{Error, Result};
use crate::message::Encoded;
use crate::payload::Payload;
use crate::stream::StreamInner;

/// Connections and transactions that [`Stream::send_in`](crate::Stream::send_in) can insert with.
///
/// Implemented here for the types of tokio-postgres 0.7; not meant to be implemented elsewhere.
pub trait Executor: sealed::Sealed + Sync {
    /// Inserts a batch and returns its ids, in order.
    #[doc(hidden)]
    fn insert(&self, batch: Batch<'_>) -> impl Future<Output = Result<Vec<i64>>> + Send;
}

/// Messages on their way into one stream's log.
#[doc(hidden)]
#[derive(Debug, Clone, Copy)]
pub struct Batch<'a> {
    pub(crate) stream: &'a StreamInner,
    pub(crate) messages: &'a [Encoded],
}

/// A row of the log. The two together tell it from every other, also from one that got the same id after a crash.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Written {
    pub(crate) id: i64,
    pub(crate) produced_at: SystemTime,
}

mod sealed {
    pub trait Sealed {}
}

impl sealed::Sealed for tokio_postgres::Client {}
impl sealed::Sealed for tokio_postgres::Transaction<'_> {}

impl Executor for tokio_postgres::Client {
    async fn insert(&self, batch: Batch<'_>) -> Result<Vec<i64>> {
        ids(batch.insert(self).await)
    }
}

impl Executor for tokio_postgres::Transaction<'_> {
    async fn insert(&self, batch: Batch<'_>) -> Result<Vec<i64>> {
        ids(batch.insert(self.client()).await)
    }
}

fn ids(written: Result<Vec<Written>, tokio_postgres::Error>) -> Result<Vec<i64>> {
    let written = written.map_err(|e| Error::from_driver(e, "produce"))?;
    Ok(written.into_iter().map(|written| written.id).collect())
}

impl Batch<'_> {
    /// One statement, whatever the number of messages.
    pub(crate) async fn insert(
        &self,
        connection: &tokio_postgres::Client,
    ) -> Result<Vec<Written>, tokio_postgres::Error> {
        let keys: Vec<Option<&str>> = self.messages.iter().map(|m| m.key.as_deref()).collect();
        let routing_keys: Vec<Option<&str>> =
            self.messages.iter().map(|m| m.routing_key.as_deref()).collect();
        let headers: Vec<Option<&str>> =
            self.messages.iter().map(|m| m.headers.as_deref()).collect();
        let payloads: Vec<&Payload> = self.messages.iter().map(|m| &m.payload).collect();
        let insert = &self.stream.queries.insert;
        let types = insert.types.iter().cloned().chain([self.stream.payload_type.array_type()]);
        let params: [&(dyn ToSql + Sync); 4] = [&keys, &routing_keys, &headers, &payloads];
        let typed: Vec<(&(dyn ToSql + Sync), Type)> = params.into_iter().zip(types).collect();
        let rows = connection.query_typed(&insert.sql, &typed).await?;
        Ok(rows.iter().map(|row| Written { id: row.get(0), produced_at: row.get(1) }).collect())
    }
}
