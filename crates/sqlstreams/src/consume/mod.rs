//! Consuming: a consumer claims ranges of the log and due exceptions, runs a handler on their messages with bounded
//! concurrency, and reports what became of them.
//!
//! ```text
//!             claim / fetch                    jobs
//!   server  ───────────────►  coordinator  ───────────►  workers (one per unit of concurrency)
//!           ◄───────────────   settles     ◄───────────   decode, handle, commit, catch panics and timeouts
//!           ◄───────────────   keeper                     (on the caller's runtime)
//!              heartbeats     (both on the client's own thread)
//! ```

mod builder;
mod coordinator;
mod delivery;
mod fairness;
mod gate;
mod handler;
mod health;
mod held;
mod ids;
mod keeper;
mod ordered;
mod pace;
mod protocol;
mod run;
mod sieve;
mod straight;
mod tally;
mod term;
mod transaction;
mod turns;
mod workers;

use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use crate::outcome::Verdict;

pub use self::builder::{Budget, ConsumerBuilder};
pub use self::delivery::{Context, Delivery};
pub use self::health::{Activity, Health, HealthSnapshot};
pub use self::transaction::Transaction;

/// What a consumer can be told.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    concurrency: usize,
    batch_size: usize,
    budget: Option<Budget>,
    timeout: Option<Duration>,
    shutdown_timeout: Duration,
    stop: CancellationToken,
    abort: CancellationToken,
    until_caught_up: bool,
    transactional: bool,
    health: Health,
}

/// What a consumer did, as its handlers ended. What ends after its lease was lost may be counted here, although another consumer
/// handles it again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Consumed {
    /// Messages that were handled.
    pub handled: u64,
    /// Attempts that failed: the message is tried again, or dead if it was the last one.
    pub failed: u64,
    /// Messages that became dead letters without further attempts: the handler said so, or they cannot be decoded.
    pub dead_at_once: u64,
    /// Messages that the handler put off, or that were because its transaction's connection broke.
    pub delayed: u64,
    /// Messages that had [expired](crate::Outgoing::expires_in) before a handler could have them.
    pub expired: u64,
    /// Messages that were to be tried again when a newer one of their key had come, of a group that receives the
    /// [newest only](crate::GroupBuilder::newest_only). Those that were superseded before their first attempt are not sent, and
    /// not counted.
    pub superseded: u64,
}

impl Consumed {
    fn count(&mut self, counts: Option<&str>) {
        let Some(counts) = counts else { return };
        let counter = match counts {
            "ok" => &mut self.handled,
            "retry" => &mut self.failed,
            "dead" => &mut self.dead_at_once,
            Verdict::EXPIRED => &mut self.expired,
            Verdict::SUPERSEDED => &mut self.superseded,
            _ => &mut self.delayed,
        };
        *counter += 1;
    }
}

/// Until then, or for ever.
async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}

/// So long after, or a year, which is for ever, where a clock does not reach that far.
fn later(since: Instant, time: Duration) -> Instant {
    since.checked_add(time).unwrap_or(since + Duration::from_secs(86_400 * 365))
}
