//! What is known about a schedule, and what it did.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, SystemTime};

use tokio_postgres::Row;

use super::catch_up::Missed;
use super::timetable::Timetable;
use crate::error::{Error, ErrorKind, Result};
use crate::message::Headers;

/// A schedule, and where it stands.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct ScheduleInfo {
    /// Its number.
    pub id: i64,
    /// Its name.
    pub name: String,
    /// The stream that it produces for.
    pub stream: String,
    /// The number of that.
    pub stream_id: i64,
    /// What it does at present.
    pub state: ScheduleState,
    /// Its times, if it has more than one.
    pub cron: Option<String>,
    /// Its time, if it has just one.
    pub at: Option<SystemTime>,
    /// The time zone whose clocks `cron` is about.
    pub zone: String,
    /// What becomes of times that were missed.
    pub missed: Missed,
    /// What is later than this counts as missed.
    pub grace: Duration,
    /// With [`Missed::All`]: so many times at most are made up for.
    pub catch_up: u32,
    /// The key of its messages.
    pub key: Option<String>,
    /// Their routing key.
    pub routing_key: Option<String>,
    /// Their headers, beside those that tell the schedule and the time.
    pub headers: Headers,
    /// After so long nobody gets them any more.
    pub expires_in: Option<Duration>,
    /// The payload in its text form; none in a tombstone.
    pub payload: Option<String>,
    /// When it was created.
    pub created_at: SystemTime,
    /// Since when its times are as they are; what `@every` counts from.
    pub since: SystemTime,
    /// The next time; none while it is paused or over, or was never looked at.
    pub next_fire: Option<SystemTime>,
    /// The latest that it did: for which time.
    pub last_fire: Option<SystemTime>,
    /// The message that was produced then; none where the time was skipped.
    pub last_message: Option<i64>,
    /// When that was.
    pub last_at: Option<SystemTime>,
    /// How many messages it has produced.
    pub produced: i64,
    /// For how many of its times there is no message, since they were missed.
    pub not_produced: i64,
    /// How often it has failed since it last worked.
    pub failures: i32,
    /// When it is tried again, if it has.
    pub retry_at: Option<SystemTime>,
    /// Why it failed the last time that it did.
    pub last_error: Option<String>,
    /// When that was.
    pub failed_at: Option<SystemTime>,
}

/// What a schedule does at present.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ScheduleState {
    /// It waits for its next time.
    Active,
    /// Somebody has paused it.
    Paused,
    /// Its message could not be produced; that is tried again.
    Failing,
    /// It has no more times.
    Over,
}

/// Something that a schedule did.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ScheduleRun {
    /// Its number, counted from 1.
    pub number: i64,
    /// How it came about.
    pub kind: RunKind,
    /// The time that it was for.
    pub fire_time: SystemTime,
    /// When it was done.
    pub at: SystemTime,
    /// The message; none where the time was skipped.
    pub message_id: Option<i64>,
    /// For so many times there is no message: before this one, or where it was skipped, up to it.
    pub missed: i64,
}

/// How something that a schedule did came about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RunKind {
    /// The time came.
    Due,
    /// The time was missed, and made up for.
    CaughtUp,
    /// The time was missed.
    Skipped,
    /// Somebody asked for it.
    Manual,
}

impl ScheduleInfo {
    /// Its times.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) for an expression or a zone that this process does not know.
    pub fn timetable(&self) -> Result<Timetable> {
        match (&self.cron, self.at) {
            (Some(cron), _) => Timetable::since(cron, &self.zone, self.since),
            (None, at) => Timetable::at(at.unwrap_or(SystemTime::UNIX_EPOCH)),
        }
    }

    pub(super) fn from_row(row: &Row) -> Result<Self> {
        let headers = row.get::<_, Option<&str>>(12).map(serde_json::from_str);
        let seconds = |seconds: f64| Duration::try_from_secs_f64(seconds).unwrap_or_default();
        Ok(Self {
            id: row.get(0),
            name: row.get(1),
            stream: row.get(2),
            stream_id: row.get(3),
            state: row.get::<_, &str>(4).parse()?,
            cron: row.get(5),
            at: row.get(6),
            zone: row.get(7),
            missed: row.get::<_, &str>(8).parse()?,
            grace: seconds(row.get(9)),
            catch_up: u32::try_from(row.get::<_, i32>(10)).unwrap_or_default(),
            key: row.get(11),
            routing_key: row.get(13),
            headers: headers.transpose().map_err(not_json)?.unwrap_or_default(),
            expires_in: row.get::<_, Option<f64>>(14).map(seconds),
            payload: row.get(15),
            created_at: row.get(16),
            since: row.get(17),
            next_fire: row.get(18),
            last_fire: row.get(19),
            last_message: row.get(20),
            last_at: row.get(21),
            produced: row.get(22),
            not_produced: row.get(23),
            failures: row.get(24),
            retry_at: row.get(25),
            last_error: row.get(26),
            failed_at: row.get(27),
        })
    }
}

fn not_json(error: serde_json::Error) -> Error {
    Error::new(ErrorKind::Database, "headers of a schedule are not JSON").with_source(error)
}

impl ScheduleRun {
    pub(super) fn from_row(row: &Row) -> Result<Self> {
        Ok(Self {
            number: row.get(0),
            kind: row.get::<_, &str>(1).parse()?,
            fire_time: row.get(2),
            at: row.get(3),
            message_id: row.get(4),
            missed: row.get(5),
        })
    }
}

/// Words of the database as an enum, and back.
macro_rules! words {
    ($type:ident { $($word:literal: $variant:ident,)* }) => {
        impl $type {
            /// Its name, as in the database.
            pub fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $word,)*
                }
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.as_str())
            }
        }

        impl FromStr for $type {
            type Err = Error;

            fn from_str(text: &str) -> Result<Self> {
                match text {
                    $($word => Ok(Self::$variant),)*
                    other => Err(Error::new(
                        ErrorKind::SchemaMismatch,
                        format!("this program does not know what {other:?} is in a schedule"),
                    )
                    .with_hint("Upgrade it.")),
                }
            }
        }
    };
}

words!(ScheduleState { "active": Active, "paused": Paused, "failing": Failing, "over": Over, });
words!(RunKind { "due": Due, "caught_up": CaughtUp, "skipped": Skipped, "manual": Manual, });
