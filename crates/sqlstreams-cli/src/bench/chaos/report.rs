//! The facts as a person reads them.

use super::facts::Facts;
use crate::output::{counted, print, print_table, table, thousands};

pub(crate) fn print_facts(facts: &Facts) -> anyhow::Result<()> {
    let done = facts.workers;
    print(format_args!(
        "{} disturbed for {:.0} s, {} of {} produced, {} % fail at first, leases of {} s, seed {}",
        counted(facts.consumers as u64, "worker"),
        facts.seconds,
        counted(facts.produced, "message"),
        counted(u64::from(facts.keys), "key"),
        facts.failures,
        facts.lease_seconds,
        facts.seed
    ))?;
    print(format_args!("{}\n", facts.postgresql))?;
    print(format_args!(
        "{} killed, {} frozen ({} for longer than a lease), {} restarted",
        done.killed, done.frozen, done.frozen_beyond_lease, done.restarted
    ))?;
    if facts.refused > 0 {
        print(format_args!("{} failed", counted(facts.refused, "send")))?;
    }
    print(match facts.drained_in_seconds {
        Some(time) => format!("Everything was done {time:.1} s after that\n"),
        None => "Something was still to be done a minute after that\n".to_owned(),
    })?;

    let columns = [
        "group",
        "#rows",
        "#failed",
        "#handled",
        "#repeated",
        "#dead",
        "#lost",
        "#altered",
        "#out of order",
        "#longest pause",
    ];
    let mut groups = table(&columns);
    for count in facts.counts() {
        let numbers = [
            count.rows,
            count.failed,
            count.handled,
            count.repeated,
            count.dead,
            count.lost,
            count.altered,
            count.out_of_order,
        ];
        let mut cells = vec![count.group.clone()];
        cells.extend(numbers.map(thousands));
        cells.push(format!("{:.1} s", count.longest_pause_seconds));
        groups.add_row(cells);
    }
    print_table(&groups)?;
    print(match facts.ok {
        true => "\nNothing was lost, and ordered was in order.",
        false => "\nNot all is as it should be.",
    })
}
