//! Results on stdout: tables for people, JSON for programs.

use std::error::Error as StdError;
use std::fmt;
use std::io::{self, Write};
use std::time::{Duration, SystemTime};

use comfy_table::{Cell, CellAlignment, ContentArrangement, Table, presets};
use serde_json::Value;

use crate::calendar;

/// Nobody reads our stdout any more.
#[derive(Debug)]
pub(crate) struct OutputClosed;

impl fmt::Display for OutputClosed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the output was closed")
    }
}

impl StdError for OutputClosed {}

/// Writes a line to stdout.
pub(crate) fn print(text: impl fmt::Display) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{text}").and_then(|()| stdout.flush()).map_err(closed)
}

/// Writes a JSON document to stdout.
pub(crate) fn print_json(value: &Value) -> anyhow::Result<()> {
    print(format_args!("{value:#}"))
}

/// An error of writing to stdout.
pub(crate) fn closed(error: io::Error) -> anyhow::Error {
    match error.kind() {
        io::ErrorKind::BrokenPipe => OutputClosed.into(),
        _ => anyhow::Error::from(error).context("could not write to stdout"),
    }
}

/// A table without lines; columns whose name starts with `#` hold numbers.
pub(crate) fn table(columns: &[&str]) -> Table {
    let mut table = Table::new();
    table
        .load_style(presets::NOTHING)
        .set_content_arrangement(ContentArrangement::Disabled)
        .set_header(columns.iter().map(|name| Cell::new(name.trim_start_matches('#'))));
    for (column, name) in table.column_iter_mut().zip(columns) {
        column.set_padding((0, 2));
        if name.starts_with('#') {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// Prints a table without the blanks that pad the last column.
pub(crate) fn print_table(table: &Table) -> anyhow::Result<()> {
    let lines: Vec<String> = table.lines().map(|line| line.trim_end().to_owned()).collect();
    print(lines.join("\n"))
}

/// Text from the database as one line that cannot play tricks on the terminal, cut after `most` characters.
pub(crate) fn printable(text: &str, most: usize) -> String {
    let mut line = String::new();
    for (count, character) in text.trim_end().chars().enumerate() {
        if count == most {
            line.push('…');
            break;
        }
        match character {
            '\n' => line.push('⏎'),
            c if c.is_control() => line.extend(c.escape_default()),
            c => line.push(c),
        }
    }
    line
}

/// A switch, as it is written in options.
pub(crate) fn on_or_off(switch: bool) -> String {
    if switch { "on" } else { "off" }.to_owned()
}

/// `24h`, as options take it.
pub(crate) fn span(duration: Duration) -> String {
    match jiff::SignedDuration::try_from(duration) {
        Ok(duration) => format!("{duration:#}"),
        Err(_) => format!("{}s", duration.as_secs()),
    }
}

/// A point in time as people and programs read it, and as options take it.
pub(crate) fn time(at: SystemTime) -> String {
    calendar::text(at, 6)
}

/// The same to the second, for tables.
pub(crate) fn short_time(at: SystemTime) -> String {
    calendar::text(at, 0)
}

/// A word as a shell takes it.
pub(crate) fn shell_word(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-./:@%+,".contains(c);
    match !word.is_empty() && !word.starts_with('-') && word.chars().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

/// 1234567 as 1,234,567.
pub(crate) fn thousands(number: impl TryInto<i128>) -> String {
    let number = number.try_into().unwrap_or_default();
    let digits = number.unsigned_abs().to_string();
    let mut text = String::from(if number < 0 { "-" } else { "" });
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i) % 3 == 0 {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A count with its noun: "1 line", "2,000 lines".
pub(crate) fn counted(count: u64, noun: &str) -> String {
    format!("{} {noun}{}", thousands(count), if count == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_grouped() {
        assert_eq!(thousands(0), "0");
        assert_eq!(thousands(999), "999");
        assert_eq!(thousands(-1_234_567), "-1,234,567");
        assert_eq!(counted(1, "line"), "1 line");
        assert_eq!(counted(2_000, "line"), "2,000 lines");
    }

    #[test]
    fn control_characters_do_not_reach_the_terminal() {
        assert_eq!(printable("a\u{1b}[31mb\nc\n", 100), "a\\u{1b}[31mb⏎c");
        assert_eq!(printable("🦀🦀🦀", 2), "🦀🦀…");
    }

    #[test]
    fn words_can_be_pasted_into_a_shell() {
        assert_eq!(shell_word("2026-03-01T12:00:00.5Z/17"), "2026-03-01T12:00:00.5Z/17");
        assert_eq!(shell_word("web logs"), "'web logs'");
        assert_eq!(shell_word("it's $HOME"), r"'it'\''s $HOME'");
        assert_eq!(shell_word(""), "''");
    }
}
