//! The calls of an ordered group's consumers.

use std::time::{Duration, Instant, SystemTime};

use futures_util::future::join5;
use tokio_postgres::Row;
use tokio_postgres::types::ToSql;
use uuid::Uuid;

use super::lanes::{Part, Report};
use crate::client::{BOOKKEEPING, run, within};
use crate::consume::ids::IdSet;
use crate::consume::protocol::{
    ANSWER, COMMIT_AND_BEGIN, ClaimedException, Page, Protocol, milliseconds, one, parse_ids,
};
use crate::error::{Error, Result};

/// The answer to `advance_lanes`, and the messages of the new lease.
#[derive(Debug)]
pub(super) struct Advanced {
    /// Everything that was held is lost; nothing was recorded.
    pub(super) lost: bool,
    pub(super) claimed: Option<Claimed>,
    pub(super) lease_duration: Duration,
    pub(super) paused: bool,
    /// There is something to read, but no lane for us yet.
    pub(super) waiting: bool,
    /// The group has a limit: what is finished is to be told at once.
    pub(super) limited: bool,
    /// The rate limit is used up for so long.
    pub(super) wait: Option<Duration>,
    pub(super) read: Read,
    pub(super) page: Result<Page>,
}

/// What of the log a claim is about.
#[derive(Debug, Default)]
pub(super) struct Read {
    pub(super) lanes: u64,
    /// How many ids, of which there may be none to hand out.
    pub(super) ids: usize,
    /// Up to where the lanes are read now; `None`: no further than before.
    pub(super) reached: Option<i64>,
}

/// A new lease: a range, or exceptions.
#[derive(Debug)]
pub(super) struct Claimed {
    pub(super) seq: i64,
    pub(super) lanes: u64,
    pub(super) pending: IdSet,
    pub(super) exceptions: Vec<ClaimedException>,
    pub(super) suspect: bool,
}

/// What is asked for.
#[derive(Debug, Clone)]
pub(super) struct Wanted {
    /// About so many messages, 0 for none.
    pub(super) limit: usize,
    /// Of these lanes, among so many ids.
    pub(super) lanes: u64,
    pub(super) width: usize,
    /// A lease that is to be parted first.
    pub(super) part: Option<Part>,
    pub(super) suspect: bool,
    /// Under which the lease will be known.
    pub(super) token: Uuid,
    /// About the most bytes of payload.
    pub(super) bytes: i64,
}

impl Protocol {
    /// Tells everything about everything that is held, and claims more; if that is a range, its messages come in the same round trip.
    pub(super) async fn advance_lanes(
        &self,
        holder: Uuid,
        report: &Report,
        wanted: &Wanted,
    ) -> Result<Advanced> {
        let doing = "settle and claim";
        let Wanted { limit, lanes, width, ref part, suspect, token, bytes } = *wanted;
        let (limit, lanes, width) = (limit as i64, lanes.cast_signed(), width as i64);
        let parted = part.as_ref().map(|part| part.token);
        let part_after = part.as_ref().map(|part| part.after);
        let part_lanes = part.as_ref().map(|part| part.lanes.cast_signed());
        let part_tokens = part.as_ref().map(|part| part.tokens.to_vec());
        let owner = self.owner();
        let tokens: Vec<Uuid> = report.leases.iter().map(|l| l.token).collect();
        let finished: Vec<bool> = report.leases.iter().map(|l| l.finished).collect();
        let done: Vec<String> = report.leases.iter().map(|l| l.done.to_string()).collect();
        let failed_tokens: Vec<Uuid> = report.failed.iter().map(|f| f.token).collect();
        let failed_ids: Vec<i64> = report.failed.iter().map(|f| f.id).collect();
        let outcomes: Vec<&str> = report.failed.iter().map(|f| f.verdict.outcome).collect();
        let errors: Vec<Option<&str>> =
            report.failed.iter().map(|f| f.verdict.error.as_deref()).collect();
        let delays: Vec<Option<f64>> = report.failed.iter().map(|f| f.verdict.delay).collect();
        let ended_tokens: Vec<Uuid> = report.ended.iter().map(|e| e.token).collect();
        let ended_ids: Vec<i64> = report.ended.iter().map(|e| e.id).collect();
        let ended_keys: Vec<Option<&str>> = report.ended.iter().map(|e| e.key.as_deref()).collect();
        let ended_outcomes: Vec<&str> = report.ended.iter().map(|e| e.verdict.outcome).collect();
        let ended_errors: Vec<Option<&str>> =
            report.ended.iter().map(|e| e.verdict.error.as_deref()).collect();
        let ended_delays: Vec<Option<f64>> = report.ended.iter().map(|e| e.verdict.delay).collect();

        let client = &self.stream.client;
        let advance = &client.inner.queries.advance_lanes;
        let params: [&(dyn ToSql + Sync); 27] = [
            &self.stream.id,
            &self.group,
            &holder,
            &owner,
            &tokens,
            &done,
            &finished,
            &failed_tokens,
            &failed_ids,
            &outcomes,
            &errors,
            &delays,
            &ended_tokens,
            &ended_ids,
            &ended_keys,
            &ended_outcomes,
            &ended_errors,
            &ended_delays,
            &limit,
            &suspect,
            &token,
            &lanes,
            &width,
            &parted,
            &part_after,
            &part_lanes,
            &part_tokens,
        ];
        let connection = client.connection(doing).await?;
        let sent = Instant::now();
        if limit == 0 {
            let rows = self.transact(connection, advance, &params, doing).await?;
            return Advanced::from_row(&one(rows, doing)?, Ok(Page::default()));
        }
        let fetch_params: [&(dyn ToSql + Sync); 6] =
            [&self.stream.id, &self.group, &token, &0_i64, &limit, &bytes];
        let calls = join5(
            connection.batch_execute(BOOKKEEPING),
            run(&connection, advance, &params),
            connection.batch_execute(COMMIT_AND_BEGIN),
            run(&connection, &self.stream.queries.fetch, &fetch_params),
            connection.batch_execute("COMMIT"),
        );
        let (begun, advanced, committed, fetched, ended) = match within(ANSWER, calls, doing).await
        {
            Ok(answers) => answers,
            Err(silence) => return client.keep(connection, Err(silence)),
        };
        let advanced = begun.and(advanced).and_then(|rows| committed.map(|()| rows));
        let page = fetched
            .and_then(|rows| ended.map(|()| Page::from_rows(&rows, sent)))
            .map_err(|e| Error::from_driver(e, "fetch messages"));
        let rows = client.keep(connection, advanced.map_err(|e| Error::from_driver(e, doing)))?;
        Advanced::from_row(&one(rows, doing)?, page)
    }

    /// Hands back everything.
    pub(super) async fn release_lanes(&self, holder: Uuid) -> Result<()> {
        let params: [&(dyn ToSql + Sync); 3] = [&self.stream.id, &self.group, &holder];
        let release = &self.stream.client.inner.queries.release_lanes;
        self.rows(release, &params, "hand leases back").await?;
        Ok(())
    }
}

impl Advanced {
    fn from_row(row: &Row, page: Result<Page>) -> Result<Self> {
        let claimed = match row.get::<_, Option<i64>>(1) {
            None => None,
            Some(seq) => Some(Claimed {
                seq,
                lanes: row.get::<_, i64>(2).cast_unsigned(),
                pending: parse_ids(row.get(3))?,
                exceptions: exceptions(row),
                suspect: row.get::<_, Option<bool>>(8).unwrap_or(false),
            }),
        };
        Ok(Self {
            lost: row.get(0),
            claimed,
            lease_duration: milliseconds(row.get(9)),
            paused: row.get(10),
            waiting: row.get(11),
            limited: row.get(12),
            wait: row.get::<_, Option<i64>>(13).map(milliseconds),
            read: Read {
                lanes: row.get::<_, Option<i64>>(2).unwrap_or(0).cast_unsigned(),
                ids: row.get::<_, Option<i64>>(14).map_or(0, |ids| ids.max(0) as usize),
                reached: row.get(15),
            },
            page,
        })
    }
}

fn exceptions(row: &Row) -> Vec<ClaimedException> {
    let Some(ids) = row.get::<_, Option<Vec<i64>>>(4) else { return Vec::new() };
    let attempts: Vec<i32> = row.get(5);
    let delays: Vec<i32> = row.get(6);
    let first: Vec<SystemTime> = row.get(7);
    ids.into_iter()
        .zip(attempts)
        .zip(delays)
        .zip(first)
        .map(|(((id, attempts), delays), first_failed_at)| ClaimedException {
            id,
            attempts,
            delays,
            lane: None,
            first_failed_at,
        })
        .collect()
}
