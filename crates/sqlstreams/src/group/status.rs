//! Where groups stand.

use std::time::{Duration, SystemTime};

use tokio_postgres::Row;

use super::{Mode, RetryPolicy};
use crate::error::Result;
use crate::stream::Stream;

/// Where a group stands, and how it is set.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct GroupStatus {
    /// The stream's name.
    pub stream: String,
    /// The group's name.
    pub group: String,
    /// Every id up to here was handed out.
    pub claimed: i64,
    /// Every id up to here is done or has become an exception.
    pub resolved: i64,
    /// The last id drawn in the stream.
    pub head: i64,
    /// How many ids there are beyond `claimed`: an upper bound of the messages that wait.
    pub lag: i64,
    /// Leases that are open, also those that ran out or were handed back and wait for a new owner.
    pub open_leases: i64,
    /// Exceptions that wait for their next attempt.
    pub ready: i64,
    /// Exceptions that are being tried.
    pub inflight: i64,
    /// Messages of an ordered group that wait for an earlier one of their key.
    pub deferred: i64,
    /// Dead letters.
    pub dead: i64,
    /// `ready`, `inflight`, `deferred` or `dead` is an estimate of the planner's: each is counted up to 100,000, so that looking takes about as long however many
    /// there are. [`Group::count_dead_letters`](crate::Group::count_dead_letters) counts.
    pub estimated: bool,
    /// About how many messages had [expired](crate::Outgoing::expires_in) before a handler could have them, as its consumers tell every
    /// few seconds and when they stop; one that dies may not have told of its last.
    pub expired: i64,
    /// The same of messages that were to be tried again when a newer one of their key had come: see
    /// [`newest_only`](crate::GroupBuilder::newest_only).
    pub superseded: i64,
    /// How many ids of the stream [retention](crate::Retention::drop_unread) took before the group had claimed them: an upper bound of the messages
    /// that it never saw.
    pub dropped: i64,
    /// How many ids are handed out once more, or still to be: see [`Group::replay`](crate::Group::replay).
    pub replaying: i64,
    /// Nothing is handed out: see [`Group::pause`](crate::Group::pause).
    pub paused: bool,
    /// See [`GroupBuilder::max_in_flight`](crate::GroupBuilder::max_in_flight); `None`: no limit.
    pub max_in_flight: Option<u32>,
    /// See [`GroupBuilder::rate_limit`](crate::GroupBuilder::rate_limit); `None`: no limit.
    pub rate_limit: Option<f64>,
    /// How it hands out its messages.
    pub mode: Mode,
    /// Of each key only the newest message: see [`GroupBuilder::newest_only`](crate::GroupBuilder::newest_only).
    pub newest_only: bool,
    /// How long a lease lasts without a heartbeat.
    pub lease: Duration,
    /// How failures are tried again.
    pub retry: RetryPolicy,
    /// A warning: nobody has consumed it for long, and it will be dropped then, unless somebody does; see [`Stream::set_group_expiry`].
    pub expires_at: Option<SystemTime>,
}

impl<T, C> Stream<T, C> {
    /// Where the stream's groups stand, by name.
    ///
    /// # Errors
    /// The database's.
    pub async fn groups(&self) -> Result<Vec<GroupStatus>> {
        self.status_of(None).await
    }

    pub(super) async fn status_of(&self, group: Option<&str>) -> Result<Vec<GroupStatus>> {
        let client = &self.inner.client;
        let rows = client
            .query(
                &client.inner.queries.list_cursors,
                &[&Some(self.name()), &group],
                "look at the groups",
            )
            .await?;
        rows.iter().map(GroupStatus::from_row).collect()
    }
}

impl GroupStatus {
    fn from_row(row: &Row) -> Result<Self> {
        let seconds = |column: usize| Duration::from_secs_f64(row.get::<_, f64>(column).max(0.0));
        let number = |n: i32| u32::try_from(n).unwrap_or_default();
        Ok(Self {
            stream: row.get(0),
            group: row.get(1),
            claimed: row.get(2),
            resolved: row.get(3),
            head: row.get(4),
            lag: row.get(5),
            open_leases: row.get(6),
            ready: row.get(7),
            inflight: row.get(8),
            dead: row.get(9),
            paused: row.get(10),
            max_in_flight: row.get::<_, Option<i32>>(11).map(number),
            rate_limit: row.get(12),
            lease: seconds(13),
            retry: RetryPolicy {
                max_attempts: number(row.get(14)),
                backoff_base: seconds(15),
                backoff_factor: row.get(16),
                backoff_cap: seconds(17),
            },
            deferred: row.get(18),
            mode: row.get::<_, &str>(19).parse()?,
            newest_only: row.get(20),
            expired: row.get(21),
            superseded: row.get(22),
            expires_at: row.get(23),
            dropped: row.get(24),
            replaying: row.get(25),
            estimated: row.get(26),
        })
    }
}
