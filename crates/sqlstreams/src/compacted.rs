//! Compacted streams: the current value of each key, and the reclaiming of what is superseded.

use std::time::Duration;

use crate::error::{Error, ErrorKind, Result};
use crate::message::Message;
use crate::name::shorten;
use crate::payload::Codec;
use crate::stream::{Stream, read_message, seconds};

/// The longest age: about 1,000 years, so that the time it reaches back to is in every calendar.
const MOST_AGE: Duration = Duration::from_secs(1_000 * 365 * 24 * 3600);

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
    ///
    /// ```no_run
    /// # async fn f(prices: sqlstreams::Stream<f64>) -> sqlstreams::Result<()> {
    /// let mut page = prices.current(None, 100).await?;
    /// loop {
    ///     for price in &page.messages {
    ///         println!("{:?} {}", price.key, price.payload);
    ///     }
    ///     let Some(next) = page.next else { break };
    ///     page = prices.current(Some(&next), 100).await?;
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// Takes a few look-ups per key; versions that are not compacted yet cost nothing. Keys that were removed, and whose tombstones are
    /// not compacted yet, cost as much as others: after 1,000 of them a page ends, full or not, even empty. A page is one snapshot,
    /// the next page another.
    ///
    /// # Errors
    /// As [`latest`](Self::latest).
    pub async fn current(&self, after: Option<&str>, limit: u32) -> Result<CurrentPage<T>> {
        self.require_compacted()?;
        let current = &self.inner.queries.current;
        let params: [&(dyn tokio_postgres::types::ToSql + Sync); 2] = [&after, &i64::from(limit)];
        let rows = self.inner.client.query(current, &params, "list current values").await?;
        // A row without a message tells where it ended early.
        let ended = rows.iter().find(|row| row.get::<_, Option<i64>>(0).is_none());
        let mut next = ended.map(|row| row.get(1));
        let rows = rows.iter().filter(|row| row.get::<_, Option<i64>>(0).is_some());
        let messages = rows.map(read_message::<T, C>).collect::<Result<Vec<_>>>()?;
        if messages.len() == limit as usize {
            next = messages.last().and_then(|last| last.key.clone());
        }
        Ok(CurrentPage { messages, next })
    }
}

/// A page of [current values](Stream::current).
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct CurrentPage<T> {
    /// The current values, in the order of their keys.
    pub messages: Vec<Message<T>>,
    /// After which key the next page begins; `None` when there is no more.
    pub next: Option<String>,
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
    /// 10,000 messages. [Maintenance](crate::Maintenance) does it by itself, with these ages.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) when the stream is not [compacted](crate::StreamBuilder::compacted) or an
    /// age is above 1,000 years, or the database's. What was removed before stays removed.
    ///
    /// # Cancellation
    /// Dropped, it ends after the transaction that it is in.
    pub async fn compact(&self, min_age: Duration, tombstone_age: Duration) -> Result<Compacted> {
        self.require_compacted()?;
        check_age("min_age", min_age)?;
        check_age("tombstone_age", tombstone_age)?;
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

fn check_age(what: &str, age: Duration) -> Result<()> {
    match age <= MOST_AGE {
        true => Ok(()),
        false => {
            let text = format!("{what} is above 1,000 years, which leaves everything");
            Err(Error::new(ErrorKind::InvalidArgument, text))
        }
    }
}
