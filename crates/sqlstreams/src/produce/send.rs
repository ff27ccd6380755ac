//! The calls that send one message, as builders that can be awaited.

use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::time::{Duration, SystemTime};

use super::executor::{Batch, Executor};
use super::producer::Producer;
use super::receipt::Receipt;
use crate::error::{Error, ErrorKind, Result};
use crate::message::{Headers, Outgoing};
use crate::payload::{Codec, Json};
use crate::stream::Stream;

/// One message to send; from [`Producer::send`]. Await it.
#[must_use = "nothing is sent until it is awaited"]
pub struct SendBuilder<'a, T, C = Json> {
    producer: &'a Producer<T, C>,
    message: Outgoing<'a, T>,
}

/// One message to send in the caller's transaction; from [`Stream::send_in`]. Await it.
#[must_use = "nothing is sent until it is awaited"]
pub struct SendInBuilder<'a, E, T, C = Json> {
    stream: &'a Stream<T, C>,
    executor: &'a E,
    message: Outgoing<'a, T>,
}

macro_rules! metadata {
    () => {
        /// What the message is about: at most [`MAX_KEY_BYTES`](crate::MAX_KEY_BYTES).
        pub fn key(mut self, key: impl Into<String>) -> Self {
            self.message = self.message.key(key);
            self
        }

        /// What groups select the message by: at most [`MAX_ROUTING_KEY_BYTES`](crate::MAX_ROUTING_KEY_BYTES).
        pub fn routing_key(mut self, routing_key: impl Into<String>) -> Self {
            self.message = self.message.routing_key(routing_key);
            self
        }

        /// Headers.
        pub fn headers(mut self, headers: Headers) -> Self {
            self.message = self.message.headers(headers);
            self
        }

        /// Keeps the message back for so long. See [`Outgoing::delay`].
        pub fn delay(mut self, delay: Duration) -> Self {
            self.message = self.message.delay(delay);
            self
        }

        /// Keeps the message back until then, by the database's clock. See [`Outgoing::deliver_at`].
        pub fn deliver_at(mut self, at: SystemTime) -> Self {
            self.message = self.message.deliver_at(at);
            self
        }

        /// After so long nobody gets the message any more. See [`Outgoing::expires_in`].
        pub fn expires_in(mut self, time: Duration) -> Self {
            self.message = self.message.expires_in(time);
            self
        }

        /// From then on nobody gets the message any more. See [`Outgoing::expires_at`].
        pub fn expires_at(mut self, at: SystemTime) -> Self {
            self.message = self.message.expires_at(at);
            self
        }

        /// Stores it only if the key's current value is the message of this id (`None`: if it has none). See
        /// [`Outgoing::expect_latest`].
        pub fn expect_latest(mut self, id: impl Into<Option<i64>>) -> Self {
            self.message = self.message.expect_latest(id);
            self
        }

        /// What the message is known by: the stream stores it once. See [`Outgoing::idempotency_key`].
        pub fn idempotency_key(mut self, key: impl Into<String>) -> Self {
            self.message = self.message.idempotency_key(key);
            self
        }
    };
}

impl<'a, T, C> SendBuilder<'a, T, C> {
    pub(crate) fn new(producer: &'a Producer<T, C>, message: Outgoing<'a, T>) -> Self {
        Self { producer, message }
    }

    metadata!();
}

impl<'a, T, C> IntoFuture for SendBuilder<'a, T, C>
where
    T: Send + Sync + 'static,
    C: Codec<T>,
{
    type Output = Result<Receipt>;
    type IntoFuture = Pin<Box<dyn Future<Output = Result<Receipt>> + Send + 'a>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.producer.enqueue(self.message))
    }
}

impl<E, T, C> SendInBuilder<'_, E, T, C> {
    metadata!();
}

impl<'a, E, T, C> IntoFuture for SendInBuilder<'a, E, T, C>
where
    E: Executor,
    T: Send + Sync + 'static,
    C: Codec<T>,
{
    type Output = Result<Receipt>;
    type IntoFuture = Pin<Box<dyn Future<Output = Result<Receipt>> + Send + 'a>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move {
            let message = self
                .message
                .encode::<C>(self.stream.inner.payload_type, self.stream.inner.compacted)?;
            let receipts = self
                .executor
                .insert(Batch { stream: &self.stream.inner, messages: &[message] })
                .await?;
            match receipts.as_slice() {
                &[receipt] => Ok(receipt),
                _ => Err(Error::new(ErrorKind::Database, "not exactly one id came back")),
            }
        })
    }
}

impl<T, C: Codec<T>> Stream<T, C> {
    /// Sends one message in the caller's own transaction: it becomes visible if and when that commits.
    ///
    /// ```no_run
    /// # async fn f(orders: sqlstreams::Stream<String>, db: &mut tokio_postgres::Client) -> Result<(), Box<dyn std::error::Error>> {
    /// let tx = db.transaction().await?;
    /// tx.execute("UPDATE account SET balance = balance - 10 WHERE id = 42", &[]).await?;
    /// orders.send_in(&tx, &"withdrawn".to_owned()).key("account-42").await?;
    /// tx.commit().await?;
    /// # Ok(()) }
    /// ```
    ///
    /// An open transaction holds back the messages that others produce after it until it ends, so keep it short. It holds up, too,
    /// whoever sends with the same [idempotency key](Outgoing::idempotency_key). Of two transactions that send with the same keys in
    /// several statements each, in different order, the database ends one as deadlocked (SQLSTATE 40P01): run that again.
    ///
    /// # Errors
    /// A message that cannot be stored, or the database's: the transaction is aborted then, as after any failed statement.
    ///
    /// # Cancellation
    /// Dropped while it waits, the message may or may not be part of the transaction: roll back.
    pub fn send_in<'a, E: Executor>(
        &'a self,
        executor: &'a E,
        payload: &'a T,
    ) -> SendInBuilder<'a, E, T, C> {
        SendInBuilder { stream: self, executor, message: Outgoing::new(payload) }
    }

    /// Sends a [tombstone](Outgoing::tombstone) in the caller's own transaction. Otherwise as [`send_in`](Self::send_in).
    pub fn send_tombstone_in<'a, E: Executor>(
        &'a self,
        executor: &'a E,
        key: impl Into<String>,
    ) -> SendInBuilder<'a, E, T, C> {
        SendInBuilder { stream: self, executor, message: Outgoing::tombstone(key) }
    }

    /// Sends messages in the caller's own transaction, in one statement. Returns where they were stored, in order.
    ///
    /// # Errors
    /// As [`send_in`](Self::send_in).
    ///
    /// # Cancellation
    /// As [`send_in`](Self::send_in).
    pub async fn send_all_in<'a, E, I>(&self, executor: &E, messages: I) -> Result<Vec<Receipt>>
    where
        E: Executor,
        T: 'a,
        I: IntoIterator<Item = Outgoing<'a, T>>,
    {
        let messages = messages
            .into_iter()
            .map(|m| m.encode::<C>(self.inner.payload_type, self.inner.compacted))
            .collect::<Result<Vec<_>>>()?;
        executor.insert(Batch { stream: &self.inner, messages: &messages }).await
    }
}
