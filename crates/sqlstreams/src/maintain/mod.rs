//! Maintenance: what a log needs that nobody waits for. Partitions are made ahead, what has outlived its time is removed.
//!
//! ```text
//!   duty.rs          a task beside the consumers of a client, or `Maintenance::run` by itself
//!   maintainer.rs    holds the lease, asks what is due of all streams in one statement, and runs it
//!   step.rs          the steps
//!   firing.rs        schedules, at the moment that they are due
//!   status.rs        who does it, and what came of it
//! ```
//! The rules are in sql/functions/maintain.sql.

mod duty;
mod firing;
mod maintainer;
mod status;
mod step;

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio_util::sync::CancellationToken;

pub(crate) use self::duty::Duty;
use self::maintainer::{Again, Maintainer, OnStep, Pass};
pub use self::status::{MaintenanceStatus, StepFailure, StepStatus, StreamHold};
use crate::client::Client;
use crate::error::{Error, ErrorKind, Result};

/// So many passes are enough for [`Maintenance::once`]: what is due then is so time and again.
const PASSES: usize = 10_000;

/// The upkeep of an installation: from [`Client::maintenance`].
///
/// Partitions of all streams are made ahead, for ten minutes at the highest rate that was seen and at least three of them; idempotency keys that have outlived
/// their window are removed; [compacted](crate::StreamBuilder::compacted) streams are compacted, and their space is given back; messages that a stream's [`Retention`](crate::Retention) does not keep go. Every process that consumes
/// does so by itself, unless [told not to](crate::ClientBuilder::maintenance): of all of them one at a time, under a lease that another takes over within seconds
/// when it dies. This is for doing it where nothing is consumed, and for looking at it.
///
/// ```no_run
/// # async fn f(client: sqlstreams::Client) -> sqlstreams::Result<()> {
/// let status = client.maintenance().status().await?;
/// for failure in status.failures {
///     println!("{} of {:?}: {}", failure.step, failure.stream, failure.error);
/// }
/// # Ok(()) }
/// ```
#[must_use]
pub struct Maintenance {
    client: Client,
    stop: CancellationToken,
    on_step: OnStep,
}

impl fmt::Debug for Maintenance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Maintenance").field("client", &self.client).finish_non_exhaustive()
    }
}

/// A step of the maintenance that was run; see [`Maintenance::on_step`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct StepRun {
    /// Which: `partitions`, `schedules`, `seal`, `keys`, `groups`, `compact`, `reclaim`, `retention` or `archive`.
    pub step: &'static str,
    /// Of which stream; `None`: of the whole installation.
    pub stream: Option<String>,
    /// How long it took.
    pub took: Duration,
    /// Why it failed, if it did. It is tried again by itself.
    pub error: Option<String>,
}

/// What [`Maintenance::once`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Maintained {
    /// Whether it was for us to do. If not, another process is at it.
    pub held: bool,
    /// How many steps were run.
    pub steps: usize,
}

impl Client {
    /// The maintenance of all streams; see [`Maintenance`]. Nothing is sent yet.
    pub fn maintenance(&self) -> Maintenance {
        Maintenance {
            client: self.clone(),
            stop: CancellationToken::new(),
            on_step: Arc::new(Mutex::new(|_: &StepRun| {})),
        }
    }
}

impl Maintenance {
    /// Cancelling the token ends [`run`](Self::run), after the step that it is at.
    pub fn stop_on(mut self, token: CancellationToken) -> Self {
        self.stop = token;
        self
    }

    /// Calls this with each step that was run. It should not block.
    pub fn on_step(mut self, tell: impl FnMut(&StepRun) + Send + 'static) -> Self {
        self.on_step = Arc::new(Mutex::new(tell));
        self
    }

    /// Does the maintenance until it is stopped, or waits for a process that does it to be gone. Trouble with the database is waited out. When it ends it
    /// gives the lease back.
    ///
    /// # Errors
    /// [`Closed`](ErrorKind::Closed), if it panics.
    ///
    /// # Cancellation
    /// Dropped, it ends as if stopped.
    pub async fn run(self) -> Result<()> {
        let stop = self.stop.child_token();
        let _dropped = stop.clone().drop_guard();
        let maintainer = Maintainer::new(self.client.clone(), stop, self.on_step);
        let running = self.client.inner.background.handle().spawn(maintainer.run());
        running.await.map_err(|e| {
            Error::new(ErrorKind::Closed, "the task of the maintenance has panicked").with_source(e)
        })
    }

    /// Does what is due now, if no other process does it, and ends. For whoever would rather be called by a timer, every minute say.
    ///
    /// # Errors
    /// [`PermissionDenied`](ErrorKind::PermissionDenied) where the role does not own the schema's tables, or the database's. A step that fails is no error: [`on_step`](Self::on_step) and [`status`](Self::status) tell.
    ///
    /// # Cancellation
    /// Dropped, it ends where it is, and its lease runs out within 10 s.
    pub async fn once(self) -> Result<Maintained> {
        let mut maintainer = Maintainer::new(self.client.clone(), self.stop, self.on_step);
        let mut steps = 0;
        for _ in 0..PASSES {
            match maintainer.pass().await? {
                Pass::Elsewhere(_) => return Ok(Maintained { held: false, steps }),
                Pass::Done { ran, again, .. } => {
                    steps += ran;
                    if again == Again::No {
                        break;
                    }
                }
            }
        }
        maintainer.release().await;
        Ok(Maintained { held: true, steps })
    }
}
