//! Moving a group to another place of its stream.

use std::time::SystemTime;

use tokio_postgres::Row;
use tokio_postgres::types::ToSql;

use super::{Group, Start};
use crate::error::Result;
use crate::payload::Json;

/// A move of a group to another place of its stream, forward or back; from [`Group::seek`].
#[must_use = "nothing happens before run or preview"]
pub struct Seek<T, C = Json> {
    group: Group<T, C>,
    to: Start,
    drop_unfinished: bool,
    repeat_dead: bool,
}

/// What a [`Seek`] did, or would do. Counts of ids are upper bounds of messages: some ids have none, or one that is not for the group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Sought {
    /// Every id up to here had been handed out; of a group with lanes, in the one that was furthest on.
    pub before: i64,
    /// The group goes on with the message after this id.
    pub after: i64,
    /// How many ids are handed out that had been before.
    pub repeated: i64,
    /// How many ids are passed over that had never been handed out.
    pub skipped: i64,
    /// How many leases ended.
    pub ended_leases: i64,
    /// How many messages up to `after` were handed out and not finished, or waited for another attempt: they are finished as before, or
    /// dropped ([`Seek::drop_unfinished`]).
    pub unfinished: i64,
    /// How many messages above `after` waited for another attempt: they begin anew.
    pub restarted: i64,
    /// How many dead letters there are above `after`: they stay what they are, or are repeated ([`Seek::repeat_dead`]).
    pub dead: i64,
}

impl<T, C> Seek<T, C> {
    /// What was handed out and is not finished, and what waits for another attempt, at or below the new place, is given up, and so are
    /// [replays](Group::replay). Default: it is finished as before. Dead letters stay in any case.
    pub fn drop_unfinished(mut self) -> Self {
        self.drop_unfinished = true;
        self
    }

    /// Dead letters above the new place are handed out again like everything there, and are no dead letters any more. Default: they stay,
    /// and what is read again leaves them out.
    pub fn repeat_dead(mut self) -> Self {
        self.repeat_dead = true;
        self
    }

    /// Moves the group. Durable when it returns. Dropped before that, it happens or it does not.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) for a place beyond the end of the stream,
    /// [`UnknownGroup`](crate::ErrorKind::UnknownGroup), or the database's.
    pub async fn run(self) -> Result<Sought> {
        self.call(false).await
    }

    /// What [`run`](Self::run) would do now. Changes nothing.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub async fn preview(&self) -> Result<Sought> {
        self.call(true).await
    }

    async fn call(&self, preview: bool) -> Result<Sought> {
        let (to, id, at): (Option<&str>, Option<i64>, Option<SystemTime>) = match self.to {
            Start::Beginning => (Some("beginning"), None, None),
            Start::Latest => (Some("latest"), None, None),
            Start::Id(id) => (None, Some(id), None),
            Start::Time(at) => (None, None, Some(at)),
        };
        let unfinished = if self.drop_unfinished { "drop" } else { "keep" };
        let dead = if self.repeat_dead { "repeat" } else { "keep" };
        let stream = &self.group.stream.inner;
        let params: [&(dyn ToSql + Sync); 8] =
            [&stream.id, &self.group.id, &to, &id, &at, &unfinished, &dead, &preview];
        let query = &stream.client.inner.queries.seek;
        let row = stream.client.query_one(query, &params, "move the group").await?;
        Ok(Sought::from_row(&row))
    }
}

impl Sought {
    fn from_row(row: &Row) -> Self {
        Self {
            before: row.get(0),
            after: row.get(1),
            repeated: row.get(2),
            skipped: row.get(3),
            ended_leases: row.get(4),
            unfinished: row.get(5),
            restarted: row.get(6),
            dead: row.get(7),
        }
    }
}

impl<T, C> Group<T, C> {
    /// Moves the group to another place of its stream, forward or back, while its consumers run: they follow within a second.
    ///
    /// Every lease ends. What handlers have in hand then is cancelled as soon as their consumer learns of it, and what they still say of it is refused.
    /// Above the new place everything is handed out, what was handled before as well, and attempts begin anew; of what lies at or below it, what was never handed
    /// out is passed over. What becomes of messages that were begun and not finished, and of dead letters, is chosen:
    /// [`drop_unfinished`](Seek::drop_unfinished), [`repeat_dead`](Seek::repeat_dead).
    ///
    /// ```no_run
    /// # async fn f(group: sqlstreams::Group<u64>) -> sqlstreams::Result<()> {
    /// use sqlstreams::Start;
    /// use std::time::{Duration, SystemTime};
    ///
    /// let an_hour_ago = SystemTime::now() - Duration::from_secs(3_600);
    /// let back = group.seek(Start::Time(an_hour_ago));
    /// println!("{} messages again", back.preview().await?.repeated);
    /// back.run().await?;
    /// # Ok(()) }
    /// ```
    pub fn seek(&self, to: Start) -> Seek<T, C> {
        Seek { group: self.clone(), to, drop_unfinished: false, repeat_dead: false }
    }
}
