//! Letting partitions go: one step of the upkeep of one stream. What state a partition is in is read off the database, so that it does not matter who did
//! the last part, and whether to the end. See sql/functions/retention.sql, retention_leave.sql and retention_hold.sql.

use std::time::{Duration, Instant};

use tokio_postgres::Row;
use tokio_postgres::error::SqlState;

use super::{RetentionBusy, detach};
use crate::client::{Client, transact};
use crate::error::{Error, Result};
use crate::queries::Query;

/// How long a step takes at the most, about: others wait for it.
const BUDGET: Duration = Duration::from_secs(1);
/// When to come again where the stream is locked, by whoever makes partitions for it, say.
const BUSY: Duration = Duration::from_secs(1);
/// So many partitions leave in one step.
const AT_ONCE: i32 = 8;
/// A look that has to wait is for a moment only: it holds what making a partition needs.
const BRIEFLY: &str = "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL statement_timeout = '1s'";
const DOING: &str = "let old messages go";

/// What a step came to.
#[derive(Debug, Default)]
pub(crate) struct Ended {
    /// Partitions that are gone.
    pub(crate) gone: u64,
    /// There is more to do at once.
    pub(crate) more: bool,
    /// Something is in the way.
    pub(crate) waiting: bool,
    /// It is that somebody has the stream locked.
    pub(crate) busy: bool,
    /// When to come again.
    pub(crate) next: Duration,
}

struct Leaf {
    number: i64,
    archived: bool,
    parent: String,
    name: String,
    present: bool,
    attached: bool,
    pending: bool,
}

/// How far a partition came.
enum Left {
    Gone,
    /// Time is up.
    More,
    /// Others have it, or the log, open.
    Waits,
    /// The stream is locked.
    Busy,
    /// Something of somebody's is made of it: it cannot be dropped.
    Kept,
}

pub(crate) async fn let_go(client: &Client, stream: i64) -> Result<Ended> {
    let queries = &client.inner.queries;
    let deadline = Instant::now() + BUDGET;
    let retire = client.query_one(&queries.retire_partitions, &[&stream, &AT_ONCE], DOING).await;
    let Some(retired) = unless_locked(retire)? else {
        return Ok(Ended { waiting: true, busy: true, next: BUSY, ..Ended::default() });
    };
    let (held, permitted): (bool, bool) = (retired.get(0), retired.get(1));
    let mut ended = Ended { waiting: held || !permitted, ..Ended::default() };
    let (mut detaching, mut kept, mut idle) = (false, false, true);
    if permitted {
        ended.more = skip(client, stream, deadline).await?;
        let at = if ended.more { Vec::new() } else { leaving(client, stream).await? };
        // A whole batch: there may be others behind it.
        let full = at.len() >= AT_ONCE as usize;
        idle = at.is_empty() && !ended.more;
        // Only one can be halfway out.
        let pending = at.iter().find(|leaf| leaf.pending).map(|leaf| leaf.number);
        for leaf in at {
            let blocked = detaching || pending.is_some_and(|number| number != leaf.number);
            match forward(client, stream, leaf, blocked, deadline).await? {
                Left::Gone => ended.gone += 1,
                Left::Waits => detaching = true,
                // It keeps no other from going.
                Left::Kept => kept = true,
                Left::Busy => {
                    ended.busy = true;
                    break;
                }
                Left::More => {
                    ended.more = true;
                    break;
                }
            }
        }
        // All that cannot be dropped come last.
        ended.more |= full && ended.gone > 0 && !detaching && !ended.busy;
    }
    let params: [&(dyn tokio_postgres::types::ToSql + Sync); 5] =
        [&stream, &permitted, &detaching, &held, &idle];
    let next: Option<f64> =
        client.query_one(&queries.retention_ended, &params, DOING).await?.get(0);
    ended.waiting |= detaching || kept || ended.busy;
    ended.next = match ended.more {
        true => Duration::ZERO,
        false if ended.busy => BUSY,
        false => next.and_then(|s| Duration::try_from_secs_f64(s).ok()).unwrap_or_default(),
    };
    Ok(ended)
}

/// Puts groups that are behind to the lowest kept id. Whether there are more of them.
async fn skip(client: &Client, stream: i64, deadline: Instant) -> Result<bool> {
    loop {
        let row = client.query_one(&client.inner.queries.skip_to_first, &[&stream], DOING).await?;
        let more: bool = row.get(0);
        if !more || Instant::now() >= deadline {
            return Ok(more);
        }
    }
}

async fn leaving(client: &Client, stream: i64) -> Result<Vec<Leaf>> {
    let query = &client.inner.queries.leaving_partitions;
    let rows = client.query(query, &[&stream, &AT_ONCE], DOING).await?;
    Ok(rows
        .iter()
        .map(|row| Leaf {
            number: row.get(0),
            archived: row.get::<_, &str>(1) == "archived",
            parent: row.get(2),
            name: row.get(3),
            present: row.get(4),
            attached: row.get(5),
            pending: row.get(6),
        })
        .collect())
}

/// As far as it goes at once.
async fn forward(
    client: &Client,
    stream: i64,
    leaf: Leaf,
    blocked: bool,
    deadline: Instant,
) -> Result<Left> {
    let queries = &client.inner.queries;
    if !leaf.archived && leaf.present {
        match archive(client, stream, leaf.number, deadline).await? {
            None => return Ok(Left::Busy),
            Some(false) => return Ok(Left::More),
            Some(true) => {}
        }
    }
    let mut attached = leaf.attached;
    if attached && !blocked && !client.inner.detaching.is_under_way(stream) {
        attached = if leaf.pending {
            briefly(client, &queries.finalize_detach, stream, leaf.number).await? != Some(true)
        } else {
            let look = client.query_one(&queries.leaf_is_locked, &[&leaf.name], DOING).await?;
            if !look.get::<_, bool>(0) {
                detach::detach(client, stream, &leaf.parent, &leaf.name).await?;
            }
            leaving(client, stream)
                .await?
                .iter()
                .any(|now| now.number == leaf.number && now.attached)
        };
    }
    if !attached {
        match briefly(client, &queries.drop_leaf, stream, leaf.number).await? {
            Some(true) => return Ok(Left::Gone),
            Some(false) => return Ok(Left::Waits),
            None => {}
        }
    }
    // It may be long: at least its space comes back.
    briefly(client, &queries.empty_leaf, stream, leaf.number).await?;
    Ok(if attached { Left::Waits } else { Left::Kept })
}

/// Copies what is referred to. Whether that is all; `None`: the stream is locked.
async fn archive(
    client: &Client,
    stream: i64,
    number: i64,
    deadline: Instant,
) -> Result<Option<bool>> {
    loop {
        let query = &client.inner.queries.archive_referenced;
        let copied = client.query_one(query, &[&stream, &number], DOING).await;
        let Some(row) = unless_locked(copied)? else { return Ok(None) };
        let finished: bool = row.get(0);
        if finished || Instant::now() >= deadline {
            return Ok(Some(finished));
        }
    }
}

/// `None` where a lock could not be had in time.
fn unless_locked(answer: Result<Row>) -> Result<Option<Row>> {
    match answer {
        Err(error) if error.sql_state() == Some(SqlState::LOCK_NOT_AVAILABLE.code()) => Ok(None),
        answer => answer.map(Some),
    }
}

/// A function that says whether it got what it wanted, or was in somebody's way for too long: then it says no. It may say neither.
async fn briefly(client: &Client, query: &Query, stream: i64, number: i64) -> Result<Option<bool>> {
    let connection = client.connection(DOING).await?;
    let answer = transact(&connection, BRIEFLY, query, &[&stream, &number]).await;
    let answer = match answer {
        Err(error) if error.code() == Some(&SqlState::QUERY_CANCELED) => Ok(Vec::new()),
        answer => answer.map_err(|e| Error::from_driver(e, DOING)),
    };
    let rows = client.keep(connection, answer)?;
    Ok(rows.first().map_or(Some(false), |row| row.get(0)))
}

/// Who has the stream, or a partition of it that is leaving, locked, if that can be told.
pub(super) async fn busy(client: &Client, stream: i64) -> Result<RetentionBusy> {
    let rows = client.query(&client.inner.queries.retention_busy, &[&stream], DOING).await?;
    let who = rows.first();
    Ok(RetentionBusy { by: who.map(|row| row.get(0)), since: who.and_then(|row| row.get(1)) })
}
