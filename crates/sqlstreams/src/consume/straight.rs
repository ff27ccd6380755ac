//! Reading the messages of a lease straight from the log, as they come.
//!
//! `fetch` in SQL knows leases of every kind, but a function's rows are collected before the first of them is sent, which costs more
//! than to read them. Nearly every lease is one range of ids of a group without bindings: of these the log itself is asked, in the
//! same round trip as the claim, since it is known well enough where its ids will be.
//!
//! Invariant: a page is taken at its word, so what is missing in it is never run. So rows count only where all that the lease
//! holds lies in the window that was looked at, and where the server says (`claimed_range`) that the lease is a range whose messages
//! are in the log, all for the group. Else nothing comes, and `fetch` is asked.

use std::ops::Range;
use std::pin::pin;
use std::time::Instant;

use futures_util::TryStreamExt as _;
use futures_util::future::join;
use tokio::sync::oneshot;
use tokio_postgres::Row;
use tokio_postgres::types::ToSql;
use uuid::Uuid;

use super::protocol::{ANSWER, Claimed, Page, Protocol, expires};
use crate::client::{run, within};
use crate::error::{Error, Result};
use crate::message::{Body, RawMessage};
use crate::payload::Raw;

/// A statement that is to read the log by its index and in no other way, and is not to be made ready for more.
macro_rules! begin_reading {
    () => {
        "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL enable_seqscan = off; SET LOCAL jit = off; SET LOCAL constraint_exclusion = off"
    };
}

const BEGIN_READING: &str = begin_reading!();
/// The same after a call before it.
pub(super) const COMMIT_AND_BEGIN_READING: &str = concat!("COMMIT; ", begin_reading!());

/// The ids from the last claim on among which the next is looked for, at least: others claim as well.
const LEAST: i64 = 10_000;
/// The most partitions that the planner has to look at.
const PARTITIONS: i64 = 4;
/// After so many claims in a row for which nothing came it is tried ever more rarely.
const MOST_MISSES: u32 = 10;

/// Where the next claim is expected.
#[derive(Debug, Default)]
pub(super) struct Straight {
    /// The id that follows those of the last claim; nothing before the first.
    next: Option<i64>,
    misses: u32,
    /// So many claims are made without trying it.
    skip: u32,
}

/// What is looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Window {
    pub(crate) ids: Range<i64>,
    /// The most messages that are read at once. Of large ones fewer than are claimed: to stop in the middle costs a connection.
    pub(crate) messages: i64,
}

/// What came in the same round trip as a claim.
pub(super) enum First {
    /// What `fetch` made of it.
    Page(Page),
    /// What lay in the window.
    Read(Read, Window),
}

/// The rows that came, and whether there were too many bytes for all.
pub(super) struct Read {
    rows: Vec<Row>,
    cut: bool,
}

impl Straight {
    /// Where to look for a claim of `limit`, of which about `fitting` messages are read at once, if it is worth a try.
    pub(super) fn window(
        &mut self,
        limit: usize,
        fitting: usize,
        partition_size: i64,
    ) -> Option<Window> {
        let from = self.next?;
        if self.skip > 0 {
            self.skip -= 1;
            return None;
        }
        let width = LEAST.max(limit as i64 * 16).min(partition_size.saturating_mul(PARTITIONS));
        Some(Window { ids: from..from.saturating_add(width), messages: limit.min(fitting) as i64 })
    }

    /// These ids were claimed.
    pub(super) fn claimed(&mut self, last: i64) {
        self.next = last.checked_add(1);
    }

    /// Whether it has worked the last time.
    pub(super) fn works(&self) -> bool {
        self.next.is_some() && self.misses == 0
    }

    /// It was tried.
    pub(super) fn tried(&mut self, read: bool) {
        self.misses = if read { 0 } else { (self.misses + 1).min(MOST_MISSES) };
        self.skip = (1 << self.misses) - 1;
    }
}

impl Protocol {
    /// Fetches the first messages of the lease that is claimed under `token` in the same write, and commits.
    pub(super) async fn first_messages(
        &self,
        connection: &tokio_postgres::Client,
        token: Uuid,
        window: Option<Window>,
        (limit, bytes): (i64, i64),
        sent: Instant,
    ) -> Result<First, tokio_postgres::Error> {
        if let Some(window) = window {
            let read = self.read(connection, token, &window, bytes).await?;
            return Ok(First::Read(read, window));
        }
        let params: [&(dyn ToSql + Sync); 6] =
            [&self.stream.id, &self.group, &token, &0_i64, &limit, &bytes];
        let fetch = run(connection, &self.stream.queries.fetch, &params);
        let (fetched, ended) = join(fetch, connection.batch_execute("COMMIT")).await;
        fetched.and_then(|rows| ended.map(|()| First::Page(Page::from_rows(&rows, sent))))
    }

    /// The messages of a lease that ends with the window; nothing if they have to be fetched.
    pub(super) async fn read_more(
        &self,
        token: Uuid,
        window: &Window,
        bytes: i64,
    ) -> Result<Option<Page>> {
        let doing = "fetch messages";
        let connection = self.stream.client.connection(doing).await?;
        let sent = Instant::now();
        let calls = join(
            connection.batch_execute(BEGIN_READING),
            self.read(&connection, token, window, bytes),
        );
        let answer = within(ANSWER, calls, doing).await.and_then(|(begun, read)| {
            begun.and(read).map_err(|error| Error::from_driver(error, doing))
        });
        let read = match answer {
            Ok(read) if read.cut => {
                connection.abandon();
                read
            }
            answer => self.stream.client.keep(connection, answer)?,
        };
        let last = window.ids.end - 1;
        Ok((!read.rows.is_empty()).then(|| read.into_page(last, window.messages, sent)))
    }

    /// Reads what the lease of this token holds in the window, and commits. Where it is far more than so many bytes it stops in the
    /// middle, after which the connection is of no use any more.
    async fn read(
        &self,
        connection: &tokio_postgres::Client,
        token: Uuid,
        Window { ids, messages }: &Window,
        bytes: i64,
    ) -> Result<Read, tokio_postgres::Error> {
        let query = &self.stream.queries.fetch_range;
        let params: [&(dyn ToSql + Sync); 5] =
            [&self.group, &token, &ids.start, &ids.end, messages];
        let typed = params.into_iter().zip(query.types.iter().cloned());
        let (cut, was_cut) = oneshot::channel();
        let read = async {
            let mut stream = pin!(connection.query_typed_raw(&query.sql, typed).await?);
            let (mut rows, mut left) = (Vec::new(), bytes);
            while let Some(row) = stream.try_next().await? {
                left -= payload(&row).map_or(0, |payload| payload.len() as i64);
                rows.push(row);
                // Twice as much is borne with: how large messages are is a guess.
                if left < -bytes {
                    let _ = cut.send(());
                    return Ok(Read { rows, cut: true });
                }
            }
            Ok(Read { rows, cut: false })
        };
        // Nobody waits for the end of what is not read to its end.
        let end = async {
            tokio::select! {
                ended = connection.batch_execute("COMMIT") => ended,
                Ok(()) = was_cut => Ok(()),
            }
        };
        // Written in this order at the first poll.
        let (read, ended) = join(read, end).await;
        read.and_then(|read| ended.map(|()| read))
    }
}

impl Default for First {
    fn default() -> Self {
        Self::Page(Page::default())
    }
}

impl First {
    /// Whether the connection it came on is in the middle of the answer.
    pub(super) fn is_cut(&self) -> bool {
        matches!(self, Self::Read(Read { cut: true, .. }, _))
    }

    /// The page of the lease that was claimed, which was asked for at `sent`; and whether it came straight from the log, where that
    /// was tried.
    pub(super) fn page_of(
        self,
        claimed: Option<&Claimed>,
        sent: Instant,
    ) -> (Result<Page>, Option<bool>) {
        match (self, claimed.and_then(|c| c.pending.first().zip(c.pending.last()))) {
            (Self::Page(page), _) => (Ok(page), None),
            (Self::Read(..), None) => (Ok(Page::default()), None),
            (Self::Read(read, Window { ids, messages }), Some((first, last))) => {
                // What lies beyond the window was not looked at.
                let whole = ids.contains(&first) && ids.contains(&last);
                match whole && !read.rows.is_empty() {
                    true => (Ok(read.into_page(last, messages, sent)), Some(true)),
                    false => (Ok(Page::unread()), Some(false)),
                }
            }
        }
    }
}

impl Read {
    /// The page of a lease that ends with id `last`, of which at most `limit` messages were asked for at `sent`.
    fn into_page(self, last: i64, limit: i64, sent: Instant) -> Page {
        let ends = self.rows.last().is_none_or(|row| row.get::<_, i64>(0) >= last);
        let full = self.cut || self.rows.len() as i64 >= limit;
        Page {
            more: full && !ends,
            messages: self.rows.into_iter().map(|row| message(row, sent)).collect(),
        }
    }
}

fn payload(row: &Row) -> Option<&[u8]> {
    row.get::<_, Option<Raw<'_>>>(5).map(|raw| raw.0)
}

fn message(row: Row, sent: Instant) -> RawMessage {
    let left: Option<i64> = row.get(6);
    RawMessage {
        id: row.get(0),
        key: row.get(1),
        routing_key: row.get(2),
        headers: row.get(3),
        produced_at: row.get(4),
        // The server keeps the payload of one that has expired.
        tombstone: payload(&row).is_none() && left != Some(0),
        superseded: false,
        expires: expires(left, sent),
        lane: None,
        payload: Body::Row(row, 5),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_tried_before_the_first_claim() {
        let mut straight = Straight::default();
        assert_eq!(straight.window(100, 100, 1_000_000), None);
        straight.claimed(41);
        let mut window = |limit| straight.window(limit, 200, 1_000_000).unwrap();
        assert_eq!(window(100), Window { ids: 42..10_042, messages: 100 });
        assert_eq!(window(100_000), Window { ids: 42..1_600_042, messages: 200 });
    }

    #[test]
    fn the_planner_looks_at_few_partitions() {
        let mut straight = Straight::default();
        straight.claimed(0);
        assert_eq!(straight.window(20_000, 20_000, 1_000).unwrap().ids, 1..4_001);
    }

    #[test]
    fn what_does_not_work_is_tried_rarely_and_still_tried() {
        let mut straight = Straight::default();
        straight.claimed(1);
        let mut tries = 0;
        for _ in 0..10_000 {
            if straight.window(1, 1, 1_000).is_some() {
                tries += 1;
                straight.tried(false);
            }
        }
        assert!((10..30).contains(&tries), "{tries}");
        straight.tried(true);
        assert!(straight.window(1, 1, 1_000).is_some());
    }
}
