//! A contest as a person reads it.

use super::{Family, Kind, Line, Verdict, print_families};
use crate::output::{print, print_table, table, thousands};

/// The lines, with what a message cost each.
pub(crate) fn print_contest(lines: &[Line]) -> anyhow::Result<()> {
    let mut rows = table(&[
        "",
        "#messages/s",
        "#lowest",
        "#highest",
        "#WAL bytes",
        "#commits",
        "#server µs",
        "#client µs",
    ]);
    for line in lines {
        let cost = &line.cost;
        let micros = |seconds: Option<f64>| {
            seconds.map_or("?".to_owned(), |s| format!("{:.1}", cost.per_message(s * 1e6)))
        };
        rows.add_row([
            line.name.clone(),
            thousands(line.per_second as u64),
            thousands(line.lowest as u64),
            thousands(line.highest as u64),
            format!("{:.1}", cost.wal_per_message()),
            format!("{:.4}", cost.commits_per_message()),
            micros(cost.server_cpu),
            micros(cost.client_cpu),
        ]);
    }
    print_table(&rows)?;
    print_commits(lines)
}

/// How long their commits took, of those that were timed.
fn print_commits(lines: &[Line]) -> anyhow::Result<()> {
    let mut rows = table(&["", "#p50 ms", "#p99 ms", "#p99.9 ms", "#longest", "#batches"]);
    for (name, times) in lines.iter().filter_map(|line| Some((&line.name, line.commit_ms?))) {
        let mut cells = vec![format!("commits of {name}")];
        let times_ms = [times.p50, times.p99, times.p999, times.max];
        cells.extend(times_ms.map(|ms| format!("{ms:.2}")));
        cells.push(thousands(times.count));
        rows.add_row(cells);
    }
    if rows.is_empty() {
        return Ok(());
    }
    print("")?;
    print_table(&rows)
}

/// A whole contest: the lines, what it left behind in the tables, and what was asked.
pub(crate) fn print_found(
    lines: &[Line],
    dead_rows: &[Family],
    verdicts: &[Verdict],
) -> anyhow::Result<()> {
    print_contest(lines)?;
    print_families(dead_rows)?;
    print("")?;
    print_verdict(verdicts)
}

pub(crate) fn print_verdict(verdicts: &[Verdict]) -> anyhow::Result<()> {
    for verdict in verdicts {
        print(sentence(verdict))?;
    }
    Ok(())
}

fn sentence(verdict: &Verdict) -> String {
    let Verdict { what, kind, measured, target, met } = verdict;
    let holds = if *met { "holds" } else { "does not hold" };
    let bound = match kind {
        Kind::Ratio | Kind::Rate => "at least",
        Kind::Count | Kind::Cost | Kind::Time => "at most",
    };
    let [measured, target] = [*measured, *target].map(number);
    format!("{what}: {measured}; the target of {bound} {target} {holds}")
}

/// A number of any size, for people.
pub(crate) fn number(number: f64) -> String {
    match number.abs() {
        1_000.0.. => thousands(number.round() as i128),
        100.0..1_000.0 => format!("{number:.0}"),
        _ => {
            let text = format!("{number:.2}");
            text.strip_suffix(".00").map(str::to_owned).unwrap_or(text)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts_are_sentences() {
        let verdict = Verdict::new("a / b", Kind::Ratio, 0.912, 0.9);
        assert_eq!(sentence(&verdict), "a / b: 0.91; the target of at least 0.90 holds");
        let verdict = Verdict::new("dead letters/s", Kind::Rate, 12_345.6, 20_000.0);
        let told = "dead letters/s: 12,346; the target of at least 20,000 does not hold";
        assert_eq!(sentence(&verdict), told);
        let verdict = Verdict::new("lost", Kind::Count, 1.0, 0.0);
        assert_eq!(sentence(&verdict), "lost: 1; the target of at most 0 does not hold");
    }

    #[test]
    fn numbers_have_as_many_digits_as_they_need() {
        let texts = [0.0, 0.004, 2.0, 2.5, 123.4, 1234.4, f64::NAN].map(number);
        assert_eq!(texts, ["0", "0", "2", "2.50", "123", "1,234", "NaN"].map(str::to_owned));
    }
}
