//! The consumer's calls of the SQL functions, one method each.
//!
//! Every call runs in a READ COMMITTED transaction of its own, whatever the default is, and commits without waiting for
//! the disk: what a crash of the server takes back is a repeat, never a loss. Begin, call and commit travel in one write.

use std::time::{Duration, Instant, SystemTime};

use futures_util::future::join4;
use tokio_postgres::Row;
use tokio_postgres::types::ToSql;
use uuid::Uuid;

use super::fairness::Wish;
use super::ids::IdSet;
use super::straight::{COMMIT_AND_BEGIN_READING, First, Window};
use crate::client::{BOOKKEEPING, answered, run, transact, within};
use crate::error::{Error, ErrorKind, Result};
use crate::message::RawMessage;
use crate::outcome::Verdict;
use crate::payload::Payload;
use crate::pool::Pooled;
use crate::queries::Query;
use crate::stream::StreamInner;
use crate::wake::Watcher;

/// How long the server may take for an answer. Most leases live longer, so that what was asked may be asked again.
pub(super) const ANSWER: Duration = Duration::from_secs(10);
pub(super) const COMMIT_AND_BEGIN: &str = "COMMIT; BEGIN ISOLATION LEVEL READ COMMITTED";

/// A lease as it was claimed.
#[derive(Debug, Clone)]
pub(crate) struct Claimed {
    pub(crate) seq: i64,
    pub(crate) token: Uuid,
    pub(crate) pending: IdSet,
    /// The lanes it is for, where it is not for all.
    pub(crate) lanes: Option<i64>,
    pub(crate) lease_duration: Duration,
}

/// An exception as it was claimed.
#[derive(Debug, Clone)]
pub(crate) struct ClaimedException {
    pub(crate) id: i64,
    /// How often it has failed and was put off before.
    pub(crate) attempts: i32,
    pub(crate) delays: i32,
    pub(crate) first_failed_at: SystemTime,
    /// In a fair group.
    pub(crate) lane: Option<i16>,
}

/// What is to be said of one lease.
#[derive(Debug, Clone)]
pub(crate) struct LeaseReport {
    pub(crate) seq: i64,
    pub(crate) token: Uuid,
    pub(crate) done: IdSet,
    pub(crate) failed: Vec<(i64, Verdict)>,
}

/// What of an exception is to be said.
#[derive(Debug, Clone)]
pub(crate) struct ExceptionReport {
    pub(crate) token: Uuid,
    pub(crate) id: i64,
    pub(crate) verdict: Verdict,
}

/// The answer to `advance`, and the messages of the new lease.
#[derive(Debug)]
pub(crate) struct Advanced {
    pub(crate) lost: Vec<Uuid>,
    pub(crate) claimed: Option<Claimed>,
    pub(crate) paused: bool,
    /// The group has a limit: what is finished is to be told at once.
    pub(crate) limited: bool,
    /// The rate limit is used up for so long.
    pub(crate) wait: Option<Duration>,
    /// In a group with bindings or a fair one: how many ids the claim is about. There may be none of them to hand out.
    pub(crate) looked_at: Option<usize>,
    /// In a fair group: the lanes the claim is for, and those of which there is more to read.
    pub(crate) lanes: Option<i64>,
    pub(crate) unread: Option<i64>,
    /// Its first messages. That they cannot be read does not undo the claim.
    pub(crate) page: Result<Page>,
    /// Whether they came straight from the log, where that was tried.
    pub(crate) straight: Option<bool>,
}

/// Messages of a lease.
#[derive(Debug, Default)]
pub(crate) struct Page {
    pub(crate) messages: Vec<RawMessage>,
    /// Whether the lease holds more beyond the last one.
    pub(crate) more: bool,
}

impl Page {
    /// Of a lease of which nothing was read.
    pub(super) fn unread() -> Self {
        Self { messages: Vec::new(), more: true }
    }
}

/// Part of a lease that others had better handle.
#[derive(Debug, Clone)]
pub(crate) struct Surplus {
    pub(crate) seq: i64,
    pub(crate) token: Uuid,
    pub(crate) part: IdSet,
}

/// Exceptions that were claimed together.
#[derive(Debug)]
pub(crate) struct ClaimedExceptions {
    pub(crate) exceptions: Vec<ClaimedException>,
    pub(crate) earliest_due: Option<SystemTime>,
    pub(crate) lease_duration: Duration,
}

/// The calls, for one group.
#[derive(Debug, Clone)]
pub(crate) struct Protocol {
    pub(crate) stream: std::sync::Arc<StreamInner>,
    pub(crate) group: i64,
}

impl Protocol {
    /// Reports leases, claims up to `limit` ids under `token`, or in a group with bindings `width` of them and in a fair one up to
    /// `width` as is wished, and fetches up to `limit` messages, in one round trip.
    pub(crate) async fn advance(
        &self,
        reports: &[LeaseReport],
        token: Uuid,
        (limit, width): (i64, i64),
        bytes: i64,
        wish: &Wish,
        window: Option<Window>,
    ) -> Result<Advanced> {
        let doing = "settle and claim";
        let failed = |e| Error::from_driver(e, doing);
        let owner = self.owner();
        let seqs: Vec<i64> = reports.iter().map(|r| r.seq).collect();
        let tokens: Vec<Uuid> = reports.iter().map(|r| r.token).collect();
        let done: Vec<String> = reports.iter().map(|r| r.done.to_string()).collect();
        let failures = || {
            reports
                .iter()
                .flat_map(|r| r.failed.iter().map(|(id, verdict)| (r.token, *id, verdict)))
        };
        let failed_tokens: Vec<Uuid> = failures().map(|f| f.0).collect();
        let failed_ids: Vec<i64> = failures().map(|f| f.1).collect();
        let outcomes: Vec<&str> = failures().map(|f| f.2.outcome).collect();
        let errors: Vec<Option<&str>> = failures().map(|f| f.2.error.as_deref()).collect();
        let delays: Vec<Option<f64>> = failures().map(|f| f.2.delay).collect();

        let advance = &self.stream.client.inner.queries.advance;
        let advance_params: [&(dyn ToSql + Sync); 17] = [
            &self.stream.id,
            &self.group,
            &seqs,
            &tokens,
            &done,
            &failed_tokens,
            &failed_ids,
            &outcomes,
            &errors,
            &delays,
            &limit,
            &token,
            &owner,
            &width,
            &wish.lanes,
            &wish.heavy,
            &wish.shares,
        ];
        let client = &self.stream.client;
        let connection = client.connection(doing).await?;
        let sent = Instant::now();
        let (row, first) = if limit > 0 {
            let begin = if window.is_some() { COMMIT_AND_BEGIN_READING } else { COMMIT_AND_BEGIN };
            // Written in this order at the first poll; the server answers in it.
            let calls = join4(
                connection.batch_execute(BOOKKEEPING),
                run(&connection, advance, &advance_params),
                connection.batch_execute(begin),
                self.first_messages(&connection, token, window, (limit, bytes), sent),
            );
            let (begun, advanced, committed, first) = match within(ANSWER, calls, doing).await {
                Ok(answers) => answers,
                Err(silence) => return client.keep(connection, Err(silence)),
            };
            let advanced = begun.and(advanced).and_then(|rows| committed.map(|()| rows));
            let first = first.map_err(|e| Error::from_driver(e, "fetch messages"));
            let rows = match first.as_ref().is_ok_and(First::is_cut) {
                true => {
                    connection.abandon();
                    advanced.map_err(failed)
                }
                false => client.keep(connection, advanced.map_err(failed)),
            };
            (one(rows?, doing)?, first)
        } else {
            (
                one(self.transact(connection, advance, &advance_params, doing).await?, doing)?,
                Ok(First::default()),
            )
        };
        let claimed = match row.get::<_, Option<i64>>(1) {
            None => None,
            Some(seq) => Some(Claimed {
                seq,
                token,
                pending: parse_ids(row.get(2))?,
                lanes: row.get(8),
                lease_duration: milliseconds(row.get(3)),
            }),
        };
        let (page, straight) = match first {
            Ok(first) => first.page_of(claimed.as_ref(), sent),
            Err(error) => (Err(error), None),
        };
        Ok(Advanced {
            lost: row.get(0),
            claimed,
            paused: row.get(4),
            limited: row.get(5),
            wait: row.get::<_, Option<i64>>(6).map(milliseconds),
            looked_at: row.get::<_, Option<i64>>(7).map(|ids| usize::try_from(ids).unwrap_or(0)),
            lanes: row.get(8),
            unread: row.get(9),
            page,
            straight,
        })
    }

    /// More messages of a lease; of one that ends with the window straight from the log, if that can be.
    pub(crate) async fn fetch(
        &self,
        token: Uuid,
        after: i64,
        limit: i64,
        bytes: i64,
        window: Option<Window>,
    ) -> Result<Page> {
        if let Some(window) = window
            && let Some(page) = self.read_more(token, &window, bytes).await?
        {
            return Ok(page);
        }
        let params: [&(dyn ToSql + Sync); 6] =
            [&self.stream.id, &self.group, &token, &after, &limit, &bytes];
        let sent = Instant::now();
        let rows = self.rows(&self.stream.queries.fetch, &params, "fetch messages").await?;
        Ok(Page::from_rows(&rows, sent))
    }

    /// The heartbeat: each lease with the seq it has now, `None` for those that were lost.
    pub(crate) async fn extend(&self, reports: &[LeaseReport]) -> Result<Vec<(Uuid, Option<i64>)>> {
        let (seqs, tokens, done) = columns(reports);
        let owner = self.owner();
        let params: [&(dyn ToSql + Sync); 6] =
            [&self.stream.id, &self.group, &seqs, &tokens, &done, &owner];
        let extend = &self.stream.client.inner.queries.extend;
        let rows = self.beat(extend, &params, "extend the leases").await?;
        Ok(rows.iter().map(|row| (row.get(0), row.get(1))).collect())
    }

    /// Hands leases back.
    pub(crate) async fn release(&self, reports: &[LeaseReport]) -> Result<()> {
        let (seqs, tokens, done) = columns(reports);
        let params: [&(dyn ToSql + Sync); 5] =
            [&self.stream.id, &self.group, &seqs, &tokens, &done];
        self.rows(&self.stream.client.inner.queries.release, &params, "hand leases back").await?;
        Ok(())
    }

    /// Hands part of a lease back; says whether that was ours still.
    pub(crate) async fn release_part(&self, surplus: &Surplus) -> Result<bool> {
        let part = surplus.part.to_string();
        let params: [&(dyn ToSql + Sync); 5] =
            [&self.stream.id, &self.group, &surplus.seq, &surplus.token, &part];
        let release = &self.stream.client.inner.queries.release_part;
        let doing = "hand part of a lease back";
        Ok(one(self.rows(release, &params, doing).await?, doing)?.get(0))
    }

    /// Whether everything up to `id` is done or dead.
    pub(crate) async fn is_resolved(&self, id: i64) -> Result<bool> {
        let doing = "look how far the group is";
        let query = &self.stream.client.inner.queries.is_resolved;
        let rows = self.rows(query, &[&self.stream.id, &self.group, &id], doing).await?;
        Ok(one(rows, doing)?.get(0))
    }

    /// The last id drawn.
    pub(crate) async fn head(&self) -> Result<i64> {
        let doing = "find the latest message";
        let query = &self.stream.client.inner.queries.stream_head;
        Ok(one(self.rows(query, &[&self.stream.id], doing).await?, doing)?.get(0))
    }

    /// Claims exceptions that are due; in a fair group of these lanes.
    pub(crate) async fn take_exceptions(
        &self,
        token: Uuid,
        limit: i64,
        suspect: bool,
        due_from: Option<SystemTime>,
        lanes: i64,
    ) -> Result<ClaimedExceptions> {
        let owner = self.owner();
        let params: [&(dyn ToSql + Sync); 8] =
            [&self.stream.id, &self.group, &token, &limit, &suspect, &due_from, &owner, &lanes];
        let take = &self.stream.client.inner.queries.take_exceptions;
        let rows = self.rows(take, &params, "claim exceptions").await?;
        Ok(ClaimedExceptions {
            exceptions: rows
                .iter()
                .map(|row| ClaimedException {
                    id: row.get(0),
                    attempts: row.get(1),
                    delays: row.get(4),
                    first_failed_at: row.get(5),
                    lane: row.get(6),
                })
                .collect(),
            earliest_due: rows.iter().map(|row| row.get(2)).min(),
            lease_duration: milliseconds(rows.first().map_or(0, |row| row.get(3))),
        })
    }

    /// Messages of the log by their ids, in order; those that the group does not want any more come without payload.
    pub(crate) async fn fetch_messages(&self, ids: &[i64], bytes: i64) -> Result<Page> {
        let params: [&(dyn ToSql + Sync); 4] = [&self.stream.id, &ids, &bytes, &self.group];
        let fetch = &self.stream.queries.fetch_messages;
        let sent = Instant::now();
        Ok(Page::from_rows(&self.rows(fetch, &params, "fetch messages").await?, sent))
    }

    /// The id that comes next in a lease.
    pub(crate) async fn next_id(&self, token: Uuid, after: i64) -> Result<Option<i64>> {
        let params: [&(dyn ToSql + Sync); 4] = [&self.stream.id, &self.group, &token, &after];
        let next = &self.stream.client.inner.queries.next_id;
        Ok(one(self.rows(next, &params, "find the next message").await?, "find the next message")?
            .get(0))
    }

    /// Records how exceptions ended; returns those whose lease was lost.
    pub(crate) async fn settle_exceptions(&self, reports: &[ExceptionReport]) -> Result<Vec<i64>> {
        let tokens: Vec<Uuid> = reports.iter().map(|r| r.token).collect();
        let ids: Vec<i64> = reports.iter().map(|r| r.id).collect();
        let outcomes: Vec<&str> = reports.iter().map(|r| r.verdict.outcome).collect();
        let errors: Vec<Option<&str>> =
            reports.iter().map(|r| r.verdict.error.as_deref()).collect();
        let delays: Vec<Option<f64>> = reports.iter().map(|r| r.verdict.delay).collect();
        let params: [&(dyn ToSql + Sync); 7] =
            [&self.stream.id, &self.group, &tokens, &ids, &outcomes, &errors, &delays];
        let rows = self
            .rows(&self.stream.client.inner.queries.settle_exceptions, &params, "settle exceptions")
            .await?;
        Ok(one(rows, "settle exceptions")?.get(0))
    }

    /// The heartbeat of exceptions; returns those whose lease was lost.
    pub(crate) async fn extend_exceptions(&self, held: &[(Uuid, i64)]) -> Result<Vec<i64>> {
        let (tokens, ids): (Vec<Uuid>, Vec<i64>) = held.iter().copied().unzip();
        let owner = self.owner();
        let params: [&(dyn ToSql + Sync); 5] =
            [&self.stream.id, &self.group, &tokens, &ids, &owner];
        let extend = &self.stream.client.inner.queries.extend_exceptions;
        let rows = self.beat(extend, &params, "extend exceptions").await?;
        Ok(one(rows, "extend exceptions")?.get(0))
    }

    /// Hands back whatever was claimed under a token, when the answer to the claim was lost.
    pub(crate) async fn release_claim(&self, token: Uuid) -> Result<()> {
        let params: [&(dyn ToSql + Sync); 3] = [&self.stream.id, &self.group, &token];
        let release = &self.stream.client.inner.queries.release_claim;
        self.rows(release, &params, "hand a claim back").await?;
        Ok(())
    }

    /// Which of these messages still have to be handled, after a transaction that was to settle them ended unknown.
    pub(crate) async fn unsettled(
        &self,
        token: Uuid,
        ids: &[i64],
        exceptions: bool,
    ) -> Result<Vec<i64>> {
        let params: [&(dyn ToSql + Sync); 5] =
            [&self.stream.id, &self.group, &token, &ids, &exceptions];
        let unsettled = &self.stream.client.inner.queries.unsettled;
        let rows = self.rows(unsettled, &params, "look what was settled").await?;
        Ok(one(rows, "look what was settled")?.get(0))
    }

    /// So many messages more went by unhandled.
    pub(super) async fn count_passed_over(&self, expired: u64, superseded: u64) -> Result<()> {
        let number = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
        let (expired, superseded) = (number(expired), number(superseded));
        let params: [&(dyn ToSql + Sync); 4] =
            [&self.stream.id, &self.group, &expired, &superseded];
        let count = &self.stream.client.inner.queries.count_passed_over;
        self.rows(count, &params, "count what went by").await?;
        Ok(())
    }

    /// Hands exceptions back unfinished.
    pub(crate) async fn release_exceptions(&self, held: &[(Uuid, i64)]) -> Result<()> {
        let (tokens, ids): (Vec<Uuid>, Vec<i64>) = held.iter().copied().unzip();
        let params: [&(dyn ToSql + Sync); 4] = [&self.stream.id, &self.group, &tokens, &ids];
        self.rows(
            &self.stream.client.inner.queries.release_exceptions,
            &params,
            "hand exceptions back",
        )
        .await?;
        Ok(())
    }

    /// The error in the user's words: the database knows streams and groups by number.
    pub(super) fn named(&self, error: Error) -> Error {
        let stream = crate::name::shorten(&self.stream.name);
        let (kind, what) = match (error.kind(), error.sql_state()) {
            (ErrorKind::UnknownGroup, _) => {
                (ErrorKind::UnknownGroup, format!("the group was dropped from stream {stream}"))
            }
            (ErrorKind::UnknownStream, _) | (ErrorKind::SchemaMissing, Some("42P01")) => {
                (ErrorKind::UnknownStream, format!("stream {stream} was dropped"))
            }
            _ => return error,
        };
        Error::new(kind, format!("{what} while it was being consumed")).with_source(error)
    }

    pub(super) async fn rows(
        &self,
        query: &Query,
        params: &[&(dyn ToSql + Sync)],
        doing: &str,
    ) -> Result<Vec<Row>> {
        let connection = self.stream.client.connection(doing).await?;
        self.transact(connection, query, params, doing).await
    }

    pub(super) async fn transact(
        &self,
        connection: Pooled,
        query: &Query,
        params: &[&(dyn ToSql + Sync)],
        doing: &str,
    ) -> Result<Vec<Row>> {
        let transaction = transact(&connection, BOOKKEEPING, query, params);
        let answer = answered(ANSWER, transaction, doing).await;
        self.stream.client.keep(connection, answer)
    }

    /// A heartbeat does not wait for a connection that others use up: it has the client's own, and the pool if that is broken.
    async fn beat(
        &self,
        query: &Query,
        params: &[&(dyn ToSql + Sync)],
        doing: &str,
    ) -> Result<Vec<Row>> {
        match Watcher::transact(&self.stream.client, BOOKKEEPING, query, params, doing).await {
            Some(rows) => rows,
            None => self.rows(query, params, doing).await,
        }
    }

    /// As whom this process holds leases.
    pub(super) fn owner(&self) -> Option<i64> {
        *self.stream.client.inner.watcher.life().borrow()
    }
}

impl Page {
    /// Of an answer to a request that was sent at `sent`: what a message had left was less than it is from then on.
    pub(super) fn from_rows(rows: &[Row], sent: Instant) -> Self {
        Self {
            more: rows.last().is_some_and(|row| row.get(5)),
            messages: rows
                .iter()
                .map(|row| {
                    let payload = row.get::<_, Option<Payload>>(6);
                    let superseded: bool = row.get(9);
                    RawMessage {
                        id: row.get(0),
                        key: row.get(1),
                        routing_key: row.get(2),
                        headers: row.get(3),
                        produced_at: row.get(4),
                        // The server keeps the payload of one that has expired or is superseded.
                        tombstone: payload.is_none()
                            && !superseded
                            && row.get::<_, Option<i64>>(7) != Some(0),
                        superseded,
                        payload: payload.into(),
                        expires: expires(row.get(7), sent),
                        lane: row.get(8),
                    }
                })
                .collect(),
        }
    }
}

/// When a message expires that had so many microseconds left, asked for at `sent`.
pub(super) fn expires(left: Option<i64>, sent: Instant) -> Option<Instant> {
    sent.checked_add(Duration::from_micros(left?.max(0).unsigned_abs()))
}

fn columns(reports: &[LeaseReport]) -> (Vec<i64>, Vec<Uuid>, Vec<String>) {
    (
        reports.iter().map(|r| r.seq).collect(),
        reports.iter().map(|r| r.token).collect(),
        reports.iter().map(|r| r.done.to_string()).collect(),
    )
}

pub(super) fn one(rows: Vec<Row>, doing: &str) -> Result<Row> {
    rows.into_iter().next().ok_or_else(|| {
        Error::new(ErrorKind::Database, format!("could not {doing}: no row came back"))
    })
}

pub(super) fn parse_ids(text: &str) -> Result<IdSet> {
    text.parse().map_err(|e: String| Error::new(ErrorKind::Database, e))
}

pub(super) fn milliseconds(ms: i64) -> Duration {
    Duration::from_millis(u64::try_from(ms).unwrap_or_default())
}
