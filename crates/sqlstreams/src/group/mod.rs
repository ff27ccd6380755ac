//! Consumer groups: creating, finding, describing, moving and dropping them.

mod builder;
mod mode;
mod replay;
mod retry;
mod seek;
mod status;

use tokio_postgres::types::ToSql;

use self::builder::Settings;
pub use self::builder::{GroupBuilder, Start};
pub use self::mode::Mode;
pub use self::replay::{Replay, ReplayStatus, Replaying};
pub use self::retry::RetryPolicy;
pub use self::seek::{Seek, Sought};
pub use self::status::GroupStatus;
use crate::consume::ConsumerBuilder;
use crate::error::{Error, ErrorKind, Result};
use crate::name::shorten;
use crate::payload::{Codec, Json};
use crate::queries::Query;
use crate::stream::Stream;

/// A consumer group of a stream. From [`GroupBuilder`].
pub struct Group<T, C = Json> {
    pub(crate) stream: Stream<T, C>,
    pub(crate) id: i64,
    pub(crate) name: String,
}

impl<T, C> Clone for Group<T, C> {
    fn clone(&self) -> Self {
        Self { stream: self.stream.clone(), id: self.id, name: self.name.clone() }
    }
}

impl<T, C> std::fmt::Debug for Group<T, C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Group")
            .field("stream", &self.stream)
            .field("id", &self.id)
            .field("name", &self.name)
            .finish()
    }
}

impl<T: Send + 'static, C: Codec<T>> Group<T, C> {
    /// A consumer of the group; see [`ConsumerBuilder`].
    pub fn consumer(&self) -> ConsumerBuilder<T, C> {
        ConsumerBuilder::new(GroupBuilder::new(self.stream.clone(), self.name.clone()))
    }
}

impl<T, C> Group<T, C> {
    /// How it hands out its messages.
    ///
    /// # Errors
    /// [`UnknownGroup`](ErrorKind::UnknownGroup) when it was dropped meanwhile, or the database's.
    pub async fn mode(&self) -> Result<Mode> {
        let stream = &self.stream.inner;
        let find = &stream.client.inner.queries.find_group;
        let rows =
            stream.client.query(find, &[&stream.id, &self.name], "look at the group").await?;
        match rows.first() {
            Some(row) => row.get::<_, &str>(7).parse(),
            None => {
                let text = format!("group {} was dropped", shorten(&self.name));
                Err(Error::new(ErrorKind::UnknownGroup, text))
            }
        }
    }

    /// Changes how it hands out its messages.
    ///
    /// # Errors
    /// [`GroupBusy`](ErrorKind::GroupBusy) while messages of it are handed out or wait for another attempt: ask again when it has
    /// caught up, or stop its consumers first. A paused one keeps what it holds.
    pub async fn set_mode(&self, mode: Mode) -> Result<()> {
        let stream = &self.stream.inner;
        let set = &stream.client.inner.queries.set_mode;
        let params: [&(dyn ToSql + Sync); 3] = [&stream.id, &self.id, &mode.as_str()];
        stream.client.query(set, &params, "change the group's mode").await?;
        Ok(())
    }

    /// Its number: `group_id` in the stream's tables.
    pub fn id(&self) -> i64 {
        self.id
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where it stands now.
    ///
    /// # Errors
    /// [`UnknownGroup`](ErrorKind::UnknownGroup) when it was dropped meanwhile, or the database's, for one when it has no cursor: then
    /// [`drop_group`](Self::drop_group) works all the same.
    pub async fn status(&self) -> Result<GroupStatus> {
        let mut found = self.stream.status_of(Some(&self.name)).await?;
        if let Some(status) = found.pop() {
            return Ok(status);
        }
        // Fails with what it is when it is there.
        self.mode().await?;
        let text = format!("group {} has no cursor: its row is missing", shorten(&self.name));
        Err(Error::new(ErrorKind::Database, text).with_hint(
            "Ask `sqlstreams doctor`. A restore has left it out, or somebody has deleted it.",
        ))
    }

    /// Stops handing out messages to the group's consumers, wherever they run. What handlers have in hand is finished; what
    /// waits for a handler goes on waiting. Takes effect within a second. Doing it twice is harmless.
    ///
    /// # Errors
    /// [`UnknownGroup`](ErrorKind::UnknownGroup), or the database's.
    pub async fn pause(&self) -> Result<()> {
        let queries = &self.stream.inner.client.inner.queries;
        self.call(&queries.pause_group, "pause the group").await
    }

    /// Hands out messages again.
    ///
    /// # Errors
    /// As [`pause`](Self::pause).
    pub async fn resume(&self) -> Result<()> {
        let queries = &self.stream.inner.client.inner.queries;
        self.call(&queries.resume_group, "resume the group").await
    }

    /// Lets consumers settle in their handlers' transactions.
    pub(crate) async fn allow_transactions(&self) -> Result<()> {
        self.alter(&Settings { transactional: Some(true), ..Settings::default() }).await
    }

    async fn alter(&self, settings: &Settings) -> Result<()> {
        let stream = &self.stream.inner;
        let params: [&(dyn ToSql + Sync); 11] = [
            &stream.id,
            &self.id,
            &settings.lease,
            &settings.max_attempts,
            &settings.backoff_base,
            &settings.backoff_factor,
            &settings.backoff_cap,
            &settings.max_in_flight,
            &settings.rate_limit,
            &settings.transactional,
            &settings.newest_only,
        ];
        let alter = &stream.client.inner.queries.alter_group;
        stream.client.query(alter, &params, "change the group").await?;
        Ok(())
    }

    async fn call(&self, query: &Query, doing: &str) -> Result<()> {
        let stream = &self.stream.inner;
        stream.client.query(query, &[&stream.id, &self.id], doing).await?;
        Ok(())
    }

    /// Drops the group with its cursor, its leases and its exceptions, dead letters too. There is no way back.
    ///
    /// # Errors
    /// [`UnknownGroup`](ErrorKind::UnknownGroup) when it is gone already, or the database's.
    pub async fn drop_group(self) -> Result<()> {
        let client = &self.stream.inner.client;
        client
            .query(
                &client.inner.queries.drop_group,
                &[&self.stream.inner.id, &self.id],
                "drop the group",
            )
            .await?;
        Ok(())
    }
}
