//! A message in the hands of a handler.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::later;
use crate::message::Message;

/// A message that is to be handled, and how things stand with it. The message's own fields can be used directly:
/// `delivery.payload`.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Delivery<T> {
    /// The message.
    pub message: Message<T>,
    /// How it came to the handler, and how long it may stay.
    pub context: Context,
}

impl<T> Delivery<T> {
    pub(crate) fn new(message: Message<T>, context: Context) -> Self {
        Self { message, context }
    }

    /// Which attempt of this group this is, counted from 1.
    pub fn attempt(&self) -> u32 {
        self.context.attempt()
    }

    /// The payload by itself.
    pub fn into_payload(self) -> T {
        self.message.payload
    }
}

impl<T> Deref for Delivery<T> {
    type Target = Message<T>;

    fn deref(&self) -> &Message<T> {
        &self.message
    }
}

impl<T> DerefMut for Delivery<T> {
    fn deref_mut(&mut self) -> &mut Message<T> {
        &mut self.message
    }
}

/// How a message came to a handler, and how long it may stay. Cheap to clone: give one to what the handler spawns.
#[derive(Debug, Clone)]
pub struct Context {
    names: Arc<Names>,
    history: History,
    over: CancellationToken,
    deadline: Option<Arc<Deadline>>,
    expires: Option<Instant>,
}

/// Of whom a consumer handles messages.
#[derive(Debug)]
pub(crate) struct Names {
    pub(crate) stream: String,
    pub(crate) group: String,
}

/// What happened to a message in its group before.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct History {
    pub(crate) attempts: u32,
    pub(crate) delays: u32,
    pub(crate) first_failed_at: Option<SystemTime>,
}

/// Until when a handler may run; it can be moved.
#[derive(Debug)]
pub(crate) struct Deadline {
    /// From when, and until when.
    span: Mutex<(Instant, Instant)>,
    moved: Notify,
}

impl Deadline {
    /// So long from now.
    pub(crate) fn after(limit: Duration) -> Self {
        let now = Instant::now();
        Self { span: Mutex::new((now, later(now, limit))), moved: Notify::new() }
    }

    /// Only now begins what it is for.
    pub(crate) fn restart(&self, limit: Duration) {
        let now = Instant::now();
        *self.span() = (now, later(now, limit));
        self.moved.notify_one();
    }

    fn at(&self) -> Instant {
        self.span().1
    }

    fn set(&self, at: Instant) {
        self.span().1 = at;
        self.moved.notify_one();
    }

    /// How long it is from beginning to end.
    pub(crate) fn limit(&self) -> Duration {
        let (since, at) = *self.span();
        at.saturating_duration_since(since)
    }

    fn span(&self) -> MutexGuard<'_, (Instant, Instant)> {
        self.span.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns when the deadline has passed, wherever it was moved meanwhile.
    pub(crate) async fn passed(&self) {
        loop {
            let at = self.at();
            if Instant::now() >= at {
                return;
            }
            tokio::select! {
                () = tokio::time::sleep_until(at.into()) => {}
                () = self.moved.notified() => {}
            }
        }
    }
}

impl Context {
    pub(crate) fn new(
        names: Arc<Names>,
        history: History,
        over: CancellationToken,
        deadline: Option<Arc<Deadline>>,
        expires: Option<Instant>,
    ) -> Self {
        Self { names, history, over, deadline, expires }
    }

    /// The stream's name.
    pub fn stream(&self) -> &str {
        &self.names.stream
    }

    /// The group's name.
    pub fn group(&self) -> &str {
        &self.names.group
    }

    /// Which attempt of this group this is, counted from 1. Failures count, [`Delay`](crate::Outcome::Delay)s and crashes of
    /// consumers do not.
    pub fn attempt(&self) -> u32 {
        self.history.attempts.saturating_add(1)
    }

    /// How often handlers of this group have put the message off, or were put off because their transaction's connection broke.
    pub fn delays(&self) -> u32 {
        self.history.delays
    }

    /// When it failed, or was put off, for the first time, by the database's clock; `None` on the first delivery.
    pub fn first_failed_at(&self) -> Option<SystemTime> {
        self.history.first_failed_at
    }

    /// When the handler will have taken too long ([`timeout`](crate::ConsumerBuilder::timeout)); `None` when it may take as
    /// long as it likes. The lease of the message is no such limit: it is renewed while the consumer lives.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline.as_ref().map(|deadline| deadline.at())
    }

    /// When the message [expires](crate::Outgoing::expires_in), `None` if it does not: by the local clock that nobody sets, and not later
    /// than by the database's, so that it can be compared with [`Instant::now`] whatever the machine's time is. It expires a
    /// round trip earlier at most. The handler is not stopped then.
    pub fn expires(&self) -> Option<Instant> {
        self.expires
    }

    /// Gives the handler this long from now, whatever the timeout left it. Without a timeout it does nothing.
    pub fn extend(&self, time: Duration) {
        if let Some(deadline) = &self.deadline {
            let now = Instant::now();
            deadline.set(later(now, time));
        }
    }

    /// Cancelled when the message is about to be, or was, given to another consumer: its lease could not be renewed in time. What
    /// the handler does after that may be done twice, and its outcome is recorded only if nobody else has the message yet. The
    /// handler itself is dropped at its next `.await` once the lease is over; what it has spawned, or blocks a thread, has to look here.
    pub fn cancellation(&self) -> &CancellationToken {
        &self.over
    }
}
