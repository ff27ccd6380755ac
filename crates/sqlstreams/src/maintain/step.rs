//! The steps of the upkeep: each is due when SQL says so (functions/maintain.sql), and does a bounded piece of work in transactions of its own.
//!
//! To add one: its due function in SQL, and a variant here.

use std::time::{Duration, SystemTime};

use serde_json::{Map, Value};
use tokio_postgres::Row;
use tokio_postgres::types::ToSql;

use crate::client::{BEGIN, BOOKKEEPING, Client, answered, transact};
use crate::error::{Error, ErrorKind, Result};
use crate::queries::Query;
use crate::{reclaim, retention, schedule};

/// How long one statement may take.
const LIMIT: Duration = Duration::from_secs(60);
/// So many keys are removed, and so many messages looked at by compaction, in one transaction.
const CHUNK: i64 = 10_000;
/// So many transactions are one step.
const CHUNKS: u32 = 20;
/// A transaction that writes for so long keeps a partition from being sealed: look again then.
const UNSEALED: Duration = Duration::from_secs(15);
/// When to come again where somebody else is at it.
const BUSY: Duration = Duration::from_secs(60);
/// So often it is tried to give space back where that brings nothing.
const TRIES: u64 = 10;
/// So many partitions are written anew in one step.
const PARTITIONS: usize = 3;
/// The pause between two compactions of a stream, and between two looks for space.
const PAUSE: Duration = Duration::from_secs(600);
/// What compaction leaves alone: younger messages, and younger tombstones, in seconds. As `Stream::compact` recommends.
const MIN_AGE: f64 = 300.0;
const TOMBSTONE_AGE: f64 = 24.0 * 3600.0;

/// A step. The urgent ones first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Step {
    /// Partitions that will be needed.
    Partitions,
    /// Messages of schedules.
    Schedules,
    /// Which partitions are final.
    Seal,
    /// Idempotency keys that have outlived their window.
    Keys,
    /// Groups that nobody consumes any more.
    Groups,
    /// Messages of compacted streams that are superseded.
    Compact,
    /// The space of those.
    Reclaim,
    /// Partitions that are old enough to go.
    Retention,
    /// Dead letters that are, and archived messages that nothing refers to any more.
    Archive,
}

/// What a step did, if it did not fail.
#[derive(Debug, Default)]
pub(super) struct Done {
    /// There is more to do.
    pub(super) more: bool,
    /// At once.
    pub(super) urgent: bool,
    /// Not to be done again before.
    pub(super) next: Option<Duration>,
    /// What it wants to know the next time; `None`: as it was.
    pub(super) memory: Option<Map<String, Value>>,
    /// In how long there will be more to do, if that is known.
    pub(super) wake: Option<Duration>,
}

impl Step {
    pub(super) const ALL: [Self; 9] = [
        Self::Partitions,
        Self::Schedules,
        Self::Seal,
        Self::Keys,
        Self::Groups,
        Self::Compact,
        Self::Reclaim,
        Self::Retention,
        Self::Archive,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Partitions => "partitions",
            Self::Schedules => "schedules",
            Self::Seal => "seal",
            Self::Keys => "keys",
            Self::Groups => "groups",
            Self::Compact => "compact",
            Self::Reclaim => "reclaim",
            Self::Retention => "retention",
            Self::Archive => "archive",
        }
    }

    /// `None` for one of a newer schema.
    pub(super) fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|step| step.name() == name)
    }

    /// Somebody would have to wait if it was not done soon.
    pub(super) fn is_urgent(self) -> bool {
        matches!(self, Self::Partitions | Self::Schedules)
    }

    /// Does a piece of the step. `stream` is `None` for steps of the whole installation.
    pub(super) async fn run(self, client: &Client, stream: Option<i64>) -> Result<Done> {
        if self == Self::Schedules {
            return schedules(client).await;
        }
        // All others are steps of a stream.
        let Some(stream) = stream else { return Ok(Done::default()) };
        match self {
            Self::Schedules => Ok(Done::default()),
            Self::Partitions => partitions(client, stream).await,
            Self::Seal => seal(client, stream).await,
            Self::Keys => keys(client, stream).await,
            Self::Groups => groups(client, stream).await,
            Self::Compact => compact(client, stream).await,
            Self::Reclaim => reclaim(client, stream).await,
            Self::Retention => retention(client, stream).await,
            Self::Archive => archive(client, stream).await,
        }
    }
}

async fn partitions(client: &Client, stream: i64) -> Result<Done> {
    let query = &client.inner.queries.maintain_partitions;
    let row = one(client, BEGIN, query, &[&stream], "make partitions").await?;
    match row.get::<_, Option<String>>(2) {
        Some(trouble) => Err(Error::new(ErrorKind::Database, trouble)),
        None => Ok(Done { more: row.get(0), urgent: row.get(1), ..Done::default() }),
    }
}

async fn schedules(client: &Client) -> Result<Done> {
    let fired = schedule::fire_due(client).await?;
    let from = client.inner.schedules.text().map(Value::String);
    let memory = Map::from_iter([("from".to_owned(), from.unwrap_or_default())]);
    let urgent = fired.next == Some(Duration::ZERO);
    Ok(Done { urgent, memory: Some(memory), wake: fired.next, ..Done::default() })
}

async fn seal(client: &Client, stream: i64) -> Result<Done> {
    let query = &client.inner.queries.seal_partitions;
    let row = one(client, BOOKKEEPING, query, &[&stream], "seal partitions").await?;
    Ok(Done { next: row.get::<_, bool>(0).then_some(UNSEALED), ..Done::default() })
}

async fn keys(client: &Client, stream: i64) -> Result<Done> {
    let queries = &client.inner.queries;
    let doing = "remove old idempotency keys";
    let mut from: Option<SystemTime> = None;
    for _ in 0..CHUNKS {
        let params: [&(dyn ToSql + Sync); 3] = [&stream, &from, &CHUNK];
        let expire = &queries.expire_idempotency_keys;
        let rows = call(client, BOOKKEEPING, expire, &params, doing).await?;
        let Some(row) = rows.first() else {
            return Ok(Done { next: Some(BUSY), ..Done::default() });
        };
        let removed: i64 = row.get(0);
        if removed > 0 {
            from = row.get(1);
        }
        if removed < CHUNK {
            let next = &queries.next_expiry_of_keys;
            let row = one(client, BEGIN, next, &[&stream, &from], doing).await?;
            let next = Duration::try_from_secs_f64(row.get(0)).unwrap_or(BUSY);
            return Ok(Done { next: Some(next), ..Done::default() });
        }
    }
    Ok(Done { more: true, ..Done::default() })
}

async fn groups(client: &Client, stream: i64) -> Result<Done> {
    let query = &client.inner.queries.maintain_groups;
    let doing = "look for groups that nobody consumes";
    let memory = remembered(client, Step::Groups, stream).await?;
    let mut after = memory.get("after").and_then(Value::as_i64).unwrap_or_default();
    for _ in 0..CHUNKS {
        let row = one(client, BOOKKEEPING, query, &[&stream, &after], doing).await?;
        match row.get::<_, Option<i64>>(0) {
            Some(further) => after = further,
            None => {
                let next = Duration::try_from_secs_f64(row.get(1)).unwrap_or(PAUSE);
                return Ok(Done { next: Some(next), memory: Some(Map::new()), ..Done::default() });
            }
        }
    }
    let memory = Map::from_iter([("after".to_owned(), after.into())]);
    Ok(Done { more: true, memory: Some(memory), ..Done::default() })
}

async fn compact(client: &Client, stream: i64) -> Result<Done> {
    let queries = &client.inner.queries;
    let doing = "compact the stream";
    let mut memory = remembered(client, Step::Compact, stream).await?;
    if !memory.contains_key("upto") {
        let head: i64 = one(client, BEGIN, &queries.stream_head, &[&stream], doing).await?.get(0);
        memory.clear();
        memory.insert("head".to_owned(), head.into());
        memory.insert("upto".to_owned(), 0.into());
    }
    let number = |memory: &Map<String, Value>, name: &str| {
        memory.get(name).and_then(Value::as_i64).unwrap_or_default()
    };
    let add = |memory: &mut Map<String, Value>, name: &str, count: i64| {
        let sum = number(memory, name).saturating_add(count);
        memory.insert(name.to_owned(), sum.into());
    };
    for _ in 0..CHUNKS {
        let upto = number(&memory, "upto");
        let params: [&(dyn ToSql + Sync); 4] = [&stream, &upto, &MIN_AGE, &TOMBSTONE_AGE];
        let row = one(client, BEGIN, &queries.compact, &params, doing).await?;
        if row.get(4) {
            return Ok(Done { next: Some(BUSY), memory: Some(memory), ..Done::default() });
        }
        add(&mut memory, "looked", row.get(0));
        add(&mut memory, "removed", row.get(1));
        let (upto, floor): (i64, i64) = (row.get(2), row.get(3));
        memory.insert("upto".to_owned(), upto.into());
        if upto >= floor {
            memory.remove("upto");
            if number(&memory, "removed") > 0 {
                want_space(client, stream).await?;
            }
            return Ok(Done { next: Some(PAUSE), memory: Some(memory), ..Done::default() });
        }
    }
    Ok(Done { more: true, memory: Some(memory), ..Done::default() })
}

/// There may be space to give back.
async fn want_space(client: &Client, stream: i64) -> Result<()> {
    let wanted = Map::from_iter([("wanted".to_owned(), true.into())]);
    record(
        client,
        Step::Reclaim.name(),
        Some(stream),
        Duration::ZERO,
        Ok(&Done { memory: Some(wanted), ..Done::default() }),
    )
    .await
}

/// A few partitions, which are written anew.
async fn reclaim(client: &Client, stream: i64) -> Result<Done> {
    let (mut shrunk, mut found) = (false, 0);
    let candidates = reclaim::candidates(client, stream).await?;
    for candidate in candidates.iter().filter(|candidate| candidate.permitted).take(PARTITIONS) {
        let (after, _) = reclaim::rewrite(client, &candidate.partition, candidate.bytes).await?;
        // It is in use, or somebody's snapshot sees what is gone: then it is no use to write it again and again.
        shrunk |= after < candidate.bytes / 4 * 3;
        found += 1;
    }
    if shrunk {
        return Ok(Done { more: true, ..Done::default() });
    }
    let mut memory = remembered(client, Step::Reclaim, stream).await?;
    let tries = memory.get("tries").and_then(Value::as_u64).unwrap_or_default() + 1;
    if found == 0 || tries >= TRIES {
        // Until compaction asks for it again.
        return Ok(Done { memory: Some(Map::new()), ..Done::default() });
    }
    memory.insert("tries".to_owned(), tries.into());
    Ok(Done { next: Some(PAUSE), memory: Some(memory), ..Done::default() })
}

async fn retention(client: &Client, stream: i64) -> Result<Done> {
    let ended = retention::let_go(client, stream).await?;
    Ok(Done { more: ended.more, next: Some(ended.next), ..Done::default() })
}

async fn archive(client: &Client, stream: i64) -> Result<Done> {
    let mut memory = remembered(client, Step::Archive, stream).await?;
    let mut place = retention::Place::from_memory(&memory);
    let ended = retention::tidy(client, stream, &mut place).await?;
    let old = std::mem::replace(&mut memory, place.to_memory());
    // It is written down only when it has changed.
    let memory = (memory != old).then_some(memory);
    Ok(Done { more: ended.more, next: Some(ended.next), memory, ..Done::default() })
}

/// What a step said it wants to know.
async fn remembered(client: &Client, step: Step, stream: i64) -> Result<Map<String, Value>> {
    let doing = "look at the maintenance";
    let query = &client.inner.queries.step_memory;
    let rows = call(client, BEGIN, query, &[&step.name(), &stream], doing).await?;
    let text = rows.first().map(|row| row.get::<_, String>(0)).unwrap_or_default();
    // What is not understood is begun anew.
    Ok(serde_json::from_str(&text).unwrap_or_default())
}

/// Writes down what came of a step.
pub(super) async fn record(
    client: &Client,
    step: &str,
    stream: Option<i64>,
    took: Duration,
    came: Result<&Done, &Error>,
) -> Result<()> {
    let error = came.err().map(describe);
    let done = came.ok();
    let next = done.and_then(|done| done.next).map(|next| next.as_secs_f64());
    let memory = done.and_then(|done| done.memory.clone()).map(|m| Value::Object(m).to_string());
    let took = took.as_secs_f64();
    let params: [&(dyn ToSql + Sync); 6] = [&step, &stream, &took, &error, &next, &memory];
    let query = &client.inner.queries.record_step;
    call(client, BOOKKEEPING, query, &params, "record a step").await.map(drop)
}

/// An error with its causes, in one line.
fn describe(error: &Error) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}

/// A statement that is answered with one row, in a transaction of its own.
async fn one(
    client: &Client,
    begin: &str,
    query: &Query,
    params: &[&(dyn ToSql + Sync)],
    doing: &str,
) -> Result<Row> {
    let rows = call(client, begin, query, params, doing).await?;
    let none = || Error::new(ErrorKind::Database, format!("could not {doing}: no row came back"));
    rows.into_iter().next().ok_or_else(none)
}

/// A statement in a transaction of its own, which is not waited for for ever.
async fn call(
    client: &Client,
    begin: &str,
    query: &Query,
    params: &[&(dyn ToSql + Sync)],
    doing: &str,
) -> Result<Vec<Row>> {
    let connection = client.connection(doing).await?;
    let answer = answered(LIMIT, transact(&connection, begin, query, params), doing).await;
    client.keep(connection, answer)
}
