//! What the demo found out: the document that `--json` prints. Every number was measured.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;

/// All of it.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Facts {
    pub(crate) sqlstreams: &'static str,
    pub(crate) postgresql: Server,
    pub(crate) stream: String,
    pub(crate) produced: Produced,
    pub(crate) groups: Vec<Group>,
    pub(crate) dead_letters: DeadLetters,
    pub(crate) redrive: Redrive,
    pub(crate) replay: Replay,
    pub(crate) transaction: Transaction,
    /// Facts that were compared with what they had to be.
    pub(crate) checks: u64,
    /// From the first order to the last check.
    pub(crate) seconds: f64,
}

/// The server it ran on.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Server {
    pub(crate) version: String,
    /// Whether it was started for this run.
    pub(crate) throw_away: bool,
    pub(crate) fsync: String,
    pub(crate) synchronous_commit: String,
    /// How long it took to start, when it was.
    pub(crate) started_in_seconds: Option<f64>,
}

/// How much was done in which time.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Pace {
    pub(crate) messages: u64,
    pub(crate) seconds: f64,
    pub(crate) per_second: f64,
}

/// What was produced.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Produced {
    #[serde(flatten)]
    pub(crate) pace: Pace,
    pub(crate) mean_payload_bytes: f64,
}

/// A group that read while the orders were produced.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Group {
    pub(crate) group: &'static str,
    /// Messages handled or given up, from the first order on.
    #[serde(flatten)]
    pub(crate) pace: Pace,
    pub(crate) handled: u64,
    pub(crate) recovered_at_second_attempt: u64,
    pub(crate) recovered_later: u64,
    pub(crate) failed_attempts: u64,
    pub(crate) dead: u64,
    /// Messages handed out again after they were handled: 0 unless a lease was lost.
    pub(crate) repeated: u64,
    pub(crate) state_rows: StateRows,
}

/// The rows that PostgreSQL holds for a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct StateRows {
    pub(crate) cursor: i64,
    pub(crate) leases: i64,
    pub(crate) exceptions: i64,
}

/// The dead letters of the group that failed.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct DeadLetters {
    pub(crate) group: &'static str,
    pub(crate) count: u64,
    pub(crate) errors: Vec<ErrorCount>,
    pub(crate) examples: Vec<DeadLetter>,
}

#[derive(Debug, Clone, Serialize)]
pub(crate) struct ErrorCount {
    pub(crate) error: String,
    pub(crate) count: u64,
}

#[derive(Debug, Clone, Serialize)]
pub(crate) struct DeadLetter {
    pub(crate) message_id: i64,
    pub(crate) key: Option<String>,
    pub(crate) attempts: i32,
    pub(crate) error: String,
}

/// What became of them after the fix.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Redrive {
    pub(crate) redriven: u64,
    #[serde(flatten)]
    pub(crate) pace: Pace,
    pub(crate) dead_after: i64,
    pub(crate) state_rows_after: StateRows,
    pub(crate) log_rows_before: i64,
    pub(crate) log_rows_after: i64,
}

/// The group that came late and read everything.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Replay {
    pub(crate) group: &'static str,
    #[serde(flatten)]
    pub(crate) pace: Pace,
    /// Written by the whole server meanwhile.
    pub(crate) wal_bytes: u64,
    pub(crate) wal_bytes_per_message: f64,
    /// In cents, by currency: added up by the group's handler.
    pub(crate) revenue: BTreeMap<String, u64>,
    /// The same by a query over the log.
    pub(crate) revenue_by_sql: BTreeMap<String, u64>,
}

/// Two transactions that each wrote a row and a message.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Transaction {
    pub(crate) rolled_back: Written,
    pub(crate) committed: Written,
    pub(crate) received_by: &'static str,
    /// From the commit to the handler.
    pub(crate) received_after_seconds: f64,
}

/// What there was afterwards.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Written {
    pub(crate) message_id: i64,
    pub(crate) rows: i64,
    pub(crate) messages: u64,
}

impl Pace {
    pub(crate) fn new(messages: u64, time: Duration) -> Self {
        let seconds = time.as_secs_f64();
        Self { messages, seconds, per_second: messages as f64 / seconds.max(1e-9) }
    }
}

impl StateRows {
    pub(crate) fn all(self) -> i64 {
        self.cursor + self.leases + self.exceptions
    }
}
