//! What a run found: tables for people, a table for the page, a document for programs.

use std::fmt::Write as _;

use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;

use crate::machine::Machine;
use crate::measure::{Measured, Scenario};
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

const COLUMNS: [&str; 10] = [
    "peer",
    "scenario",
    "messages/s",
    "SQLStreams",
    "ratio",
    "spread",
    "CPU s/million",
    "SQLStreams",
    "WAL bytes/message",
    "SQLStreams",
];
const SUMMARY: &str =
    "How many times as many messages a second, and in parentheses a CPU second, SQLStreams moves:";

impl Facts {
    /// For a terminal.
    pub(crate) fn table(&self) -> String {
        let mut text = format!("{}\n", self.machine);
        for &bytes in &self.plan.payload_bytes {
            let _ = write!(text, "\n{}\n{SUMMARY}\n", self.caption(bytes));
            let summary = self.summary(bytes);
            let _ = writeln!(text, "\n{}\n", plain(&summary_header(), &summary, 1));
            let _ = writeln!(text, "{}", plain(&COLUMNS.map(str::to_owned), &self.rows(bytes), 2));
        }
        let _ = write!(text, "\n{}", self.notes("  "));
        text
    }

    /// For docs/performance.md.
    pub(crate) fn markdown(&self) -> String {
        let mut text = format!("{}\n", self.machine);
        for &bytes in &self.plan.payload_bytes {
            let _ = write!(text, "\n**{}** {SUMMARY}\n\n", self.caption(bytes));
            text += &markdown(&summary_header(), &self.summary(bytes), 1);
            text += "\n";
            text += &markdown(&COLUMNS.map(str::to_owned), &self.rows(bytes), 2);
        }
        let _ = write!(text, "\n{}", self.notes("- "));
        text
    }

    fn caption(&self, bytes: usize) -> String {
        format!("{bytes} bytes a message, medians of {} rounds.", self.plan.rounds)
    }

    /// Ratios alone, a row for each peer.
    fn summary(&self, bytes: usize) -> Vec<Vec<String>> {
        let row = |(title, pairs): (&str, Vec<&Pair>)| {
            let ratio = |scenario| {
                let Some(pair) = pairs.iter().find(|pair| pair.scenario == scenario) else {
                    return "–".to_owned();
                };
                let (_, rate, _) = pair.ratio(|m| m.messages_per_second);
                let (_, cpu, _) = pair.ratio(|m| 1.0 / m.cpu_seconds_per_million.max(0.001));
                format!("{rate:.2} ({cpu:.2})")
            };
            let ratios = Scenario::ALL.into_iter().map(ratio);
            std::iter::once(title.to_owned()).chain(ratios).collect()
        };
        self.pairs(bytes).map(row).collect()
    }

    /// Everything, a row for each peer and scenario.
    fn rows(&self, bytes: usize) -> Vec<Vec<String>> {
        let rows = |(title, pairs): (&str, Vec<&Pair>)| {
            let titles = std::iter::once(title.to_owned()).chain(std::iter::repeat(String::new()));
            let rows = titles.zip(pairs).map(|(title, pair)| row(title, pair));
            rows.collect::<Vec<_>>()
        };
        self.pairs(bytes).flat_map(rows).collect()
    }

    /// The peers that have figures for this size.
    fn pairs(&self, bytes: usize) -> impl Iterator<Item = (&str, Vec<&Pair>)> {
        let peers = self.peers.iter().map(move |outcome| {
            let pairs = outcome.pairs.iter();
            let fit = pairs.filter(|pair| pair.payload_bytes == bytes && !pair.peer.is_empty());
            (outcome.title, fit.collect::<Vec<_>>())
        });
        peers.filter(|(_, pairs)| !pairs.is_empty())
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
        note("CPU", &["that of all processes of server and client together".to_owned()]);
        text
    }
}

impl Pair {
    /// SQLStreams by the peer, round by round: the lowest ratio, the median, the highest.
    fn ratio(&self, figure: impl Fn(&Measured) -> f64) -> (f64, f64, f64) {
        let pairs = self.sqlstreams.iter().zip(&self.peer);
        let ratio = |(ours, theirs): (&Measured, &Measured)| {
            figure(ours) / figure(theirs).max(f64::MIN_POSITIVE)
        };
        let ratios = pairs.map(ratio).collect::<Vec<_>>();
        let low = ratios.iter().copied().fold(f64::INFINITY, f64::min);
        let high = ratios.iter().copied().fold(0.0, f64::max);
        (low, median(ratios.into_iter()).unwrap_or_default(), high)
    }
}

fn row(title: String, pair: &Pair) -> Vec<String> {
    let rate = |measured: &Measured| measured.messages_per_second;
    let cpu = |measured: &Measured| measured.cpu_seconds_per_million;
    let (low, ratio, high) = pair.ratio(rate);
    let wal = median(pair.peer.iter().filter_map(|m| m.wal_bytes_per_message));
    let our_wal = median(pair.sqlstreams.iter().filter_map(|m| m.wal_bytes_per_message));
    let figure = |value: Option<f64>| value.map_or("–".to_owned(), number);
    vec![
        title,
        pair.scenario.name().to_owned(),
        figure(median(pair.peer.iter().map(rate))),
        figure(median(pair.sqlstreams.iter().map(rate))),
        format!("{ratio:.2}"),
        format!("{low:.2}–{high:.2}"),
        figure(median(pair.peer.iter().map(cpu))),
        figure(median(pair.sqlstreams.iter().map(cpu))),
        figure(wal),
        figure(our_wal),
    ]
}

fn summary_header() -> Vec<String> {
    let scenarios = Scenario::ALL.map(|scenario| scenario.name().to_owned());
    std::iter::once("SQLStreams ÷".to_owned()).chain(scenarios).collect()
}

/// Lines and columns, of which the first few are text and the rest numbers.
fn plain(header: &[String], rows: &[Vec<String>], text: usize) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(header);
    for column in table.column_iter_mut().skip(text) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    for row in rows {
        table.add_row(row);
    }
    table.trim_fmt()
}

fn markdown(header: &[String], rows: &[Vec<String>], text: usize) -> String {
    let columns = header.len() - text;
    let mut table = format!("| {} |\n|{}", header.join(" | "), " --- |".repeat(text));
    let _ = writeln!(table, "{}", " ---: |".repeat(columns));
    for row in rows {
        let _ = writeln!(table, "| {} |", row.join(" | "));
    }
    table
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
