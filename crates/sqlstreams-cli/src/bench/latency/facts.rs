//! What was measured: the document that `--json` prints. Times are in milliseconds.

use serde::Serialize;

use super::report::print_facts;
use super::targets::Target;
use crate::bench::report::{Chart, Report};
use crate::bench::server::Server;
use crate::bench::spread::{Bar, Percentiles};
use crate::bench::versus::{Kind, Verdict};

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

impl Report for Facts {
    fn print(&self) -> anyhow::Result<()> {
        print_facts(self)
    }

    fn verdicts(&self) -> Vec<Verdict> {
        let verdict = |target: &Target| {
            let Target { name, measured, limit, .. } = target;
            Verdict::new(format!("ms to the handler, {name}"), Kind::Time, *measured, *limit)
        };
        self.targets.iter().map(verdict).collect()
    }

    fn charts(&self) -> Vec<Chart> {
        let title = "latency: from the producer to the handler";
        vec![Chart::histogram(title, &self.produce_to_handler_histogram)]
    }
}
