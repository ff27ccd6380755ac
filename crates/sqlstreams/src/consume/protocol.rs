//! The consumer's calls of the SQL functions, one method each.
//!
//! Every call runs in a READ COMMITTED transaction of its own, whatever the default is, and commits without waiting for
//! the disk: what a crash of the server takes back is a repeat, never a loss. Begin, call and commit travel in one write.

use std::time::{Duration, SystemTime};

use deadpool_postgres::Object;
use futures_util::future::join5;
use tokio::time::timeout;
use tokio_postgres::Row;
use tokio_postgres::types::ToSql;
use uuid::Uuid;

use super::ids::IdSet;
use crate::client::{run, transact};
use crate::error::{Error, ErrorKind, Result};
use crate::message::RawMessage;
use crate::outcome::Verdict;
use crate::payload::Payload;
use crate::queries::Query;
use crate::stream::StreamInner;

const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL synchronous_commit = off";
/// How long the server may take for an answer. By then the leases of most groups have run out.
const ANSWER: Duration = Duration::from_secs(15);
const COMMIT_AND_BEGIN: &str = "COMMIT; BEGIN ISOLATION LEVEL READ COMMITTED";

/// A lease as it was claimed.
#[derive(Debug, Clone)]
pub(crate) struct Claimed {
    pub(crate) seq: i64,
    pub(crate) token: Uuid,
    pub(crate) pending: IdSet,
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
    pub(crate) lease_duration: Duration,
    /// Its first messages. That they cannot be read does not undo the claim.
    pub(crate) page: Result<Page>,
}

/// Messages of a lease.
#[derive(Debug, Default)]
pub(crate) struct Page {
    pub(crate) messages: Vec<RawMessage>,
    /// Whether the lease holds more beyond the last one.
    pub(crate) more: bool,
}

/// Exceptions that were claimed together.
#[derive(Debug)]
pub(crate) struct ClaimedExceptions {
    /// Ids, and how often each has failed.
    pub(crate) exceptions: Vec<(i64, i32)>,
    pub(crate) earliest_due: Option<SystemTime>,
    pub(crate) lease_duration: Duration,
}

/// What `poll` saw.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) fresh: bool,
    pub(crate) lapsed: bool,
    pub(crate) due: bool,
    pub(crate) suspect: bool,
}

/// The calls, for one group.
#[derive(Debug, Clone)]
pub(crate) struct Protocol {
    pub(crate) stream: std::sync::Arc<StreamInner>,
    pub(crate) group: i64,
}

impl Protocol {
    /// Reports leases, claims up to `limit` ids and fetches their messages, in one round trip.
    pub(crate) async fn advance(
        &self,
        reports: &[LeaseReport],
        limit: i64,
        bytes: i64,
    ) -> Result<Advanced> {
        let doing = "settle and claim";
        let failed = |e| Error::from_driver(e, doing);
        let token = Uuid::new_v4();
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
        let advance_params: [&(dyn ToSql + Sync); 12] = [
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
        ];
        let connection = self.stream.client.connection(doing).await?;
        let (row, page) = if limit > 0 {
            let fetch_params: [&(dyn ToSql + Sync); 6] =
                [&self.stream.id, &self.group, &token, &0_i64, &limit, &bytes];
            // Written in this order at the first poll; the server answers in it.
            let calls = join5(
                connection.batch_execute(BEGIN),
                run(&connection, advance, &advance_params),
                connection.batch_execute(COMMIT_AND_BEGIN),
                run(&connection, &self.stream.queries.fetch, &fetch_params),
                connection.batch_execute("COMMIT"),
            );
            let Ok((begun, advanced, committed, fetched, ended)) = timeout(ANSWER, calls).await
            else {
                return Err(no_answer(connection, doing));
            };
            begun.map_err(failed)?;
            let rows = advanced.map_err(failed)?;
            committed.map_err(failed)?;
            let page = fetched
                .and_then(|rows| ended.map(|()| Page::from_rows(&rows)))
                .map_err(|e| Error::from_driver(e, "fetch messages"));
            (one(rows, doing)?, page)
        } else {
            (
                one(self.transact(connection, advance, &advance_params, doing).await?, doing)?,
                Ok(Page::default()),
            )
        };
        let claimed = match row.get::<_, Option<i64>>(1) {
            None => None,
            Some(seq) => Some(Claimed { seq, token, pending: parse_ids(row.get(2))? }),
        };
        Ok(Advanced { lost: row.get(0), claimed, lease_duration: milliseconds(row.get(3)), page })
    }

    /// More messages of a lease.
    pub(crate) async fn fetch(
        &self,
        token: Uuid,
        after: i64,
        limit: i64,
        bytes: i64,
    ) -> Result<Page> {
        let params: [&(dyn ToSql + Sync); 6] =
            [&self.stream.id, &self.group, &token, &after, &limit, &bytes];
        Ok(Page::from_rows(
            &self.rows(&self.stream.queries.fetch, &params, "fetch messages").await?,
        ))
    }

    /// The heartbeat: each lease with the seq it has now, `None` for those that were lost.
    pub(crate) async fn extend(&self, reports: &[LeaseReport]) -> Result<Vec<(Uuid, Option<i64>)>> {
        let (seqs, tokens, done) = columns(reports);
        let params: [&(dyn ToSql + Sync); 5] =
            [&self.stream.id, &self.group, &seqs, &tokens, &done];
        let rows = self
            .rows(&self.stream.client.inner.queries.extend, &params, "extend the leases")
            .await?;
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

    /// Whether there is anything to do. No lock, no write.
    pub(crate) async fn poll(&self, due_from: Option<SystemTime>) -> Result<Seen> {
        let params: [&(dyn ToSql + Sync); 3] = [&self.stream.id, &self.group, &due_from];
        let poll = &self.stream.client.inner.queries.poll;
        let row = one(self.rows(poll, &params, "look for messages").await?, "look for messages")?;
        Ok(Seen { fresh: row.get(0), lapsed: row.get(1), due: row.get(2), suspect: row.get(3) })
    }

    /// Whether everything up to `id` is done or dead.
    pub(crate) async fn is_resolved(&self, id: i64) -> Result<bool> {
        let query = &self.stream.client.inner.queries.is_resolved;
        Ok(self
            .stream
            .client
            .query_one(query, &[&self.stream.id, &self.group, &id], "look how far the group is")
            .await?
            .get(0))
    }

    /// The last id drawn.
    pub(crate) async fn head(&self) -> Result<i64> {
        let query = &self.stream.client.inner.queries.stream_head;
        Ok(self
            .stream
            .client
            .query_one(query, &[&self.stream.id], "find the latest message")
            .await?
            .get(0))
    }

    /// Claims exceptions that are due.
    pub(crate) async fn take_exceptions(
        &self,
        token: Uuid,
        limit: i64,
        suspect: bool,
        due_from: Option<SystemTime>,
    ) -> Result<ClaimedExceptions> {
        let params: [&(dyn ToSql + Sync); 6] =
            [&self.stream.id, &self.group, &token, &limit, &suspect, &due_from];
        let take = &self.stream.client.inner.queries.take_exceptions;
        let rows = self.rows(take, &params, "claim exceptions").await?;
        Ok(ClaimedExceptions {
            exceptions: rows.iter().map(|row| (row.get(0), row.get(1))).collect(),
            earliest_due: rows.iter().map(|row| row.get(2)).min(),
            lease_duration: milliseconds(rows.first().map_or(0, |row| row.get(3))),
        })
    }

    /// Messages of the log by their ids, in order.
    pub(crate) async fn fetch_messages(&self, ids: &[i64], bytes: i64) -> Result<Page> {
        let params: [&(dyn ToSql + Sync); 3] = [&self.stream.id, &ids, &bytes];
        let fetch = &self.stream.queries.fetch_messages;
        Ok(Page::from_rows(&self.rows(fetch, &params, "fetch messages").await?))
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
        let params: [&(dyn ToSql + Sync); 4] = [&self.stream.id, &self.group, &tokens, &ids];
        let rows = self
            .rows(&self.stream.client.inner.queries.extend_exceptions, &params, "extend exceptions")
            .await?;
        Ok(one(rows, "extend exceptions")?.get(0))
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

    async fn rows(
        &self,
        query: &Query,
        params: &[&(dyn ToSql + Sync)],
        doing: &str,
    ) -> Result<Vec<Row>> {
        let connection = self.stream.client.connection(doing).await?;
        self.transact(connection, query, params, doing).await
    }

    async fn transact(
        &self,
        connection: Object,
        query: &Query,
        params: &[&(dyn ToSql + Sync)],
        doing: &str,
    ) -> Result<Vec<Row>> {
        match timeout(ANSWER, transact(&connection, BEGIN, query, params)).await {
            Ok(rows) => rows.map_err(|e| Error::from_driver(e, doing)),
            Err(_) => Err(no_answer(connection, doing)),
        }
    }
}

/// The server, or the way to it, hangs: the connection is of no use any more.
fn no_answer(connection: Object, doing: &str) -> Error {
    drop(Object::take(connection));
    Error::new(
        ErrorKind::Connection,
        format!("the server did not answer within {} s when asked to {doing}", ANSWER.as_secs()),
    )
    .with_hint("Look whether the server, or the network to it, hangs.")
}

impl Page {
    fn from_rows(rows: &[Row]) -> Self {
        Self {
            more: rows.last().is_some_and(|row| row.get(5)),
            messages: rows
                .iter()
                .map(|row| RawMessage {
                    id: row.get(0),
                    key: row.get(1),
                    routing_key: row.get(2),
                    headers: row.get(3),
                    produced_at: row.get(4),
                    payload: row.get::<_, Payload>(6).0,
                    attempts: 0,
                })
                .collect(),
        }
    }
}

fn columns(reports: &[LeaseReport]) -> (Vec<i64>, Vec<Uuid>, Vec<String>) {
    (
        reports.iter().map(|r| r.seq).collect(),
        reports.iter().map(|r| r.token).collect(),
        reports.iter().map(|r| r.done.to_string()).collect(),
    )
}

fn one(rows: Vec<Row>, doing: &str) -> Result<Row> {
    rows.into_iter().next().ok_or_else(|| {
        Error::new(ErrorKind::Database, format!("could not {doing}: no row came back"))
    })
}

fn parse_ids(text: &str) -> Result<IdSet> {
    text.parse().map_err(|e: String| Error::new(ErrorKind::Database, e))
}

fn milliseconds(ms: i64) -> Duration {
    Duration::from_millis(u64::try_from(ms).unwrap_or_default())
}
