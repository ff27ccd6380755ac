//! Firing: what schedules have to produce by now. Any number of processes may do it at the same time; the server sees to it that
//! each time is produced once.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use futures_util::future::join_all;
use jiff::Timestamp;
use tokio_postgres::Row;
use tokio_postgres::types::ToSql;

use super::catch_up::{Plan, Policy, plan};
use super::timetable::{Timetable, system_time};
use crate::client::{BEGIN, Client, transact, within};
use crate::error::{Error, ErrorKind, Result};
use crate::partitions;
use crate::wake::Bell;

/// So many schedules are looked at at a time.
const MOST: i64 = 200;
/// So many are sent in one write, each a transaction of its own.
const TOGETHER: usize = 20;
/// How long the server may take for those.
const LIMIT: Duration = Duration::from_secs(30);
/// After so long the rest is left for the next time.
const ENOUGH: Duration = Duration::from_secs(5);
/// When to come again to what others were at.
const OTHERS_FIRST: Duration = Duration::from_millis(250);
/// How often schedules are looked for without a lower bound, and how far below the last look it is: see wake/delayed.rs.
const UNBOUNDED: Duration = Duration::from_secs(5);
const MARGIN: Duration = Duration::from_secs(1);

/// What came of [`Client::fire_schedules`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Fired {
    /// How many messages were produced.
    pub produced: u64,
    /// How many schedules failed.
    pub failed: u64,
    /// In how long the next schedule is due, by the database's clock; `None`: there is none.
    pub next: Option<Duration>,
}

/// From when on schedules are looked for: those before were found by the looks before.
#[derive(Debug, Default)]
pub(crate) struct Bound(Mutex<Option<(SystemTime, Instant)>>);

impl Bound {
    fn get(&self) -> Option<SystemTime> {
        let bound = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        bound.filter(|(_, since)| since.elapsed() < UNBOUNDED).map(|(bound, _)| bound)
    }

    /// All that was due at a look is dealt with.
    fn set(&self, looked_at: SystemTime) {
        let mut bound = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let since = match *bound {
            Some((_, since)) if since.elapsed() < UNBOUNDED => since,
            _ => Instant::now(),
        };
        *bound = looked_at.checked_sub(MARGIN).map(|looked_at| (looked_at, since));
    }

    /// For the look of the maintenance, as SQL reads it.
    pub(crate) fn text(&self) -> Option<String> {
        Timestamp::try_from(self.get()?).ok().map(|bound| bound.to_string())
    }

    fn forget(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// A schedule that is to be looked at.
struct Due {
    id: i64,
    turn: i64,
    stream: i64,
    name: String,
    plan: Result<Plan>,
}

/// What came of one schedule.
enum Outcome {
    Produced(u64),
    Failed,
    /// Somebody else was faster, or a partition was made: the next look tells.
    Again,
    /// Somebody else is at it.
    Busy,
}

/// Produces what is due, and tells when to come again.
pub(crate) async fn fire_due(client: &Client) -> Result<Fired> {
    let (begun, mut fired) = (Instant::now(), Fired::default());
    let bound = &client.inner.schedules;
    loop {
        let rows = look(client, bound.get()).await?;
        let (due, next): (Vec<&Row>, Vec<&Row>) = rows.iter().partition(|row| due_in(row) <= 0);
        fired.next = next.first().map(|row| micros(due_in(row)));
        if due.is_empty() {
            if let Some(row) = next.first() {
                bound.set(row.get(0));
            }
            return Ok(fired);
        }
        let due: Vec<Due> = due.into_iter().map(Due::from_row).collect();
        let (mut progress, mut busy) = (false, false);
        for some in due.chunks(TOGETHER) {
            for outcome in fire_some(client, some).await? {
                match outcome {
                    Outcome::Produced(count) => fired.produced += count,
                    Outcome::Failed => fired.failed += 1,
                    Outcome::Again => {}
                    Outcome::Busy => busy = true,
                }
                progress |= !matches!(outcome, Outcome::Busy);
            }
        }
        if busy {
            bound.forget();
        }
        // Where no others could be looked at, what was busy fills the look.
        if !progress {
            fired.next = Some(fired.next.map_or(OTHERS_FIRST, |next| next.min(OTHERS_FIRST)));
            return Ok(fired);
        }
        if begun.elapsed() >= ENOUGH {
            fired.next = Some(Duration::ZERO);
            return Ok(fired);
        }
    }
}

async fn look(client: &Client, from: Option<SystemTime>) -> Result<Vec<Row>> {
    let look = &client.inner.queries.due_schedules;
    let params: [&(dyn ToSql + Sync); 2] = [&from, &MOST];
    within(LIMIT, client.query(look, &params, "look at the schedules"), "look at the schedules")
        .await?
}

fn due_in(row: &Row) -> i64 {
    row.get(1)
}

fn micros(due_in: i64) -> Duration {
    Duration::from_micros(u64::try_from(due_in).unwrap_or_default())
}

impl Due {
    fn from_row(row: &Row) -> Self {
        let plan = Self::plan(row);
        Self { id: row.get(2), turn: row.get(3), stream: row.get(4), name: row.get(5), plan }
    }

    fn plan(row: &Row) -> Result<Plan> {
        let (cron, at): (Option<&str>, Option<SystemTime>) = (row.get(6), row.get(7));
        let table = match (cron, at) {
            (Some(cron), _) => Timetable::since(cron, row.get(8), row.get(12))?,
            (None, at) => Timetable::at(at.unwrap_or(SystemTime::UNIX_EPOCH))?,
        };
        let policy = Policy {
            missed: row.get::<_, &str>(9).parse()?,
            grace: Duration::try_from_secs_f64(row.get(10)).unwrap_or_default(),
            catch_up: usize::try_from(row.get::<_, i32>(11)).unwrap_or_default(),
        };
        Ok(plan(&table, policy, timestamp(row.get(13))?, timestamp(row.get(0))?))
    }
}

fn timestamp(time: SystemTime) -> Result<Timestamp> {
    Timestamp::try_from(time).map_err(|e| {
        Error::new(ErrorKind::Database, "a schedule's time is beyond the calendar").with_source(e)
    })
}

/// Fires some schedules, each in a transaction of its own, and records those that fail. An error is one of the connection.
async fn fire_some(client: &Client, some: &[Due]) -> Result<Vec<Outcome>> {
    let doing = "produce the messages of schedules";
    let connection = client.connection(doing).await?;
    let sent = join_all(some.iter().map(|due| send(&connection, client, due)));
    let answers = within(LIMIT, sent, doing).await;
    // A connection that broke fails all of them alike: then nothing is known of any.
    let answers = answers.and_then(|answers| {
        let broken = |answer: &Result<Row>| answer.as_ref().is_err_and(Error::is_of_connection);
        match answers.iter().position(broken) {
            Some(place) => {
                answers.into_iter().nth(place).map_or(Ok(Vec::new()), |e| e.map(|_| Vec::new()))
            }
            None => Ok(answers),
        }
    });
    let answers = client.keep(connection, answers)?;
    let mut outcomes = Vec::with_capacity(some.len());
    for (due, answer) in some.iter().zip(answers) {
        outcomes.push(match answer {
            Ok(row) => understand(client, due, &row).await?,
            Err(error) => fail(client, due, &error).await?,
        });
    }
    Ok(outcomes)
}

async fn send(connection: &tokio_postgres::Client, client: &Client, due: &Due) -> Result<Row> {
    let plan = due.plan.as_ref().map_err(Error::without_source)?;
    let times: Vec<SystemTime> = plan.times.iter().map(|time| system_time(*time)).collect();
    let late = i32::try_from(plan.late).unwrap_or(i32::MAX);
    let missed = i64::try_from(plan.missed).unwrap_or(i64::MAX);
    let missed_at = plan.missed_at.map(system_time);
    let (until, next) = (system_time(plan.until), plan.next.map(system_time));
    let params: [&(dyn ToSql + Sync); 8] =
        [&due.id, &due.turn, &times, &late, &missed, &missed_at, &until, &next];
    let fire = &client.inner.queries.fire_schedule;
    let rows = transact(connection, BEGIN, fire, &params).await;
    let doing = "produce the message";
    let rows = rows.map_err(|e| Error::from_driver(e, doing))?;
    rows.into_iter()
        .next()
        .ok_or_else(|| Error::new(ErrorKind::Database, "no answer from fire_schedule"))
}

async fn understand(client: &Client, due: &Due, row: &Row) -> Result<Outcome> {
    Ok(match row.get(0) {
        "done" => {
            let ids: Option<Vec<i64>> = row.get(2);
            let count = ids.map_or(0, |ids| ids.len() as u64);
            if count > 0 {
                client.inner.watcher.rang(due.stream);
                Bell::ring(client, due.stream);
            }
            Outcome::Produced(count)
        }
        "busy" | "early" => Outcome::Busy,
        "no_room" => match partitions::make_few(client, due.stream, Some(3)).await {
            Ok(_) => Outcome::Again,
            Err(error) if error.is_of_connection() => return Err(error),
            Err(error) => fail(client, due, &error).await?,
        },
        _ => Outcome::Again,
    })
}

/// The others go on; this one is tried again later.
async fn fail(client: &Client, due: &Due, error: &Error) -> Result<Outcome> {
    let text = tell(&due.name, error);
    let fail = &client.inner.queries.fail_schedule;
    let row = client.query_one(fail, &[&due.id, &due.turn, &text], "record a failure").await?;
    Ok(if row.get(0) { Outcome::Failed } else { Outcome::Busy })
}

/// Logs why a schedule has failed, and returns it as a text.
fn tell(name: &str, error: &Error) -> String {
    let source = error as &dyn std::error::Error;
    tracing::warn!(schedule = name, error = source, "a schedule could not be fired");
    match error.hint() {
        Some(hint) => format!("{error} ({hint})"),
        None => error.to_string(),
    }
}
