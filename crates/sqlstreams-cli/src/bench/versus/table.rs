//! A contest as a person reads it.

use super::{Line, Verdict};
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
            line.name.to_owned(),
            thousands(line.per_second as u64),
            thousands(line.lowest as u64),
            thousands(line.highest as u64),
            format!("{:.1}", cost.per_message(cost.wal_bytes as f64)),
            format!("{:.4}", cost.per_message(cost.commits as f64)),
            micros(cost.server_cpu),
            micros(cost.client_cpu),
        ]);
    }
    print_table(&rows)
}

pub(crate) fn print_verdict(verdicts: &[Verdict]) -> anyhow::Result<()> {
    for Verdict { what, ratio, target, met } in verdicts {
        let holds = if *met { "holds" } else { "does not hold" };
        print(format_args!("{what}: {ratio:.2}; the target of {target} {holds}"))?;
    }
    Ok(())
}
