//! Reading the log without a group, page by page.

use std::time::SystemTime;

use tokio_postgres::Row;
use tokio_postgres::types::ToSql;

use crate::error::{Error, ErrorKind, Result};
use crate::group::Group;
use crate::message::Headers;
use crate::payload::{Codec, Payload};
use crate::stream::Stream;

/// About so many bytes of payloads are in a page at most, but for a single payload that is larger.
const PAGE_BYTES: i64 = 8 * 1024 * 1024;

/// A message as it is stored, with everything that it has: what [`Stream::read_log`] reads and [`Stream::import`] takes.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Record<T> {
    /// Its place in the stream that it is from.
    pub id: i64,
    /// What it is about.
    pub key: Option<String>,
    /// What groups select it by.
    pub routing_key: Option<String>,
    /// Headers: the text of a JSON object, so that no number loses digits. See [`headers`](Self::headers).
    pub headers: Option<String>,
    /// When it was inserted, by the clock of the database that it is from. PostgreSQL's infinities, which somebody's own SQL may have stored, are the first
    /// and the last of its times, as the driver reads them.
    pub produced_at: SystemTime,
    /// From when on nobody gets it any more.
    pub expires_at: Option<SystemTime>,
    /// What was sent; `None` for a [tombstone](crate::Outgoing::tombstone).
    pub payload: Option<T>,
}

impl<T> Record<T> {
    /// A message with nothing but this; everything else may be set in its fields.
    pub fn new(id: i64, produced_at: SystemTime, payload: impl Into<Option<T>>) -> Self {
        Self {
            id,
            key: None,
            routing_key: None,
            headers: None,
            produced_at,
            expires_at: None,
            payload: payload.into(),
        }
    }

    /// Its headers, empty where it has none or they are no JSON object.
    pub fn headers(&self) -> Headers {
        let headers = self.headers.as_deref().and_then(|text| serde_json::from_str(text).ok());
        headers.unwrap_or_default()
    }
}

/// A page of a log; from [`Stream::read_log`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct LogPage<T> {
    /// Its messages, lowest id first; maybe none.
    pub records: Vec<Record<T>>,
    /// How far it goes: the next page begins after this id. As low as what was asked for where nothing more is final yet.
    pub upto: i64,
    /// The last id drawn. Where `upto` has come to it, or to what was asked for, there is no more.
    pub head: i64,
}

impl<T, C: Codec<T>> Stream<T, C> {
    /// Messages of the log after id `after` and up to `upto`, lowest first, whatever the groups have done with them; expired
    /// ones too. At most `limit` (1 to 10,000) and about 8 MiB.
    ///
    /// A page holds only what is final: where it has gone past an id, no message ever appears there later. It waits for nothing, and ends
    /// where a transaction is under way that may still bring one; ask again later. So any number of pages together are everything
    /// that there is, as often as they are read, and nothing is held in between. Holes cost little.
    ///
    /// ```no_run
    /// # async fn f(orders: sqlstreams::Stream<serde_json::Value>) -> sqlstreams::Result<()> {
    /// let mut after = 0;
    /// loop {
    ///     let page = orders.read_log(after, i64::MAX, 1_000).await?;
    ///     for record in &page.records {
    ///         println!("{} {:?}", record.id, record.payload);
    ///     }
    ///     if page.upto == after {
    ///         break; // at the end, or at a transaction that is under way: page.upto < page.head
    ///     }
    ///     after = page.upto;
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// Needs `SELECT` on the stream's log and on the tables `stream` and `stream_fence`. On a standby it ends where consumers on the primary have
    /// been.
    ///
    /// # Errors
    /// [`InvalidMessage`](ErrorKind::InvalidMessage) for a payload that cannot be decoded,
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) for a limit of 0, or where `upto` is below `after`; or the database's.
    pub async fn read_log(&self, after: i64, upto: i64, limit: u32) -> Result<LogPage<T>> {
        let read = &self.inner.queries.read_log;
        let params: [&(dyn ToSql + Sync); 5] =
            [&self.inner.id, &after, &upto, &i64::from(limit), &PAGE_BYTES];
        let rows = self.inner.client.query(read, &params, "read the log").await?;
        let Some((end, rows)) = rows.split_last() else {
            return Err(Error::new(
                ErrorKind::Database,
                "could not read the log: no end came back",
            ));
        };
        let records = rows.iter().map(read_record::<T, C>).collect::<Result<Vec<_>>>()?;
        Ok(LogPage { records, upto: end.get(7), head: end.get(8) })
    }

    /// The id after which the first message comes that was produced at or after a time, by the database's clock. A few look-ups, however
    /// long the log is. Where messages were imported with older times than those before them, it is one of several such places.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) for a time in the future, or the database's.
    pub async fn position_at(&self, at: SystemTime) -> Result<i64> {
        let client = &self.inner.client;
        let position = &client.inner.queries.position_at;
        let row = client.query_one(position, &[&self.inner.id, &at], "find the time").await?;
        Ok(row.get(0))
    }
}

impl<T, C> Group<T, C> {
    /// Moves the group from `from`, where it stands ([`claimed`](crate::GroupStatus::claimed)), to `upto`, as far as a
    /// [page of the log](Stream::read_log) has gone: as if everything between had been handled. For groups that nobody consumes, and that
    /// remember how far something else has come, an export for one. What they have not come to is not dropped.
    ///
    /// # Errors
    /// [`GroupBusy`](ErrorKind::GroupBusy) when it stands elsewhere, or when anything of it is handed out or waits for another attempt;
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) when it is not a parallel one or `upto` is beyond the head; or the database's.
    pub async fn move_cursor(&self, from: i64, upto: i64) -> Result<()> {
        let stream = &self.stream.inner;
        let moving = &stream.client.inner.queries.move_cursor;
        let params: [&(dyn ToSql + Sync); 4] = [&stream.id, &self.id, &from, &upto];
        stream.client.query(moving, &params, "move the group").await?;
        Ok(())
    }
}

fn read_record<T, C: Codec<T>>(row: &Row) -> Result<Record<T>> {
    let id: i64 = row.get(0);
    let payload = row.get::<_, Option<Payload>>(5).map(|payload| C::decode(&payload.0));
    let payload = payload.transpose().map_err(|e| {
        let text = format!("message {id}: the payload cannot be decoded: {e}");
        Error::new(ErrorKind::InvalidMessage, text)
    })?;
    Ok(Record {
        id,
        key: row.get(1),
        routing_key: row.get(2),
        headers: row.get(3),
        produced_at: row.get(4),
        expires_at: row.get(6),
        payload,
    })
}
