//! What a run found: tables for people, a table for the page, a document for programs.

use std::fmt::Write as _;

use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;

use crate::machine::Machine;
use crate::measure::Measured;
use crate::run::{Outcome, Pair, Plan};

/// Everything that was found.
#[derive(Debug, Serialize)]
pub(crate) struct Facts {
    pub(crate) machine: Machine,
    pub(crate) plan: Plan,
    pub(crate) seconds: f64,
    /// What was chosen for SQLStreams.
    pub(crate) sqlstreams: Vec<String>,
    pub(crate) peers: Vec<Outcome>,
}

const COLUMNS: [&str; 9] = [
    "peer",
    "scenario",
    "messages/s",
    "SQLStreams",
    "SQLStreams ÷ peer",
    "spread",
    "CPU s per million",
    "SQLStreams",
    "WAL bytes/message",
];

impl Facts {
    /// For a terminal.
    pub(crate) fn table(&self) -> String {
        let mut text = format!("{}\n", self.machine);
        for &bytes in &self.plan.payload_bytes {
            let mut table = Table::new();
            table.load_style(presets::UTF8_HORIZONTAL_ONLY).set_header(COLUMNS);
            for column in table.column_iter_mut().skip(2) {
                column.set_cell_alignment(CellAlignment::Right);
            }
            for row in self.rows(bytes) {
                table.add_row(row);
            }
            let _ = write!(text, "\n{}\n{table}\n", self.caption(bytes));
        }
        let _ = write!(text, "\n{}", self.notes("  "));
        text
    }

    /// For docs/performance.md.
    pub(crate) fn markdown(&self) -> String {
        let mut text = format!("{}\n", self.machine);
        for &bytes in &self.plan.payload_bytes {
            let _ = write!(text, "\n**{}**\n\n| {} |\n", self.caption(bytes), COLUMNS.join(" | "));
            let _ = writeln!(text, "| --- | --- |{}", " ---: |".repeat(COLUMNS.len() - 2));
            for row in self.rows(bytes) {
                let _ = writeln!(text, "| {} |", row.join(" | "));
            }
        }
        let _ = write!(text, "\n{}", self.notes("- "));
        text
    }

    fn caption(&self, bytes: usize) -> String {
        format!("{bytes} bytes a message; medians of {} rounds", self.plan.rounds)
    }

    fn rows(&self, bytes: usize) -> Vec<Vec<String>> {
        let pairs = |outcome: &Outcome| {
            let fit = |pair: &&Pair| pair.payload_bytes == bytes && !pair.peer.is_empty();
            outcome.pairs.iter().filter(fit).cloned().collect::<Vec<_>>()
        };
        let row = |title: &str, pair: &Pair| {
            let rate = |measured: &Measured| measured.messages_per_second;
            let cpu = |measured: &Measured| measured.cpu_seconds_per_million;
            let (low, ratio, high) = pair.ratio();
            let wal = median(pair.peer.iter().filter_map(|m| m.wal_bytes_per_message));
            let our_wal = median(pair.sqlstreams.iter().filter_map(|m| m.wal_bytes_per_message));
            let wal = match wal {
                Some(wal) => format!("{} ({})", number(wal), number(our_wal.unwrap_or_default())),
                None => "–".to_owned(),
            };
            let figure = |value: Option<f64>| value.map_or("–".to_owned(), number);
            vec![
                title.to_owned(),
                pair.scenario.name().to_owned(),
                figure(median(pair.peer.iter().map(rate))),
                figure(median(pair.sqlstreams.iter().map(rate))),
                format!("{ratio:.2}"),
                format!("{low:.2}–{high:.2}"),
                figure(median(pair.peer.iter().map(cpu))),
                figure(median(pair.sqlstreams.iter().map(cpu))),
                wal,
            ]
        };
        self.peers
            .iter()
            .flat_map(|outcome| {
                pairs(outcome).iter().map(|pair| row(outcome.title, pair)).collect::<Vec<_>>()
            })
            .collect()
    }

    /// How it was measured, and what was not.
    fn notes(&self, bullet: &str) -> String {
        let mut text = String::new();
        let mut note = |what: &str, notes: &[String]| {
            if !notes.is_empty() {
                let _ = writeln!(text, "{bullet}{what}: {}.", notes.join("; "));
            }
        };
        note("SQLStreams", &self.sqlstreams);
        for outcome in &self.peers {
            note(outcome.title, &outcome.settings);
        }
        for outcome in &self.peers {
            if let Some(why) = &outcome.not_run {
                let what = if outcome.pairs.iter().any(|pair| !pair.peer.is_empty()) {
                    "ended early"
                } else {
                    "not run"
                };
                note(&format!("{} {what}", outcome.title), &[why.trim_end_matches('.').to_owned()]);
            }
        }
        note(
            "In parentheses",
            &["the WAL of SQLStreams; CPU is that of server and client together".to_owned()],
        );
        text
    }
}

impl Pair {
    /// SQLStreams' rate by that of the peer, round by round: the lowest, the median, the highest.
    fn ratio(&self) -> (f64, f64, f64) {
        let ratios = self.sqlstreams.iter().zip(&self.peer);
        let ratios = ratios.map(|(ours, theirs)| {
            ours.messages_per_second / theirs.messages_per_second.max(f64::MIN_POSITIVE)
        });
        let ratios = ratios.collect::<Vec<_>>();
        let low = ratios.iter().copied().fold(f64::INFINITY, f64::min);
        let high = ratios.iter().copied().fold(0.0, f64::max);
        (low, median(ratios.into_iter()).unwrap_or_default(), high)
    }
}

fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values = values.collect::<Vec<_>>();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => None,
        count if count % 2 == 1 => Some(values[middle]),
        _ => Some((values[middle - 1] + values[middle]) / 2.0),
    }
}

/// With commas where there are thousands, with a fraction where it matters.
fn number(value: f64) -> String {
    if value < 10.0 {
        return format!("{value:.1}");
    }
    let digits = format!("{value:.0}");
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place) % 3 == 0 {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_numbers() {
        assert_eq!(median([3.0, 1.0, 2.0].into_iter()), Some(2.0));
        assert_eq!(median([4.0, 1.0, 2.0, 3.0].into_iter()), Some(2.5));
        assert_eq!(median([].into_iter()), None);
        assert_eq!(number(1_234_567.4), "1,234,567");
        assert_eq!(number(123.4), "123");
        assert_eq!(number(0.47), "0.5");
    }
}
