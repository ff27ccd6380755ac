//! Giving the disk space of compacted partitions back.

use std::time::Duration;

use tokio_postgres::Row;

use crate::client::Client;
use crate::error::{Error, Result};
use crate::stream::Stream;

/// How often it is tried to get at a partition that somebody uses, and how long it waits in between.
const TRIES: u32 = 100;
const PAUSE: Duration = Duration::from_millis(30);

/// What [`Stream::reclaim`] did with a partition, of which at least half the space was free.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Reclaimed {
    /// The partition, a table, as it is written in SQL.
    pub partition: String,
    /// How many bytes it took, without indexes.
    pub bytes_before: u64,
    /// How many it takes now.
    pub bytes_after: u64,
    /// Why it was left as it is.
    pub left: Option<Left>,
}

/// Why a partition was left as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Left {
    /// Some transaction that has read it is open, or so many read it that there was no moment in between. Try it again later.
    Busy,
    /// Only the owner of the schema's tables may, and from PostgreSQL 17 on who has `MAINTAIN` on them.
    NotPermitted,
}

impl<T, C> Stream<T, C> {
    /// Gives the disk space of messages that are gone back, of each partition of which at least half is: as a rule after
    /// [`compact`](Self::compact). It writes what is left of the partition into a new file (`VACUUM (FULL)`), for which that must fit onto the disk
    /// beside the old one. Partitions below 1 MB, and those that producers may still insert into, are left alone.
    ///
    /// It never waits for a lock, so nobody waits behind it; a partition that is in use all the time is tried for about 3 seconds. While one is
    /// written anew, who wants to read messages of it waits: some tenths of a second for 100 MB. Producers do not notice. What somebody's older
    /// snapshot still sees is kept, and its space, too. Any number may call it at any time.
    ///
    /// # Errors
    /// The database's. What was given back before stays so.
    ///
    /// # Cancellation
    /// Dropped, it ends after the partition that it is at. A partition whose VACUUM is interrupted is as it was.
    pub async fn reclaim(&self) -> Result<Vec<Reclaimed>> {
        let client = &self.inner.client;
        let mut done = Vec::new();
        for Candidate { partition, bytes: before, permitted } in
            candidates(client, self.inner.id).await?
        {
            let (after, left) = match permitted {
                true => rewrite(client, &partition, before).await?,
                false => (before, Some(Left::NotPermitted)),
            };
            let bytes = |bytes: i64| u64::try_from(bytes).unwrap_or_default();
            let (bytes_before, bytes_after) = (bytes(before), bytes(after));
            done.push(Reclaimed { partition, bytes_before, bytes_after, left });
        }
        Ok(done)
    }
}

/// A partition of which at least half the space is free.
pub(crate) struct Candidate {
    pub(crate) partition: String,
    pub(crate) bytes: i64,
    /// We may give it back.
    pub(crate) permitted: bool,
}

pub(crate) async fn candidates(client: &Client, stream: i64) -> Result<Vec<Candidate>> {
    let query = &client.inner.queries.reclaimable;
    let rows = client.query(query, &[&stream], "look at the partitions").await?;
    let candidate =
        |row: &Row| Candidate { partition: row.get(0), bytes: row.get(1), permitted: row.get(2) };
    Ok(rows.iter().map(candidate).collect())
}

/// Writes a partition anew. Returns what it takes then, and why it was left as it is, if it was.
pub(crate) async fn rewrite(
    client: &Client,
    partition: &str,
    before: i64,
) -> Result<(i64, Option<Left>)> {
    let doing = "give the space of a partition back";
    let file = async || {
        let look = &client.inner.queries.partition_size;
        let row = client.query_one(look, &[&partition], doing).await?;
        Ok::<(i64, i64), Error>((row.get(0), row.get(1)))
    };
    let old = file().await?.1;
    for _ in 0..TRIES {
        // By itself: no transaction can. A partition that is locked is skipped, with a warning that nobody reads: the file tells.
        let connection = client.connection(doing).await?;
        let vacuum = format!("VACUUM (FULL, SKIP_LOCKED) {partition}");
        let answer = connection.batch_execute(&vacuum).await;
        client.keep(connection, answer.map_err(|e| Error::from_driver(e, doing)))?;
        let (after, new) = file().await?;
        if new != old {
            return Ok((after, None));
        }
        tokio::time::sleep(PAUSE).await;
    }
    Ok((before, Some(Left::Busy)))
}
