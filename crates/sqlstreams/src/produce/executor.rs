//! The caller's connection or transaction, as something that a message can be inserted with.

use std::future::Future;

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

mod sealed {
    pub trait Sealed {}
}

impl sealed::Sealed for tokio_postgres::Client {}
impl sealed::Sealed for tokio_postgres::Transaction<'_> {}

impl Executor for tokio_postgres::Client {
    async fn insert(&self, batch: Batch<'_>) -> Result<Vec<i64>> {
        batch.insert(self).await.map_err(|e| Error::from_driver(e, "produce"))
    }
}

impl Executor for tokio_postgres::Transaction<'_> {
    async fn insert(&self, batch: Batch<'_>) -> Result<Vec<i64>> {
        batch.insert(self.client()).await.map_err(|e| Error::from_driver(e, "produce"))
    }
}

impl Batch<'_> {
    /// One statement, whatever the number of messages.
    pub(crate) async fn insert(
        &self,
        connection: &tokio_postgres::Client,
    ) -> Result<Vec<i64>, tokio_postgres::Error> {
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
        Ok(rows.iter().map(|row| row.get(0)).collect())
    }
}
