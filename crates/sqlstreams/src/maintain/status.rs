//! Who does the maintenance, and what came of it.

use std::time::{Duration, SystemTime};

use tokio_postgres::Row;
use uuid::Uuid;

use super::Maintenance;
use crate::error::Result;
use crate::retention::RetentionHold;

/// So many failures are listed, and so many streams that are held up.
const FAILURES: i64 = 100;

/// The state of the maintenance; from [`Maintenance::status`].
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct MaintenanceStatus {
    /// What whoever does it calls itself; `None`: nobody does.
    pub holder: Option<String>,
    /// Since when it does.
    pub since: Option<SystemTime>,
    /// For how long its lease lasts, unless it is renewed.
    pub remaining: Option<Duration>,
    /// What was done so far, by step. A step that never had anything to do is not listed.
    pub steps: Vec<StepStatus>,
    /// What fails at present, the last one first, at most 100.
    pub failures: Vec<StepFailure>,
    /// Streams whose messages are to go and cannot, by name, at most 100.
    pub holds: Vec<StreamHold>,
}

/// A stream whose [`Retention`](crate::Retention) is held up.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct StreamHold {
    /// Its name.
    pub stream: String,
    /// What it is.
    pub hold: RetentionHold,
}

/// What was done of a step, over all streams.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct StepStatus {
    /// Which.
    pub step: String,
    /// For how many streams it has had something to do.
    pub streams: u64,
    /// How often it was run.
    pub runs: u64,
    /// How often it has failed.
    pub failures: u64,
    /// For how many streams it fails at present.
    pub failing: u64,
    /// When it was last run.
    pub last: SystemTime,
    /// How long it took the last time, on average over the streams.
    pub took: Duration,
    /// How long it took the last time for the stream where it took longest.
    pub took_longest: Duration,
}

/// A step that fails.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct StepFailure {
    /// Which.
    pub step: String,
    /// Of which stream; `None`: of the whole installation.
    pub stream: Option<String>,
    /// How often in a row.
    pub times: u32,
    /// Why, the last time.
    pub error: String,
    /// When it failed last.
    pub at: SystemTime,
    /// When it will be tried again.
    pub next: Option<SystemTime>,
}

impl Maintenance {
    /// Who does the maintenance, and what came of it.
    ///
    /// # Errors
    /// The database's.
    pub async fn status(&self) -> Result<MaintenanceStatus> {
        let doing = "look at the maintenance";
        let queries = &self.client.inner.queries;
        let rows = self.client.query(&queries.maintenance_holder, &[], doing).await?;
        let steps = self.client.query(&queries.maintenance_steps, &[], doing).await?;
        let failures = &queries.maintenance_failures;
        let failures = self.client.query(failures, &[&FAILURES], doing).await?;
        let holds = &queries.list_retention_holds;
        let holds = self.client.query(holds, &[&FAILURES], doing).await?;
        let left = |row: &&Row| row.get::<_, Option<i64>>(3).unwrap_or_default();
        let held = |row: &&Row| row.get::<_, Option<Uuid>>(0).is_some() && left(row) > 0;
        let holder = rows.first().filter(held);
        Ok(MaintenanceStatus {
            holder: holder.map(|row| row.get::<_, Option<String>>(1).unwrap_or_default()),
            since: holder.and_then(|row| row.get(2)),
            remaining: holder.map(|row| Duration::from_millis(count(left(&row)))),
            steps: steps.iter().map(StepStatus::from_row).collect(),
            failures: failures.iter().map(StepFailure::from_row).collect(),
            holds: holds
                .iter()
                .filter_map(|row| StreamHold::from_row(row).transpose())
                .collect::<Result<_>>()?,
        })
    }
}

impl StepStatus {
    fn from_row(row: &Row) -> Self {
        let seconds = |at| Duration::try_from_secs_f64(row.get(at)).unwrap_or_default();
        Self {
            step: row.get(0),
            streams: count(row.get(1)),
            runs: count(row.get(2)),
            failures: count(row.get(3)),
            failing: count(row.get(4)),
            last: row.get(5),
            took: seconds(6),
            took_longest: seconds(7),
        }
    }
}

impl StreamHold {
    fn from_row(row: &Row) -> Result<Option<Self>> {
        let hold = RetentionHold::from_row(row, 1)?;
        Ok(hold.map(|hold| Self { stream: row.get(0), hold }))
    }
}

impl StepFailure {
    fn from_row(row: &Row) -> Self {
        Self {
            step: row.get(0),
            stream: row.get(1),
            times: u32::try_from(row.get::<_, i32>(2)).unwrap_or_default(),
            error: row.get::<_, Option<String>>(3).unwrap_or_default(),
            at: row.get(4),
            next: row.get(5),
        }
    }
}

fn count(number: i64) -> u64 {
    u64::try_from(number).unwrap_or_default()
}
