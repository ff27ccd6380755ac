//! Compacted streams: the current value of each key, and the reclaiming of what is superseded.

use std::time::Duration;

use crate::error::{Error, ErrorKind, Result};
use crate::message::Message;
use crate::name::shorten;
use crate::payload::Codec;
use crate::stream::{Stream, read_message, seconds};

impl<T, C: Codec<T>> Stream<T, C> {
    /// The current value of a key: its newest message. None if that is a [tombstone](crate::Outgoing::tombstone) or has expired,
    /// and for a key that never was. One look-up in an index, however many messages and versions there are.
    ///
    /// ```no_run
    /// # async fn f(prices: sqlstreams::Stream<f64>) -> sqlstreams::Result<()> {
    /// if let Some(price) = prices.latest("apples").await? {
    ///     println!("{} since message {}", price.payload, price.id);
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) when the stream is not [compacted](crate::StreamBuilder::compacted),
    /// [`InvalidMessage`](ErrorKind::InvalidMessage) for a payload that cannot be decoded, or the database's.
    pub async fn latest(&self, key: &str) -> Result<Option<Message<T>>> {
        self.require_compacted()?;
        let latest = &self.inner.queries.latest;
        let rows = self.inner.client.query(latest, &[&key], "look the key up").await?;
        rows.first().map(read_message::<T, C>).transpose()
    }

    /// Current values in the order of their keys (byte by byte), at most `limit`: of the keys after `after`, or from the first on.
    /// The next page begins after the last key of this one; one with fewer than `limit` is the last.
    ///
    /// ```no_run
    /// # async fn f(prices: sqlstreams::Stream<f64>) -> sqlstreams::Result<()> {
    /// let mut page = prices.current(None, 100).await?;
    /// while let Some(last) = page.last() {
    ///     for price in &page {
    ///         println!("{:?} {}", price.key, price.payload);
    ///     }
    ///     page = prices.current(last.key.as_deref(), 100).await?;
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// Takes a few look-ups per key; versions that are not compacted yet cost nothing. A page is one snapshot, the next page another.
    ///
    /// # Errors
    /// As [`latest`](Self::latest).
    pub async fn current(&self, after: Option<&str>, limit: u32) -> Result<Vec<Message<T>>> {
        self.require_compacted()?;
        let current = &self.inner.queries.current;
        let params: [&(dyn tokio_postgres::types::ToSql + Sync); 2] = [&after, &i64::from(limit)];
        let rows = self.inner.client.query(current, &params, "list current values").await?;
        rows.iter().map(read_message::<T, C>).collect()
    }
}

/// What [`Stream::compact`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Compacted {
    /// How many messages were looked at.
    pub looked_at: u64,
    /// How many of them were removed.
    pub removed: u64,
    /// Up to this id every group has resolved everything, or has it in its exception queue. What lies above was left alone.
    pub floor: i64,
    /// Whether it ended early, since somebody else compacts the stream.
    pub busy: bool,
}

impl<T, C> Stream<T, C> {
    /// Removes messages that newer ones of their key have superseded, from the beginning of the log as far as every group has
    /// resolved it. Nothing that is in a group's exception queue is removed, dead letters neither, nor what is younger than
    /// `min_age` (5 minutes are good: producers whose connection broke ask so long what became of their messages). A tombstone
    /// goes, with nothing of its key left, when it is older than `tombstone_age`: longer than anybody takes to read the log from
    /// its beginning; 24 hours are good.
    ///
    /// Any number may call it at any time, with producers and consumers running: it goes through the log in transactions of
    /// 10,000 messages. Nothing in the crate calls it by itself.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) when the stream is not [compacted](crate::StreamBuilder::compacted), or the
    /// database's. What was removed before stays removed.
    ///
    /// # Cancellation
    /// Dropped, it ends after the transaction that it is in.
    pub async fn compact(&self, min_age: Duration, tombstone_age: Duration) -> Result<Compacted> {
        self.require_compacted()?;
        let client = &self.inner.client;
        let compact = &client.inner.queries.compact;
        let (min_age, tombstone_age) = (seconds(min_age), seconds(tombstone_age));
        let (mut done, mut upto) = (Compacted::default(), 0_i64);
        loop {
            let params: [&(dyn tokio_postgres::types::ToSql + Sync); 4] =
                [&self.inner.id, &upto, &min_age, &tombstone_age];
            let row = client.query_one(compact, &params, "compact the stream").await?;
            let number = |at| u64::try_from(row.get::<_, i64>(at)).unwrap_or_default();
            done.looked_at += number(0);
            done.removed += number(1);
            if row.get(4) {
                done.busy = true;
                return Ok(done);
            }
            (upto, done.floor) = (row.get(2), row.get(3));
            if upto >= done.floor {
                return Ok(done);
            }
        }
    }

    fn require_compacted(&self) -> Result<()> {
        match self.inner.compacted {
            true => Ok(()),
            false => Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("stream {} is not compacted", shorten(self.name())),
            )
            .with_hint("Whether a stream is, is said when it is created.")),
        }
    }
}
