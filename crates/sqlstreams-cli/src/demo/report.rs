//! The facts as a person reads them, step by step, in 80 columns.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::io::Write;

use anstyle::{AnsiColor, Style};

use super::facts::{
    DeadLetters, Facts, Group, Pace, Produced, Redrive, Replay, Server, Transaction, Written,
};
use crate::output::{closed, counted, printable, thousands};
use crate::terminal::DIM;

const HEADING: Style = Style::new().bold();
const NAME: Style = AnsiColor::Cyan.on_default();
const GOOD: Style = AnsiColor::Green.on_default();
const BAD: Style = AnsiColor::Red.on_default();

/// Writes to stdout, or nothing.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Report {
    pub(crate) shown: bool,
}

impl Report {
    pub(crate) fn title(self) -> anyhow::Result<()> {
        self.lines(&[&format!(
            "{HEADING}SQLStreams{HEADING:#}: a queue and a log in one, as tables in PostgreSQL\n"
        )])
    }

    /// Where it runs; `kept`: the stream stays.
    pub(crate) fn server(
        self,
        server: &Server,
        schema: &str,
        stream: &str,
        kept: bool,
    ) -> anyhow::Result<()> {
        let version = &server.version;
        let settings =
            format!("fsync {}, synchronous_commit {}", server.fsync, server.synchronous_commit);
        match server.started_in_seconds {
            Some(time) => self.lines(&[
                &format!("A PostgreSQL {version} of its own, up in {time:.1} s, gone afterwards"),
                &format!("{DIM}{settings}{DIM:#}"),
            ]),
            None => self.lines(&[
                &format!("The given PostgreSQL {version}, {settings}"),
                &format!(
                    "Stream {} in schema {}, {}",
                    paint(NAME, stream),
                    printable(schema, 40),
                    if kept { "which stays" } else { "dropped afterwards" }
                ),
            ]),
        }
    }

    pub(crate) fn live(self, produced: &Produced, groups: &[Group]) -> anyhow::Result<()> {
        let count = counted(produced.pace.messages, "order");
        let mut lines = vec![
            heading(1, &format!("{count}, read by two groups while they are produced")),
            paint(DIM, format!("   {:<11}  {:>12}  {:>13}", "", "orders", "per second")),
            row(
                "produced",
                produced.pace,
                &format!("{:>6.0} bytes of JSON each", produced.mean_payload_bytes),
            ),
        ];
        for group in groups {
            let recovered = group.recovered_at_second_attempt + group.recovered_later;
            let failed = recovered + group.dead;
            let which = if failed > 0 { ", of which" } else { "" };
            lines.push(row(
                group.group,
                group.pace,
                &format!("{:>6} failed{which}", thousands(failed)),
            ));
            if failed > 0 {
                let became = |count: u64, what: &str, style: Style| {
                    let count = paint(style, format!("{:>6}", thousands(count)));
                    format!("{:45}{count} {what}", "")
                };
                lines.extend([
                    became(group.recovered_at_second_attempt, "handled at attempt 2", GOOD),
                    became(group.recovered_later, "handled at attempt 3", GOOD),
                    became(group.dead, "dead letters", BAD),
                ]);
            }
            if group.repeated > 0 {
                lines.push(format!("{:45}{:>6} repeated: a lease ran out", "", group.repeated));
            }
        }
        self.write(&lines)
    }

    pub(crate) fn state_rows(self, produced: &Produced, groups: &[Group]) -> anyhow::Result<()> {
        let columns = |name: &str, columns: [&str; 4]| {
            let [cursor, leases, exceptions, all] = columns;
            format!("   {name}{cursor:>9}{leases:>10}{exceptions:>14}{all:>15}")
        };
        let mut lines = vec![
            heading(2, "What PostgreSQL has to remember about that"),
            paint(DIM, columns(&" ".repeat(17), ["cursor", "leases", "exceptions", "rows in all"])),
        ];
        for group in groups {
            let rows = group.state_rows;
            let [cursor, leases, exceptions, all] =
                [rows.cursor, rows.leases, rows.exceptions, rows.all()].map(thousands);
            lines.push(columns(
                &paint(NAME, format!("{:<17}", group.group)),
                [&cursor, &leases, &exceptions, &all],
            ));
        }
        let row_each = thousands(produced.pace.messages);
        lines.push(paint(DIM, columns("a row per message", ["", "", "", &row_each])));
        lines.push(paint(
            DIM,
            "   A message that succeeds leaves no row; one that fails is a row of its group.",
        ));
        self.write(&lines)
    }

    pub(crate) fn dead_letters(self, dead: &DeadLetters) -> anyhow::Result<()> {
        let mut lines =
            vec![heading(3, &format!("{} of {}", counted(dead.count, "dead letter"), dead.group))];
        for error in &dead.errors {
            lines.push(format!(
                "   {}  {}",
                paint(BAD, format!("{:>9}", thousands(error.count))),
                printable(&error.error, 64)
            ));
        }
        if !dead.examples.is_empty() {
            lines.push(String::new());
            lines.push(paint(DIM, "     message  customer       attempts  error"));
        }
        for letter in &dead.examples {
            lines.push(format!(
                "   {:>9}  {:<14} {:>8}  {}",
                thousands(letter.message_id),
                printable(letter.key.as_deref().unwrap_or_default(), 13),
                letter.attempts,
                printable(&letter.error, 40)
            ));
        }
        self.write(&lines)
    }

    pub(crate) fn redrive(self, redrive: &Redrive) -> anyhow::Result<()> {
        self.lines(&[
            &heading(4, "The handler is fixed, the dead letters are redriven"),
            &format!(
                "   {} redriven, {} handled in {}, {} dead left",
                thousands(redrive.redriven),
                paint(GOOD, thousands(redrive.pace.messages)),
                time(redrive.pace.seconds),
                redrive.dead_after
            ),
            &format!(
                "   The log still has {}; receipts noticed nothing.",
                counted(u64::try_from(redrive.log_rows_after).unwrap_or_default(), "message")
            ),
        ])
    }

    pub(crate) fn replay(self, replay: &Replay) -> anyhow::Result<()> {
        self.lines(&[
            &heading(5, "A third group comes late and replays everything"),
            &row(
                replay.group,
                replay.pace,
                &format!("{:>6.2} bytes of WAL per message", replay.wal_bytes_per_message),
            ),
            &format!("   {}  {}", name("revenue"), money(&replay.revenue)),
            &format!(
                "   {}  {}  {}",
                paint(DIM, format!("{:<11}", "SELECT sum")),
                money(&replay.revenue_by_sql),
                paint(GOOD, "the same"),
            ),
        ])
    }

    pub(crate) fn transaction(self, transaction: &Transaction) -> anyhow::Result<()> {
        let line = |end: &str, written: &Written| {
            format!(
                "   BEGIN, INSERT INTO shop_order, send_in, {}  {:>9}  {:>12}",
                paint(NAME, format!("{end:<8}")),
                counted(u64::try_from(written.rows).unwrap_or_default(), "row"),
                counted(written.messages, "message"),
            )
        };
        self.lines(&[
            &heading(6, "A business transaction and its message are one"),
            &line("ROLLBACK", &transaction.rolled_back),
            &line("COMMIT", &transaction.committed),
            &format!(
                "   {} got message {} within {}, and nobody waits for {}.",
                transaction.received_by,
                thousands(transaction.committed.message_id),
                time(transaction.received_after_seconds),
                thousands(transaction.rolled_back.message_id),
            ),
        ])
    }

    /// The end, once everything is cleaned up; `kept`: but for the stream.
    pub(crate) fn end(self, facts: &Facts, kept: bool) -> anyhow::Result<()> {
        let mut lines = vec![
            String::new(),
            format!(
                "{} in {}. {}",
                paint(GOOD, format!("{} checks held", facts.checks)),
                time(facts.seconds),
                match (facts.postgresql.throw_away, kept) {
                    (true, _) => "The PostgreSQL is gone.".to_owned(),
                    (false, false) => "The stream is dropped.".to_owned(),
                    (false, true) => format!("The stream stays: {}", facts.stream),
                }
            ),
            String::new(),
            paint(HEADING, "Next"),
        ];
        let commands: Vec<(String, &str)> = next(&facts.stream, kept)
            .into_iter()
            .map(|(command, what)| (format!("{} {command}", program()), what))
            .collect();
        let width = commands.iter().map(|(command, _)| command.len()).max().unwrap_or_default();
        for (command, what) in commands {
            let command = paint(NAME, format!("{command:<width$}"));
            lines.push(format!("   {command}  {}", paint(DIM, what)));
        }
        self.write(&lines)
    }

    fn lines(self, lines: &[&str]) -> anyhow::Result<()> {
        if !self.shown {
            return Ok(());
        }
        let mut stdout = anstream::stdout().lock();
        lines.iter().try_for_each(|line| writeln!(stdout, "{line}")).map_err(closed)?;
        stdout.flush().map_err(closed)
    }

    fn write(self, lines: &[String]) -> anyhow::Result<()> {
        self.lines(&lines.iter().map(String::as_str).collect::<Vec<_>>())
    }
}

/// What to try after the demo, and what that is.
fn next(stream: &str, kept: bool) -> [(String, &'static str); 3] {
    if kept {
        // Long enough as they are.
        return [
            (format!("group list {stream}"), ""),
            (format!("consume {stream} --group mine"), ""),
            (format!("stream drop {stream} --yes"), ""),
        ];
    }
    [
        ("up".to_owned(), "a PostgreSQL to keep"),
        ("produce orders FILE --create".to_owned(), "a message per line"),
        ("consume orders --group mine".to_owned(), "and out again"),
    ]
}

/// How the reader started this.
fn program() -> &'static str {
    match std::env::var_os("CARGO") {
        Some(_) => "cargo run --release --",
        None => "sqlstreams",
    }
}

fn heading(number: u8, text: &str) -> String {
    format!("\n{} {}", paint(DIM, format!("{number} ")), paint(HEADING, text))
}

/// How fast something went.
fn row(who: &str, pace: Pace, note: &str) -> String {
    format!(
        "   {}  {:>12}  {:>13} {}",
        name(who),
        thousands(pace.messages),
        rate(pace.per_second),
        paint(DIM, note)
    )
}

fn name(name: &str) -> String {
    paint(NAME, format!("{name:<11}"))
}

fn paint(style: Style, text: impl Display) -> String {
    format!("{style}{text}{style:#}")
}

fn rate(per_second: f64) -> String {
    format!("{}/s", thousands(per_second.round() as i64))
}

fn time(seconds: f64) -> String {
    match seconds {
        ..1.0 => format!("{:.0} ms", (seconds * 1000.0).max(1.0)),
        _ => format!("{seconds:.1} s"),
    }
}

/// Cents by currency.
fn money(amounts: &BTreeMap<String, u64>) -> String {
    let amounts: Vec<String> = amounts
        .iter()
        .map(|(currency, cents)| {
            format!("{currency} {}.{:02}", thousands(cents / 100), cents % 100)
        })
        .collect();
    amounts.join("   ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_and_times_read_well() {
        let amounts = BTreeMap::from([("EUR".to_owned(), 123_456_705), ("USD".to_owned(), 99)]);
        assert_eq!(money(&amounts), "EUR 1,234,567.05   USD 0.99");
        assert_eq!((time(0.0123), time(12.34)), ("12 ms".to_owned(), "12.3 s".to_owned()));
        assert_eq!(rate(51_234.6), "51,235/s");
    }
}
