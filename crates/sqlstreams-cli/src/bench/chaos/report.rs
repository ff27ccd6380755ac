//! The facts as a person reads them.

use super::facts::Facts;
use crate::output::{counted, print, print_table, table, thousands};

pub(crate) fn print_facts(facts: &Facts) -> anyhow::Result<()> {
    let done = facts.workers;
    print(format_args!(
        "{} disturbed for {:.0} s, {} produced, leases of {} s, seed {}",
        counted(facts.consumers as u64, "worker"),
        facts.seconds,
        counted(facts.produced, "message"),
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

    let columns =
        ["group", "#rows", "#handled", "#repeated", "#dead", "#lost", "#altered", "#longest pause"];
    let mut groups = table(&columns);
    for count in facts.counts() {
        let numbers =
            [count.rows, count.handled, count.repeated, count.dead, count.lost, count.altered];
        let mut cells = vec![count.group.clone()];
        cells.extend(numbers.map(thousands));
        cells.push(format!("{:.1} s", count.longest_pause_seconds));
        groups.add_row(cells);
    }
    print_table(&groups)?;
    print(format_args!(
        "{} of ordered came after a later one, taken over from another process",
        thousands(facts.late_in_ordered)
    ))?;
    print(match facts.ok {
        true => "\nNothing was lost.",
        false => "\nNot all is as it should be.",
    })
}
