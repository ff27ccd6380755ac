//! Retention: how long a stream keeps its messages, and what keeps them from going.

mod archive;
mod detach;
mod step;

use std::time::{Duration, SystemTime};

use tokio_postgres::Row;

pub(crate) use archive::{Place, tidy};
pub(crate) use detach::Detaching;
pub(crate) use step::let_go;

use crate::error::{Error, ErrorKind, Result};
use crate::stream::{Stream, seconds};

/// How often [`Stream::retain`] tries to lock the stream, a second each.
const TRIES: u32 = 5;

/// How long a stream keeps its messages.
///
/// Each limit says what is kept: what is newer than [`keep_for`](Self::keep_for), the newest [`keep_bytes`](Self::keep_bytes), the newest
/// [`keep_count`](Self::keep_count) ids. What lies beyond one of them goes, a whole partition at a time, so about a partition more than that is kept;
/// and nothing goes within a minute of its partition being full. Messages that a group has not resolved stay, unless [`drop_unread`](Self::drop_unread)
/// says otherwise. What failed, dead letters too, stays readable and redrivable when its partition has gone.
///
/// ```no_run
/// # use std::time::Duration;
/// # async fn f(client: &sqlstreams::Client) -> sqlstreams::Result<()> {
/// use sqlstreams::Retention;
///
/// let week = Duration::from_secs(7 * 86_400);
/// let keep = Retention::forever().keep_for(week).keep_bytes(10_000_000_000).keep_dead_for(week * 12);
/// let orders = client.stream::<String>("orders").retention(keep).create_if_missing().await?;
/// println!("kept from id {} on", orders.info().await?.first_id);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
#[must_use]
pub struct Retention {
    /// See [`keep_for`](Self::keep_for). `None`: no such limit.
    pub age: Option<Duration>,
    /// See [`keep_bytes`](Self::keep_bytes). `None`: no such limit.
    pub bytes: Option<u64>,
    /// See [`keep_count`](Self::keep_count). `None`: no such limit.
    pub count: Option<u64>,
    /// See [`until_resolved`](Self::until_resolved).
    pub resolved: bool,
    /// See [`drop_unread`](Self::drop_unread).
    pub unread: bool,
    /// See [`keep_dead_for`](Self::keep_dead_for). `None`: for ever.
    pub dead: Option<Duration>,
}

/// Settings as they are sent: 0 lifts a limit, `None` keeps what is.
#[derive(Debug, Default)]
pub(crate) struct Params {
    pub(crate) age: Option<f64>,
    pub(crate) bytes: Option<i64>,
    pub(crate) count: Option<i64>,
    pub(crate) resolved: Option<bool>,
    pub(crate) drop_unread: Option<bool>,
    pub(crate) dead: Option<f64>,
}

impl Retention {
    /// Everything is kept.
    pub fn forever() -> Self {
        Self::default()
    }

    /// Messages may go when all of their partition have been visible to everybody for longer than this, at least a second.
    pub fn keep_for(mut self, age: Duration) -> Self {
        self.age = Some(age);
        self
    }

    /// Messages may go when the full partitions above theirs take so many bytes on disk, with indexes.
    pub fn keep_bytes(mut self, bytes: u64) -> Self {
        self.bytes = Some(bytes);
        self
    }

    /// Messages may go when so many ids have been drawn since. Ids that were rolled back count, too.
    pub fn keep_count(mut self, ids: u64) -> Self {
        self.count = Some(ids);
        self
    }

    /// Messages go when every group has resolved them, that is, when they are done, or have become exceptions. Nothing goes as long as the stream has
    /// no group.
    pub fn until_resolved(mut self) -> Self {
        self.resolved = true;
        self
    }

    /// Whether messages beyond a limit go though some group has not resolved them. That group goes on behind the gap;
    /// [`GroupStatus::dropped`](crate::GroupStatus::dropped) counts what it missed. Default: no.
    pub fn drop_unread(mut self, drop: bool) -> Self {
        self.unread = drop;
        self
    }

    /// Dead letters go when they have been dead for longer than this, at least a second. Default: they are kept until somebody redrives or discards them.
    pub fn keep_dead_for(mut self, age: Duration) -> Self {
        self.dead = Some(age);
        self
    }

    /// Whether there is no limit at all.
    pub fn is_forever(&self) -> bool {
        *self == Self { unread: self.unread, ..Self::forever() }
    }

    pub(crate) fn params(&self) -> Params {
        let number = |n: Option<u64>| Some(n.map_or(0, |n| i64::try_from(n).unwrap_or(i64::MAX)));
        // Nothing is not "for ever": it is refused below a second.
        let time = |t: Option<Duration>| Some(t.map_or(0.0, |t| seconds(t).max(1e-6)));
        Params {
            age: time(self.age),
            // The same of none at all: it is refused as negative.
            bytes: number(self.bytes).filter(|_| self.bytes != Some(0)).or(Some(-1)),
            count: number(self.count).filter(|_| self.count != Some(0)).or(Some(-1)),
            resolved: Some(self.resolved),
            drop_unread: Some(self.unread),
            dead: time(self.dead),
        }
    }

    pub(crate) fn from_row(row: &Row, first: usize) -> Self {
        let time = |column: usize| {
            row.get::<_, Option<f64>>(column).and_then(|s| Duration::try_from_secs_f64(s).ok())
        };
        let number = |column: usize| row.get::<_, Option<i64>>(column).map(i64::unsigned_abs);
        Self {
            age: time(first),
            bytes: number(first + 1),
            count: number(first + 2),
            resolved: row.get(first + 3),
            unread: row.get(first + 4),
            dead: time(first + 5),
        }
    }
}

/// What keeps messages that are to go from going: [`StreamInfo::hold`](crate::StreamInfo::hold).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RetentionHold {
    /// What it is.
    pub reason: HoldReason,
    /// The group that is furthest behind, if it is one.
    pub group: Option<String>,
    /// Up to which id that group has resolved the log, now.
    pub resolved: Option<i64>,
    /// Since when, as far as was looked.
    pub since: SystemTime,
    /// More, for people: which session is in the way, and what is made of partitions that cannot be dropped.
    pub detail: Option<String>,
}

/// The kinds of a [`RetentionHold`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum HoldReason {
    /// A group has not resolved the messages yet.
    Group,
    /// A transaction that has read or written the log, or an old snapshot, is open: the partition leaves when it ends. Its disk space comes back before, unless
    /// the partition itself is being read.
    Detach,
    /// Whoever does the upkeep is not the owner of the tables: run it as who is.
    Privilege,
    /// Something of somebody's is made of a partition, a view say, so that its table cannot be dropped; [`detail`](RetentionHold::detail) names it. The partition
    /// is out of the log and empty, and goes when that is dropped. It keeps no other from going.
    Depends,
}

impl HoldReason {
    /// `group`, `detach`, `privilege` or `depends`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Group => "group",
            Self::Detach => "detach",
            Self::Privilege => "privilege",
            Self::Depends => "depends",
        }
    }
}

impl RetentionHold {
    pub(crate) fn from_row(row: &Row, first: usize) -> Result<Option<Self>> {
        let reason = match row.get::<_, Option<&str>>(first) {
            None => return Ok(None),
            Some("group") => HoldReason::Group,
            Some("detach") => HoldReason::Detach,
            Some("privilege") => HoldReason::Privilege,
            Some("depends") => HoldReason::Depends,
            Some(other) => {
                let text =
                    format!("retention is held up by {other:?}, which this version does not know");
                return Err(Error::new(ErrorKind::Database, text));
            }
        };
        Ok(Some(Self {
            reason,
            group: row.get(first + 1),
            resolved: row.get(first + 2),
            since: row.get(first + 3),
            detail: row.get(first + 4),
        }))
    }
}

/// What [`Stream::retain`] did.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Retained {
    /// How many partitions are gone.
    pub partitions: u64,
    /// How many dead letters went.
    pub dead_letters: u64,
    /// Messages that are to go wait for something: see [`StreamInfo::hold`](crate::StreamInfo::hold), or `busy`.
    pub waiting: bool,
    /// Somebody had the stream locked for as long as this tried, about five seconds: another that lets its messages go, as a rule, be it the upkeep or
    /// another call. What was left is done by the upkeep, or by the next call.
    pub busy: Option<RetentionBusy>,
}

/// Who kept [`Stream::retain`] from the stream.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RetentionBusy {
    /// The session, for people: the process on the server and what is known of it. `None`: it had ended when it was looked for.
    pub by: Option<String>,
    /// Since when its transaction runs; `None` if that is not known.
    pub since: Option<SystemTime>,
}

impl<T, C> Stream<T, C> {
    /// Lets go now what the stream's [`Retention`] does not keep, which maintenance does by itself every few seconds. Any number may call it at any time.
    ///
    /// Messages are taken out of the log by `DETACH … CONCURRENTLY`: neither producers nor consumers wait. Whoever has the log open is waited for, but here for
    /// seconds only; it goes on when it is called again, also after a crash.
    ///
    /// # Errors
    /// The database's. What was done before stays so.
    ///
    /// # Cancellation
    /// May be dropped at any time; a partition that is halfway out stays so until it is called again.
    pub async fn retain(&self) -> Result<Retained> {
        let client = &self.inner.client;
        let mut done = Retained::default();
        let mut tries = TRIES;
        loop {
            let ended = let_go(client, self.inner.id).await?;
            done.partitions += ended.gone;
            done.waiting = ended.waiting;
            done.busy = match ended.busy {
                true => Some(step::busy(client, self.inner.id).await?),
                false => None,
            };
            tries -= u32::from(ended.busy);
            if tries == 0 || !ended.more && !ended.busy {
                break;
            }
        }
        let mut place = Place::default();
        loop {
            let ended = tidy(client, self.inner.id, &mut place).await?;
            done.dead_letters += ended.dead_letters;
            if !ended.more {
                return Ok(done);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_not_for_ever() {
        let params = Retention::forever().params();
        assert_eq!((params.age, params.bytes, params.dead), (Some(0.0), Some(0), Some(0.0)));
        let nothing = Retention::forever().keep_for(Duration::ZERO).keep_bytes(0).keep_count(0);
        let params = nothing.params();
        assert!(params.age > Some(0.0) && params.bytes < Some(0) && params.count < Some(0));
        assert!(Retention::forever().drop_unread(true).is_forever());
        assert!(!nothing.is_forever());
    }
}
