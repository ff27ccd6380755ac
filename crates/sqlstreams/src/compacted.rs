//! Compacted streams: the current value of each key.

use crate::error::{Error, ErrorKind, Result};
use crate::message::Message;
use crate::name::shorten;
use crate::payload::Codec;
use crate::stream::{Stream, read_message};

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

impl<T, C> Stream<T, C> {
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
