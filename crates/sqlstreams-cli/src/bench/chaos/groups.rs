//! The groups, each with its own promise.

use std::time::Duration;

use sqlstreams::{Group, Stream};

/// Handlers write by themselves: every message at least once.
pub(crate) const PLAIN: &str = "plain";
/// The same, one message at a time: about in the order of ids.
pub(crate) const ORDERED: &str = "ordered";
/// Handlers write in the transaction that settles the message: exactly once.
pub(crate) const TRANSACTIONAL: &str = "transactional";

/// How long a lease lasts without a heartbeat.
pub(crate) const LEASE: Duration = Duration::from_secs(2);

/// All of them.
#[derive(Debug)]
pub(crate) struct Groups {
    pub(crate) plain: Group<i64>,
    pub(crate) ordered: Group<i64>,
    pub(crate) transactional: Group<i64>,
}

impl Groups {
    pub(crate) async fn create(stream: &Stream<i64>) -> sqlstreams::Result<Self> {
        let create = async |name| stream.group(name).lease(LEASE).create().await;
        Ok(Self {
            plain: create(PLAIN).await?,
            ordered: create(ORDERED).await?,
            transactional: create(TRANSACTIONAL).await?,
        })
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &Group<i64>> {
        [&self.plain, &self.ordered, &self.transactional].into_iter()
    }
}
