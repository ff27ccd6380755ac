//! Consuming: a consumer claims ranges of the log and due exceptions, runs a handler on their messages with bounded
//! concurrency, and reports what became of them.
//!
//! ```text
//!             claim / fetch                    jobs
//!   server  ───────────────►  coordinator  ───────────►  workers (one per unit of concurrency)
//!           ◄───────────────   (run.rs)    ◄───────────   decode, handle, catch panics and timeouts
//!            settle / extend                 outcomes
//! ```

mod held;
mod ids;
mod pace;
mod protocol;
mod run;
mod workers;

use std::future::Future;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::error::{Error, ErrorKind, Result};
use crate::group::GroupBuilder;
use crate::message::Message;
use crate::outcome::IntoOutcome;
use crate::payload::{Codec, Json};

/// A consumer that is to be started; from [`GroupBuilder::consumer`] or [`Group::consumer`](crate::Group::consumer).
///
/// Any number of consumers may run for a group, in one process or many: they share its messages.
///
/// # Delivery
/// Every committed message reaches the group at least once. A handler that fails has its message tried again; a process
/// that dies has its unfinished messages handed to another consumer once their lease runs out. Messages are started in
/// id order but run concurrently.
#[must_use]
pub struct ConsumerBuilder<T, C = Json> {
    group: GroupBuilder<T, C>,
    settings: Settings,
}

/// What a consumer can be told.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub(crate) concurrency: usize,
    pub(crate) timeout: Option<Duration>,
    pub(crate) shutdown_timeout: Duration,
    pub(crate) stop: CancellationToken,
    pub(crate) abort: CancellationToken,
}

/// What a consumer did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Consumed {
    /// Messages that were handled.
    pub handled: u64,
    /// Attempts that failed: the message is tried again, or dead if it was the last one.
    pub failed: u64,
    /// Messages that became dead letters without further attempts: the handler said so, or they cannot be decoded.
    pub dead_at_once: u64,
    /// Messages that the handler put off.
    pub delayed: u64,
}

impl<T: Send + 'static, C: Codec<T>> ConsumerBuilder<T, C> {
    pub(crate) fn new(group: GroupBuilder<T, C>) -> Self {
        let settings = Settings {
            concurrency: 16,
            timeout: None,
            shutdown_timeout: Duration::from_secs(30),
            stop: CancellationToken::new(),
            abort: CancellationToken::new(),
        };
        Self { group, settings }
    }

    /// How many handlers run at once, at least 1. Default: 16.
    pub fn concurrency(mut self, handlers: usize) -> Self {
        self.settings.concurrency = handlers;
        self
    }

    /// How long a handler may take; one that takes longer is dropped and counts as failed. Default: as long as it likes.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.settings.timeout = Some(timeout);
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

    /// Consumes until it is stopped ([`stop_on`](Self::stop_on)).
    ///
    /// The handler's answer decides what becomes of the message: see [`Outcome`](crate::Outcome). A panic or a timeout
    /// counts as a failure. Broken connections are mended, with messages being repeated where their lease ran out.
    ///
    /// A handler must not block its thread (`std::thread::sleep`, long computations): leases are renewed by a task of the same
    /// runtime. Move such work to `tokio::task::spawn_blocking`, or messages are repeated.
    ///
    /// ```no_run
    /// # #[derive(serde::Serialize, serde::Deserialize)] struct Order { id: u64 }
    /// # async fn f(orders: sqlstreams::Stream<Order>) -> sqlstreams::Result<()> {
    /// orders.group("receipts").consumer().concurrency(4).run(async |message| {
    ///     if message.payload.id == 0 {
    ///         return Err("an order without a number");
    ///     }
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
    /// Dropped, the running handlers are dropped too, and their messages repeated once their lease has run out. Prefer
    /// [`stop_on`](Self::stop_on).
    pub async fn run<H, F>(self, handler: H) -> Result<Consumed>
    where
        H: Fn(Message<T>) -> F + Send + Sync + 'static,
        F: Future<Output: IntoOutcome> + Send + 'static,
    {
        self.start(handler, false).await
    }

    /// As [`run`](Self::run), and stops by itself once everything that was in the stream when it started is resolved:
    /// handled or dead, retries included, whichever consumer did it.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    ///
    /// # Cancellation
    /// As [`run`](Self::run).
    pub async fn run_until_caught_up<H, F>(self, handler: H) -> Result<Consumed>
    where
        H: Fn(Message<T>) -> F + Send + Sync + 'static,
        F: Future<Output: IntoOutcome> + Send + 'static,
    {
        self.start(handler, true).await
    }

    async fn start<H, F>(self, handler: H, until_caught_up: bool) -> Result<Consumed>
    where
        H: Fn(Message<T>) -> F + Send + Sync + 'static,
        F: Future<Output: IntoOutcome> + Send + 'static,
    {
        if self.settings.concurrency == 0 {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                "a consumer needs a concurrency of at least 1",
            ));
        }
        let group = self.group.create_if_missing().await?;
        let protocol = protocol::Protocol { stream: group.stream.inner.clone(), group: group.id };
        run::run::<T, C, H, F>(protocol, self.settings, handler, until_caught_up).await
    }
}
