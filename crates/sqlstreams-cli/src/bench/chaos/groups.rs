//! The groups, each with its own promise.

use std::time::Duration;

use sqlstreams::{Group, Mode, RetryPolicy, Stream};

/// Handlers write by themselves: every message at least once, in any order.
pub(crate) const PLAIN: &str = "plain";
/// The same in an ordered group: messages of one key in the order of their ids.
pub(crate) const ORDERED: &str = "ordered";
/// Handlers write in the transaction that settles the message: exactly once.
pub(crate) const TRANSACTIONAL: &str = "transactional";

/// How long a lease lasts without a heartbeat.
pub(crate) const LEASE: Duration = Duration::from_secs(2);
/// The bound of the delay after a first failure.
const BACKOFF: Duration = Duration::from_millis(100);

/// All of them.
#[derive(Debug)]
pub(crate) struct Groups {
    pub(crate) plain: Group<i64>,
    pub(crate) ordered: Group<i64>,
    pub(crate) transactional: Group<i64>,
}

impl Groups {
    pub(crate) async fn create(stream: &Stream<i64>) -> sqlstreams::Result<Self> {
        // Failures are made: they are not to hold a key up for long, and not to make dead letters.
        let retry = RetryPolicy::attempts(20).backoff(BACKOFF, 2.0, BACKOFF * 8);
        let create = async |name, mode| {
            stream.group(name).lease(LEASE).retry(retry).mode(mode).create().await
        };
        Ok(Self {
            plain: create(PLAIN, Mode::Parallel).await?,
            ordered: create(ORDERED, Mode::Ordered).await?,
            transactional: create(TRANSACTIONAL, Mode::Parallel).await?,
        })
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &Group<i64>> {
        [&self.plain, &self.ordered, &self.transactional].into_iter()
    }
}
