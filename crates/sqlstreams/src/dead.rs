//! Exceptions and dead letters: looking at them, putting them back to work, giving them up.

use std::time::SystemTime;

use serde_json::Value;
use tokio_postgres::types::ToSql;

use crate::error::{Error, ErrorKind, Result};
use crate::group::Group;

/// A message of a group that failed.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Exception {
    /// The message.
    pub message_id: i64,
    /// `ready` (waits for its next attempt), `inflight` (is being tried) or `dead`.
    pub state: String,
    /// Failed attempts since the beginning or the last redrive.
    pub attempts: i32,
    /// How often it was put off without counting as an attempt.
    pub delays: i32,
    /// How often the process that held it was lost.
    pub losses: i32,
    /// How often it was redriven.
    pub redrives: i32,
    /// When it is due, or was last.
    pub due_at: SystemTime,
    /// The message's key.
    pub key: Option<String>,
    /// The last error.
    pub last_error: Option<String>,
    /// The last attempts, oldest first: objects with `at`, `attempt`, `outcome` and `error`.
    pub history: Value,
    /// When it first failed.
    pub first_failed_at: SystemTime,
    /// When it became a dead letter.
    pub dead_at: Option<SystemTime>,
}

impl<T, C> Group<T, C> {
    /// Dead letters with ids above `after`, lowest first, at most `limit`: for the next page, pass the last one's id.
    ///
    /// # Errors
    /// The database's.
    pub async fn dead_letters(&self, after: i64, limit: i64) -> Result<Vec<Exception>> {
        self.exceptions(Some("dead"), after, limit).await
    }

    /// How many dead letters the group has: all are counted, however long that takes. [`GroupStatus::dead`](crate::GroupStatus::dead) says about how many.
    ///
    /// # Errors
    /// The database's.
    ///
    /// ```no_run
    /// # async fn f(group: sqlstreams::Group<String>) -> sqlstreams::Result<()> {
    /// println!("{} dead letters", group.count_dead_letters().await?);
    /// # Ok(()) }
    /// ```
    pub async fn count_dead_letters(&self) -> Result<u64> {
        let client = &self.stream.inner.client;
        let count = &client.inner.queries.count_dead;
        let params: [&(dyn ToSql + Sync); 2] = [&self.stream.inner.id, &self.id];
        let row = client.query_one(count, &params, "count the dead letters").await?;
        Ok(row.get::<_, i64>(0).unsigned_abs())
    }

    /// Exceptions in a state (`None`: in any) with ids above `after`, lowest first, at most `limit`.
    ///
    /// # Errors
    /// The database's.
    pub async fn exceptions(
        &self,
        state: Option<&str>,
        after: i64,
        limit: i64,
    ) -> Result<Vec<Exception>> {
        let client = &self.stream.inner.client;
        let params: [&(dyn ToSql + Sync); 5] =
            [&Some(self.stream.name()), &Some(self.name.as_str()), &state, &after, &limit];
        let rows = client
            .query(&client.inner.queries.list_exceptions, &params, "list the exceptions")
            .await?;
        rows.iter()
            .map(|row| {
                Ok(Exception {
                    message_id: row.get(0),
                    state: row.get(1),
                    attempts: row.get(2),
                    delays: row.get(3),
                    losses: row.get(4),
                    redrives: row.get(5),
                    due_at: row.get(6),
                    key: row.get(7),
                    last_error: row.get(8),
                    history: serde_json::from_str(row.get(9)).map_err(|e| {
                        Error::new(ErrorKind::Database, "a history is not JSON").with_source(e)
                    })?,
                    first_failed_at: row.get(10),
                    dead_at: row.get(11),
                })
            })
            .collect()
    }

    /// Puts dead letters back to work: their attempts start again. `ids` of `None` means all, lowest first, at most `limit`
    /// per call; call again until it returns none. Returns the ids redriven; what is not dead (any more) is left alone,
    /// so doing it twice is harmless. Other groups do not notice.
    ///
    /// # Errors
    /// [`UnknownGroup`](ErrorKind::UnknownGroup), or the database's; nothing is redriven then.
    pub async fn redrive(&self, ids: Option<&[i64]>, limit: i64) -> Result<Vec<i64>> {
        let client = &self.stream.inner.client;
        let params: [&(dyn ToSql + Sync); 4] = [&self.stream.inner.id, &self.id, &ids, &limit];
        Ok(client.query_one(&client.inner.queries.redrive, &params, "redrive").await?.get(0))
    }

    /// Gives dead letters up for good, as [`redrive`](Self::redrive) chooses them. Returns the ids; the audit keeps them.
    ///
    /// # Errors
    /// As [`redrive`](Self::redrive).
    pub async fn discard(&self, ids: Option<&[i64]>, limit: i64) -> Result<Vec<i64>> {
        let client = &self.stream.inner.client;
        let params: [&(dyn ToSql + Sync); 4] = [&self.stream.inner.id, &self.id, &ids, &limit];
        Ok(client.query_one(&client.inner.queries.discard, &params, "discard").await?.get(0))
    }
}
