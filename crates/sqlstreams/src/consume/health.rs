//! How a consumer is, for those that watch over it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::Consumed;

/// A look at a consumer from outside, from [`ConsumerBuilder::health`](crate::ConsumerBuilder::health). Cheap to clone.
///
/// ```no_run
/// # async fn f(orders: sqlstreams::Stream<String>) -> sqlstreams::Result<()> {
/// let consumer = orders.group("receipts").consumer();
/// let health = consumer.health();
/// tokio::spawn(consumer.run(async |_| {}));
/// println!("{:?}", health.snapshot());
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct Health(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    snapshot: HealthSnapshot,
    progress: Option<Instant>,
    /// How many handlers wait for their transactions in vain, and why the last one does.
    waiting: (usize, String),
}

/// Handlers of a consumer wait, as long as there is one of these.
pub(super) struct HandlersWait(Health);

/// How a consumer was at some moment.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct HealthSnapshot {
    /// What it does.
    pub activity: Activity,
    /// Whether the last thing it asked of the server was answered.
    pub connected: bool,
    /// Whether it is woken by notifications. If not, it polls.
    pub listening: bool,
    /// How long ago it last took in a message or told the server of one; `None` when it never has.
    pub since_progress: Option<Duration>,
    /// Messages that it holds: they wait for a handler, or have one.
    pub held: usize,
    /// Messages that handlers have in hand.
    pub in_flight: usize,
    /// Messages whose handlers run on although the lease was lost.
    pub abandoned: usize,
    /// What it did so far.
    pub consumed: Consumed,
    /// The last trouble it had and waited out, if it is not over.
    pub trouble: Option<String>,
}

/// What a consumer does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Activity {
    /// It was not run yet, or waits for the database to start.
    Starting,
    /// It claims messages and handles them.
    Claiming,
    /// Its group is paused.
    Paused,
    /// It waits for its handlers and hands back the rest.
    Stopping,
    /// It has ended.
    Stopped,
}

impl Health {
    pub(crate) fn new() -> Self {
        let snapshot = HealthSnapshot {
            activity: Activity::Starting,
            connected: false,
            listening: false,
            since_progress: None,
            held: 0,
            in_flight: 0,
            abandoned: 0,
            consumed: Consumed::default(),
            trouble: None,
        };
        Self(Arc::new(Mutex::new(State { snapshot, progress: None, waiting: Default::default() })))
    }

    /// How the consumer is now.
    pub fn snapshot(&self) -> HealthSnapshot {
        let state = self.lock();
        let (waiting, why) = &state.waiting;
        let mut snapshot = state.snapshot.clone();
        snapshot.since_progress = state.progress.map(|at| at.elapsed());
        snapshot.trouble = snapshot.trouble.or_else(|| (*waiting > 0).then(|| why.clone()));
        snapshot
    }

    pub(crate) fn update(&self, change: impl FnOnce(&mut HealthSnapshot)) {
        change(&mut self.lock().snapshot);
    }

    pub(crate) fn progress(&self) {
        self.lock().progress = Some(Instant::now());
    }

    /// A call failed and will be made again, or was answered after all.
    pub(crate) fn trouble(&self, trouble: Option<String>) {
        self.update(|snapshot| {
            snapshot.connected = trouble.is_none();
            snapshot.trouble = trouble;
        });
    }

    /// A handler waits for its transaction. That the consumer's other calls are answered does not end this.
    pub(super) fn handlers_wait(&self, why: String) -> HandlersWait {
        let waiting = &mut self.lock().waiting;
        *waiting = (waiting.0 + 1, why);
        HandlersWait(self.clone())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for HandlersWait {
    fn drop(&mut self) {
        self.0.lock().waiting.0 -= 1;
    }
}
