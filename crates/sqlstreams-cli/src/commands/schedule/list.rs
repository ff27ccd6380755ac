//! `sqlstreams schedule list`.

use clap::Args;
use serde_json::Value;

use crate::context::Context;
use crate::output::{print, print_json, print_table, printable, shell_word, table, thousands};

const AFTER_HELP: &str = "\
Columns: STATE is active, paused, failing (it is tried again, see `schedule show`) or over (no more
times come); NEXT is the time for which it produces next, LAST the one that it did last, whether that was
produced or skipped. Times are UTC.

Examples:
  sqlstreams schedule list
  sqlstreams schedule list --json | jq -r '.[] | select(.state == \"failing\").name'";

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct ListArgs {
    /// How many at most
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    limit: u32,
    /// Only those after this name
    #[arg(long, value_name = "NAME")]
    after: Option<String>,
}

pub(crate) async fn run(args: ListArgs, context: &Context) -> anyhow::Result<()> {
    let client = context.reader().await?;
    let schedules = client.schedules(args.after.as_deref(), args.limit).await?;
    if context.json() {
        return print_json(&Value::from_iter(schedules.iter().map(super::to_json)));
    }
    let Some(last) = schedules.last() else {
        return print(match args.after {
            None => "no schedules yet; create one with `sqlstreams schedule create`",
            Some(_) => "no more schedules",
        });
    };
    let mut rows = table(&[
        "NAME",
        "STREAM",
        "STATE",
        "TIMES",
        "ZONE",
        "NEXT",
        "LAST",
        "#PRODUCED",
        "#MISSED",
    ]);
    for schedule in &schedules {
        rows.add_row([
            printable(&schedule.name, 60),
            printable(&schedule.stream, 40),
            schedule.state.to_string(),
            printable(&super::times(schedule), 40),
            printable(&schedule.zone, 40),
            super::or_dash(schedule.next_fire),
            super::or_dash(schedule.last_fire),
            thousands(schedule.produced),
            thousands(schedule.not_produced),
        ]);
    }
    print_table(&rows)?;
    if schedules.len() == args.limit as usize {
        context.say(&format!("for more: --after {} or a higher --limit", shell_word(&last.name)));
    }
    Ok(())
}
