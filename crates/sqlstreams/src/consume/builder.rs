//! What a consumer is told before it runs, and the ways to run it.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use super::delivery::Delivery;
use super::handler::{self, Handler};
use super::health::Health;
use super::run;
use super::transaction::Transaction;
use super::{Consumed, Settings};
use crate::error::{Error, ErrorKind, Result};
use crate::group::GroupBuilder;
use crate::outcome::{IntoOutcome, IntoOutcomes};
use crate::payload::{Codec, Json};

/// A consumer that is to be started; from [`GroupBuilder::consumer`] or [`Group::consumer`](crate::Group::consumer).
///
/// Any number of consumers may run for a group, in one process or many: they share its messages. Any number of groups and
/// streams may be consumed through one client: they share its connections, and with a [`Budget`] their handlers.
///
/// # Delivery
/// Every committed message reaches the group at least once; with [`run_transactional`](Self::run_transactional), its effects
/// in the same database happen exactly once. A handler that fails has its message tried again. The unfinished messages of a
/// process that dies are taken over within about a second by consumers that have run for 5 s, by others as soon as they have;
/// and where its death cannot be seen, once their lease runs out.
/// Messages are started in id order but run concurrently.
///
/// # Trouble
/// A consumer waits out a database that is down, restarts, fails over or hangs, without a hot loop, and says so: in its
/// [`health`](Self::health), and by `tracing`. Finished work that could not be reported yet is reported when that is over.
#[must_use]
pub struct ConsumerBuilder<T, C = Json> {
    group: GroupBuilder<T, C>,
    settings: Settings,
}

/// How many handlers may run at once over several consumers: give the same one to all of them. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Budget(pub(super) Arc<Semaphore>);

impl Budget {
    /// For so many handlers, at least 1.
    ///
    /// # Panics
    /// If `handlers` is 0 or above 2^60.
    pub fn new(handlers: usize) -> Self {
        assert!(handlers > 0, "a budget of no handlers would let none run");
        Self(Arc::new(Semaphore::new(handlers)))
    }
}

impl<T: Send + 'static, C: Codec<T>> ConsumerBuilder<T, C> {
    pub(crate) fn new(group: GroupBuilder<T, C>) -> Self {
        let settings = Settings {
            concurrency: 16,
            batch_size: 100,
            budget: None,
            timeout: None,
            shutdown_timeout: Duration::from_secs(30),
            stop: CancellationToken::new(),
            abort: CancellationToken::new(),
            until_caught_up: false,
            transactional: false,
            health: Health::new(),
        };
        Self { group, settings }
    }

    /// How many handlers run at once, 1 to 10,000. Default: 16.
    pub fn concurrency(mut self, handlers: usize) -> Self {
        self.settings.concurrency = handlers;
        self
    }

    /// The most messages that a handler of batches is given at once, 1 to 10,000. Default: 100. It gets what there is: nobody
    /// waits for a batch to fill up.
    pub fn batch_size(mut self, messages: usize) -> Self {
        self.settings.batch_size = messages;
        self
    }

    /// Shares a budget of handlers with other consumers; each still runs at most its own `concurrency`.
    pub fn budget(mut self, budget: &Budget) -> Self {
        self.settings.budget = Some(budget.clone());
        self
    }

    /// How long a call of the handler may take; one that takes longer is dropped and counts as failed. Default: as long as it
    /// likes. A handler may give itself more time: [`Context::extend`](crate::Context::extend).
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.settings.timeout = Some(timeout);
        self
    }

    /// Stops by itself once everything that was in the stream when it started is resolved: handled or dead, retries included,
    /// whichever consumer did it.
    pub fn until_caught_up(mut self) -> Self {
        self.settings.until_caught_up = true;
        self
    }

    /// Cancelling the token stops the consumer gracefully: it claims nothing more, lets running handlers finish and hands
    /// everything else back, so that other consumers have it at once.
    pub fn stop_on(mut self, token: CancellationToken) -> Self {
        self.settings.stop = token;
        self
    }

    /// Cancelling this token too ends the wait for running handlers: those left are dropped and their messages handed back,
    /// as after [`shutdown_timeout`](Self::shutdown_timeout). Alone it does nothing.
    pub fn abort_on(mut self, token: CancellationToken) -> Self {
        self.settings.abort = token;
        self
    }

    /// How long a stopping consumer waits for running handlers; those left are dropped and their messages handed back.
    /// Default: 30 s.
    pub fn shutdown_timeout(mut self, timeout: Duration) -> Self {
        self.settings.shutdown_timeout = timeout;
        self
    }

    /// A look at the consumer from outside while it runs.
    pub fn health(&self) -> Health {
        self.settings.health.clone()
    }

    /// Consumes until it is stopped ([`stop_on`](Self::stop_on)).
    ///
    /// The handler's answer decides what becomes of the message: see [`Outcome`](crate::Outcome). A panic or a timeout
    /// counts as a failure. A handler may run for hours: its lease is renewed meanwhile, by a thread of the client's own, so
    /// it may also block. Should the lease be lost all the same, the handler is cancelled: see
    /// [`Context::cancellation`](crate::Context::cancellation).
    ///
    /// ```no_run
    /// # #[derive(serde::Serialize, serde::Deserialize)] struct Order { id: u64 }
    /// # async fn f(orders: sqlstreams::Stream<Order>) -> sqlstreams::Result<()> {
    /// orders.group("receipts").consumer().concurrency(4).run(async |order| {
    ///     if order.payload.id == 0 {
    ///         return Err("an order without a number");
    ///     }
    ///     println!("attempt {} at order {}", order.attempt(), order.payload.id);
    ///     Ok(())
    /// }).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// What waiting does not mend: the group or stream was dropped, a privilege is missing, a setting is out of range.
    /// Running handlers are given the time of a graceful stop first.
    ///
    /// # Cancellation
    /// Dropped, the consumer stops by itself: it drops the running handlers and hands back what it holds, so that others have it at
    /// once. Prefer [`stop_on`](Self::stop_on), which lets handlers finish.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub async fn run<H, F>(mut self, handler: H) -> Result<Consumed>
    where
        H: Fn(Delivery<T>) -> F + Send + Sync + 'static,
        F: Future<Output: IntoOutcome> + Send + 'static,
    {
        self.settings.batch_size = 1;
        self.start(handler::single(handler)).await
    }

    /// As [`run`](Self::run), with a handler of up to [`batch_size`](Self::batch_size) messages at once, in id order as far as
    /// they come from one range. It answers with one [`Outcome`](crate::Outcome) for each, or with one for all.
    ///
    /// ```no_run
    /// # async fn f(lines: sqlstreams::Stream<String>) -> sqlstreams::Result<()> {
    /// lines.group("index").consumer().batch_size(500).run_batches(async |batch| {
    ///     println!("{} lines", batch.len());
    ///     Ok::<_, std::io::Error>(()) // all of them; Err: all are tried again
    /// }).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors, cancellation, panics
    /// As [`run`](Self::run).
    pub async fn run_batches<H, F>(self, handler: H) -> Result<Consumed>
    where
        H: Fn(Vec<Delivery<T>>) -> F + Send + Sync + 'static,
        F: Future<Output: IntoOutcomes> + Send + 'static,
    {
        self.start(handler::batch(handler)).await
    }

    /// As [`run`](Self::run), with an open transaction for each message: what the handler writes in it and the settling of
    /// the message commit together, so these effects happen exactly once, whatever crashes. An error rolls it back and is
    /// recorded as a failure, and so is a commit that the server refuses. A message whose lease was lost is rolled back.
    ///
    /// The handler must drop the transaction before it returns, and leave COMMIT and ROLLBACK to the consumer: one that keeps
    /// it or ends it has failed. What it sets must be for the transaction only: see [`Transaction`]. Its
    /// [`timeout`](Self::timeout) counts from when it has the transaction; when it is over, or the handler is dropped, what
    /// runs on the server is cancelled. Each running handler holds a connection of the client's pool, and one connection is
    /// always left for the rest: at most `pool_size` − 1 handlers run at once.
    ///
    /// Should the connection break, the message is put off for a moment, up to three times, before that counts as an attempt:
    /// it is seldom the handler's fault. A server that hangs up because the handler sat still for too long
    /// (`idle_in_transaction_session_timeout`) counts at once.
    ///
    /// ```no_run
    /// # #[derive(serde::Serialize, serde::Deserialize)] struct Payment { account: i64, amount: i64 }
    /// # async fn f(payments: sqlstreams::Stream<Payment>) -> sqlstreams::Result<()> {
    /// payments.group("ledger").consumer().run_transactional(async |payment, tx| {
    ///     let Payment { account, amount } = &payment.payload;
    ///     tx.execute("UPDATE account SET balance = balance + $2 WHERE id = $1", &[account, amount]).await?;
    ///     Ok::<_, tokio_postgres::Error>(())
    /// }).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors, cancellation, panics
    /// As [`run`](Self::run).
    pub async fn run_transactional<H, F>(mut self, handler: H) -> Result<Consumed>
    where
        H: Fn(Delivery<T>, Transaction) -> F + Send + Sync + 'static,
        F: Future<Output: IntoOutcome> + Send + 'static,
    {
        (self.settings.transactional, self.settings.batch_size) = (true, 1);
        self.start(handler::transactional(handler)).await
    }

    /// As [`run_transactional`](Self::run_transactional), with one transaction for up to [`batch_size`](Self::batch_size)
    /// messages. It commits if the handler has handled any of them, and settles those; the others are tried again. So a
    /// handler that has written for a message that fails afterwards has to undo that, with a savepoint, or to fail as a whole.
    ///
    /// # Errors, cancellation, panics
    /// As [`run`](Self::run).
    pub async fn run_transactional_batches<H, F>(mut self, handler: H) -> Result<Consumed>
    where
        H: Fn(Vec<Delivery<T>>, Transaction) -> F + Send + Sync + 'static,
        F: Future<Output: IntoOutcomes> + Send + 'static,
    {
        self.settings.transactional = true;
        self.start(handler::transactional_batch(handler)).await
    }

    async fn start(self, handler: Handler<T>) -> Result<Consumed> {
        let wrong = |what: &str| Err(Error::new(ErrorKind::InvalidArgument, what.to_owned()));
        if !(1..=10_000).contains(&self.settings.concurrency) {
            return wrong("a consumer's concurrency is 1 to 10,000");
        }
        if self.settings.timeout.is_some_and(|timeout| timeout.is_zero()) {
            return wrong("a timeout of 0 would let no handler run: leave it out for none");
        }
        if !(1..=10_000).contains(&self.settings.batch_size) {
            return wrong("a batch has 1 to 10,000 messages");
        }
        run::run(self.group, self.settings, handler).await
    }
}
