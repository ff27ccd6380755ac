//! What was measured: the document that `--json` prints. Times are in milliseconds.

use serde::Serialize;

use super::spread::{Bar, Percentiles};
use super::targets::Target;
use crate::bench::server::Server;

#[derive(Debug, Clone, Serialize)]
pub(crate) struct Facts {
    pub(crate) sqlstreams: &'static str,
    pub(crate) postgresql: Server,
    /// Messages a second.
    pub(crate) rate: u32,
    /// What was counted, after the warm-up.
    pub(crate) seconds: f64,
    pub(crate) payload_bytes: usize,
    /// Whether consumers were told of new messages, or found them by polling alone.
    pub(crate) listener: bool,
    /// Inserting and committing a row over a plain connection.
    pub(crate) bare_commit_ms: Percentiles,
    pub(crate) commit_ms: Percentiles,
    pub(crate) produce_to_handler_ms: Percentiles,
    pub(crate) handler_minus_commit_ms: Percentiles,
    /// How late the benchmark itself was with sending, which is part of the other times.
    pub(crate) sent_late_ms: Percentiles,
    /// The histogram of produce → handler.
    pub(crate) produce_to_handler_histogram: Vec<Bar>,
    pub(crate) targets: Vec<Target>,
    pub(crate) targets_met: bool,
}
