//! Handing out a range of a stream once more, without moving the group.

use std::time::SystemTime;

use tokio_postgres::types::ToSql;

use super::Group;
use crate::binding::{self, Binding};
use crate::error::Result;
use crate::payload::Json;

/// A range of a stream that a group is to be handed out once more; from [`Group::replay`].
#[must_use = "nothing happens before start or preview"]
pub struct Replay<T, C = Json> {
    group: Group<T, C>,
    from_id: Option<i64>,
    upto_id: Option<i64>,
    from: Option<SystemTime>,
    until: Option<SystemTime>,
    bindings: Vec<Binding>,
}

/// The ids that are handed out once more, `from` and `upto` among them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Replaying {
    /// The replay's number; `None` in a preview.
    pub replay: Option<i64>,
    /// The first id.
    pub from: i64,
    /// The last one.
    pub upto: i64,
}

/// How far a replay is; from [`Group::replays`].
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct ReplayStatus {
    /// Its number.
    pub replay: i64,
    /// The first id.
    pub from: i64,
    /// The last one.
    pub upto: i64,
    /// How many ids are still to be handed out: an upper bound of the messages.
    pub waiting: i64,
    /// How many are handed out and not finished. With neither it is over; what failed is tried again like everything else.
    pub leased: i64,
    /// Only messages that match one of these; none: all that are for the group.
    pub bindings: Vec<Binding>,
    /// When it was begun.
    pub created_at: SystemTime,
    /// By which role.
    pub created_by: String,
    /// It was cancelled before everything was handed out.
    pub cancelled: bool,
}

impl<T, C> Replay<T, C> {
    /// From this id on. Default: from the first message that is still there.
    pub fn from_id(mut self, id: i64) -> Self {
        self.from_id = Some(id);
        self
    }

    /// Up to this id, which is the last. Default, and the most: as far as the group has claimed.
    pub fn upto_id(mut self, id: i64) -> Self {
        self.upto_id = Some(id);
        self
    }

    /// What was produced at this time or later, by the database's clock.
    pub fn from(mut self, at: SystemTime) -> Self {
        self.from = Some(at);
        self
    }

    /// What was produced before this time. Of those that were produced at about the same time, later ones may be among them, too.
    pub fn until(mut self, at: SystemTime) -> Self {
        self.until = Some(at);
        self
    }

    /// Only messages that match this binding, or another one given here; and the group's own, as they are now.
    pub fn bind(mut self, binding: impl Into<Binding>) -> Self {
        self.bindings.push(binding.into());
        self
    }

    /// Begins; the group's consumers do the rest. `None`: the group has claimed nothing of that range. Dropped before it returns, it begins or it does not.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument), [`InvalidBinding`](crate::ErrorKind::InvalidBinding),
    /// [`WrongMode`](crate::ErrorKind::WrongMode) for an ordered group, or the database's.
    pub async fn start(self) -> Result<Option<Replaying>> {
        self.call(false).await
    }

    /// Which ids it would be now. Changes nothing.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub async fn preview(&self) -> Result<Option<Replaying>> {
        self.call(true).await
    }

    async fn call(&self, preview: bool) -> Result<Option<Replaying>> {
        let stream = &self.group.stream.inner;
        let bindings = binding::to_json(&self.bindings)?;
        let params: [&(dyn ToSql + Sync); 8] = [
            &stream.id,
            &self.group.id,
            &self.from_id,
            &self.upto_id,
            &self.from,
            &self.until,
            &bindings,
            &preview,
        ];
        let query = &stream.client.inner.queries.replay;
        let row = stream.client.query_one(query, &params, "replay messages").await?;
        let range = row.get::<_, Option<i64>>(1).zip(row.get(2));
        Ok(range.map(|(from, upto)| Replaying { replay: row.get(0), from, upto }))
    }
}

impl<T, C> Group<T, C> {
    /// Hands out a range of the stream once more, beside everything else: the group stays where it is. Messages are delivered, tried again and become dead
    /// letters as usual. Those that are being handled, wait for another attempt or are dead letters of the group are left out: for dead letters there is
    /// [`redrive`](Self::redrive).
    ///
    /// Consumers take replayed and fresh messages in turn. One replay of a group follows the other. An ordered group has none: move it back with
    /// [`seek`](Self::seek), or let a new group read the range.
    ///
    /// ```no_run
    /// # async fn f(group: sqlstreams::Group<u64>) -> sqlstreams::Result<()> {
    /// if let Some(replay) = group.replay().from_id(1_000).upto_id(2_000).bind("orders.eu.#").start().await? {
    ///     println!("{} to {} once more", replay.from, replay.upto);
    /// }
    /// println!("{} ids to go", group.status().await?.replaying);
    /// # Ok(()) }
    /// ```
    pub fn replay(&self) -> Replay<T, C> {
        Replay {
            group: self.clone(),
            from_id: None,
            upto_id: None,
            from: None,
            until: None,
            bindings: Vec::new(),
        }
    }

    /// The last hundred replays, the latest first.
    ///
    /// # Errors
    /// [`UnknownGroup`](crate::ErrorKind::UnknownGroup), or the database's.
    pub async fn replays(&self) -> Result<Vec<ReplayStatus>> {
        let stream = &self.stream.inner;
        let query = &stream.client.inner.queries.list_replays;
        let rows = stream.client.query(query, &[&stream.id, &self.id], "list the replays").await?;
        rows.iter()
            .map(|row| {
                let bindings = row.get::<_, Option<&str>>(5).map(binding::from_json).transpose()?;
                Ok(ReplayStatus {
                    replay: row.get(0),
                    from: row.get(1),
                    upto: row.get(2),
                    waiting: row.get(3),
                    leased: row.get(4),
                    bindings: bindings.unwrap_or_default(),
                    created_at: row.get(6),
                    created_by: row.get(7),
                    cancelled: row.get(8),
                })
            })
            .collect()
    }

    /// Gives up what of a replay, or of all of them (`None`), has not been handed out; what handlers have in hand goes on. Returns how many ids that was.
    ///
    /// # Errors
    /// [`UnknownGroup`](crate::ErrorKind::UnknownGroup), or the database's.
    pub async fn cancel_replay(&self, replay: Option<i64>) -> Result<i64> {
        let stream = &self.stream.inner;
        let query = &stream.client.inner.queries.cancel_replay;
        let params: [&(dyn ToSql + Sync); 3] = [&stream.id, &self.id, &replay];
        Ok(stream.client.query_one(query, &params, "cancel the replay").await?.get(0))
    }
}
