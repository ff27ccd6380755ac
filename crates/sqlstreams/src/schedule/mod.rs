//! Schedules: messages that are produced at certain times, each once.
//!
//! Times are computed here ([`timetable`], [`cron`]), from what the server says of a schedule and of the time; that a message is produced
//! once is the server's doing (sql/functions/schedule_fire.sql). Whoever does the upkeep calls [`fire_due`].

mod builder;
mod catch_up;
mod cron;
mod fire;
mod info;
mod timetable;

use std::time::SystemTime;

pub use self::builder::ScheduleBuilder;
pub use self::catch_up::Missed;
pub use self::fire::Fired;
pub(crate) use self::fire::{Bound, fire_due};
pub use self::info::{RunKind, ScheduleInfo, ScheduleRun, ScheduleState};
pub use self::timetable::Timetable;
use crate::client::Client;
use crate::error::{Error, ErrorKind, Result};
use crate::name::{check_name, shorten};
use crate::partitions;
use crate::stream::existing;

/// A schedule: a message that is produced at certain times. From [`ScheduleBuilder`].
///
/// Times are those of the database's clock. Each is produced once, in a transaction, by whoever does the upkeep of the installation:
/// some process that consumes, or `sqlstreams maintain`. If nobody does, nothing is produced until somebody does, which then goes by
/// [`Missed`].
#[derive(Debug, Clone)]
pub struct Schedule {
    client: Client,
    name: String,
}

impl Client {
    /// A schedule by its name, which is its own in the whole installation; see [`ScheduleBuilder`]. Nothing is sent yet.
    ///
    /// ```no_run
    /// # async fn f(client: sqlstreams::Client) -> sqlstreams::Result<()> {
    /// use sqlstreams::Outgoing;
    ///
    /// let jobs = client.stream::<String>("jobs").create_if_missing().await?;
    /// let job = "settle the accounts".to_owned();
    /// client
    ///     .schedule("nightly")
    ///     .cron("30 2 * * *")
    ///     .zone("Europe/Berlin")
    ///     .produce(&jobs, Outgoing::new(&job).key("accounts"))
    ///     .create_or_replace()
    ///     .await?;
    /// # Ok(()) }
    /// ```
    pub fn schedule(&self, name: impl Into<String>) -> ScheduleBuilder {
        ScheduleBuilder::new(self.clone(), name.into())
    }

    /// Schedules by name, after a name (`None`: from the first), at most so many.
    ///
    /// # Errors
    /// The database's.
    pub async fn schedules(&self, after: Option<&str>, limit: u32) -> Result<Vec<ScheduleInfo>> {
        let list = &self.inner.queries.list_schedules;
        let limit = i64::from(limit);
        let rows = self.query(list, &[&None::<&str>, &after, &limit], "list schedules").await?;
        rows.iter().map(ScheduleInfo::from_row).collect()
    }

    /// Produces what schedules have to produce by now, and tells in how long there is more. Consumers and `sqlstreams maintain` do it by
    /// themselves; for tests, and for whoever runs neither.
    ///
    /// # Errors
    /// The database's. A schedule that fails does not keep the others: its [`ScheduleInfo`] tells.
    ///
    /// # Cancellation
    /// Dropped, what was sent is still done.
    pub async fn fire_schedules(&self) -> Result<Fired> {
        fire_due(self).await
    }

    /// What the server's clock shows.
    async fn server_time(&self) -> Result<SystemTime> {
        let clock = &self.inner.queries.server_time;
        Ok(self.query_one(clock, &[], "look at the server's clock").await?.get(0))
    }

    async fn find_schedule(&self, name: &str) -> Result<ScheduleInfo> {
        check_name("schedule", name)?;
        let list = &self.inner.queries.list_schedules;
        let doing = "find the schedule";
        let rows = self.query(list, &[&Some(name), &None::<&str>, &1_i64], doing).await?;
        match rows.first() {
            Some(row) => ScheduleInfo::from_row(row),
            None => {
                let names = self.schedules(None, 11).await?.into_iter().map(|s| s.name);
                let names: Vec<String> = names.collect();
                let text = format!("there is no schedule {}", shorten(name));
                Err(Error::new(ErrorKind::UnknownSchedule, text)
                    .with_hint(existing("Schedules", &names)))
            }
        }
    }
}

impl Schedule {
    pub(crate) fn new(client: Client, name: String) -> Self {
        Self { client, name }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it is, and where it stands now.
    ///
    /// # Errors
    /// [`UnknownSchedule`](ErrorKind::UnknownSchedule) when it was dropped, or the database's.
    pub async fn info(&self) -> Result<ScheduleInfo> {
        self.client.find_schedule(&self.name).await
    }

    /// Produces nothing any more, until [`resume`](Self::resume). Returns whether that is new.
    ///
    /// # Errors
    /// As [`info`](Self::info).
    pub async fn pause(&self) -> Result<bool> {
        let pause = &self.client.inner.queries.pause_schedule;
        Ok(self.client.query_one(pause, &[&self.name], "pause the schedule").await?.get(0))
    }

    /// Goes on with the times from now on. Those that went by meanwhile are not missed: nothing makes up for them. Returns whether
    /// it was paused.
    ///
    /// # Errors
    /// As [`info`](Self::info).
    pub async fn resume(&self) -> Result<bool> {
        let from = self.client.server_time().await?;
        // An expression that nothing can be made of shows when somebody looks at it.
        let next = self.info().await?.timetable().ok().and_then(|table| table.next_after(from));
        let resume = &self.client.inner.queries.resume_schedule;
        let doing = "resume the schedule";
        let row = self.client.query_one(resume, &[&self.name, &from, &next], doing).await?;
        self.client.inner.watcher.rang(0);
        Ok(row.get(0))
    }

    /// Produces its message now, also when it is paused or over; its times stay as they are. Returns the message's id.
    ///
    /// # Errors
    /// As [`info`](Self::info), and those of a send.
    pub async fn run_now(&self) -> Result<i64> {
        let run = &self.client.inner.queries.run_schedule;
        let mut room = 0;
        loop {
            match self.client.query_one(run, &[&self.name], "run the schedule").await {
                Err(error) if error.is_out_of_partitions() && room < 3 => {
                    room += 1;
                    let stream = self.info().await?.stream_id;
                    partitions::make_few(&self.client, stream, Some(3)).await?;
                }
                answer => return Ok(answer?.get(0)),
            }
        }
    }

    /// What it did, the latest first: at most `limit` of the 100 that are kept, before the one of this number.
    ///
    /// # Errors
    /// As [`info`](Self::info).
    pub async fn history(&self, before: Option<i64>, limit: u32) -> Result<Vec<ScheduleRun>> {
        let list = &self.client.inner.queries.list_schedule_runs;
        let limit = i64::from(limit);
        let doing = "read the history";
        let rows = self.client.query(list, &[&self.name, &before, &limit], doing).await?;
        if rows.is_empty() {
            // Or else there is no such schedule.
            self.info().await?;
        }
        rows.iter().map(ScheduleRun::from_row).collect()
    }

    /// Drops it with its history. What it has produced stays.
    ///
    /// # Errors
    /// As [`info`](Self::info).
    pub async fn drop_schedule(self) -> Result<()> {
        let drop = &self.client.inner.queries.drop_schedule;
        self.client.query(drop, &[&self.name], "drop the schedule").await?;
        Ok(())
    }
}
