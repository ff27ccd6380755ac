//! The facts as a person reads them, in 80 columns.

use super::facts::Facts;
use crate::bench::spread::{Bar, Percentiles};
use crate::output::{print, print_table, table, thousands};

/// The longest bar, in characters.
const WIDTH: u64 = 50;

pub(crate) fn print_facts(facts: &Facts) -> anyhow::Result<()> {
    print(format_args!(
        "Single durable sends: {}/s for {:.0} s, {} bytes each, {}",
        thousands(facts.rate),
        facts.seconds,
        thousands(facts.payload_bytes as u64),
        if facts.listener { "with listener" } else { "without listener" },
    ))?;
    print(format_args!("{}\n", facts.postgresql))?;

    let mut percentiles =
        table(&["milliseconds", "#p50", "#p90", "#p99", "#p99.9", "#max", "#messages"]);
    for (name, times) in [
        ("bare insert+commit", facts.bare_commit_ms),
        ("commit", facts.commit_ms),
        ("produce → handler", facts.produce_to_handler_ms),
        ("handler − commit", facts.handler_minus_commit_ms),
        ("sent too late", facts.sent_late_ms),
    ] {
        percentiles.add_row(row(name, times));
    }
    print_table(&percentiles)?;

    print("\nproduce → handler")?;
    for line in bars(&facts.produce_to_handler_histogram) {
        print(line)?;
    }

    print("\ntargets of produce → handler")?;
    for target in &facts.targets {
        print(format_args!(
            "  {}  {}: {:.2} ms, limit {:.2} ms",
            if target.met { "met   " } else { "MISSED" },
            target.name,
            target.measured,
            target.limit
        ))?;
    }
    print(match facts.targets_met {
        true => "The targets hold.",
        false => "The targets do not hold.",
    })
}

fn row(name: &str, times: Percentiles) -> Vec<String> {
    let Percentiles { count, p50, p90, p99, p999, max } = times;
    let mut cells = vec![name.to_owned()];
    cells.extend([p50, p90, p99, p999, max].map(|ms| format!("{ms:.2}")));
    cells.push(thousands(count));
    cells
}

fn bars(bars: &[Bar]) -> Vec<String> {
    let most = bars.iter().map(|bar| bar.count).max().unwrap_or_default().max(1);
    bars.iter()
        .map(|bar| {
            let bound = match bar.up_to {
                Some(ms) => format!("≤ {ms} ms"),
                None => "longer".to_owned(),
            };
            // One that holds anything is to be seen.
            let length = (bar.count * WIDTH).div_ceil(most);
            let line = "#".repeat(usize::try_from(length).unwrap_or_default());
            format!("  {bound:>9} {:>9}  {line}", thousands(bar.count)).trim_end().to_owned()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_bar_fits_and_the_shortest_is_seen() {
        let lines = bars(&[
            Bar { up_to: Some(0.5), count: 1 },
            Bar { up_to: Some(1.0), count: 0 },
            Bar { up_to: None, count: 1_000_000 },
        ]);
        assert_eq!(lines[0], "   ≤ 0.5 ms         1  #");
        assert_eq!(lines[1], "     ≤ 1 ms         0");
        assert_eq!(lines[2].matches('#').count(), 50);
        assert!(lines.iter().all(|line| line.chars().count() <= 80));
    }
}
