//! `sqlstreams dead list`.

use clap::Args;
use serde_json::Value;

use crate::commands::{group, open_group};
use crate::context::Context;
use crate::output::{print, print_json, print_table, printable, short_time, table, thousands};

const AFTER_HELP: &str = "\
Lowest id first. For the next page, pass the last id of this one with --after.

Examples:
  sqlstreams dead list orders --group receipts
  sqlstreams dead list orders --group receipts --limit 1000 --json | jq -r '.[].error' | sort | uniq -c";

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct ListArgs {
    /// The stream
    stream: String,
    /// The group
    #[arg(long, short, value_name = "GROUP")]
    group: String,
    /// How many at most
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(i64).range(1..))]
    limit: i64,
    /// Only ids above this one
    #[arg(long, value_name = "ID", default_value_t = 0, hide_default_value = true,
          value_parser = clap::value_parser!(i64).range(0..))]
    after: i64,
}

pub(crate) async fn run(args: ListArgs, context: &Context) -> anyhow::Result<()> {
    let group = open_group(&context.reader().await?, &args.stream, &args.group).await?;
    let letters = group.dead_letters(args.after, args.limit).await?;
    if context.json() {
        return print_json(&Value::from_iter(letters.iter().map(super::to_json)));
    }
    let Some(last) = letters.last() else {
        return print(match args.after {
            0 => "no dead letters",
            _ => "no more dead letters",
        });
    };
    let mut rows = table(&["#ID", "#ATTEMPTS", "DIED", "KEY", "ERROR"]);
    for letter in &letters {
        rows.add_row([
            letter.message_id.to_string(),
            letter.attempts.to_string(),
            letter.dead_at.map(short_time).unwrap_or_default(),
            printable(letter.key.as_deref().unwrap_or("-"), 30),
            printable(letter.last_error.as_deref().unwrap_or("-"), 80),
        ]);
    }
    print_table(&rows)?;
    if i64::try_from(letters.len()).is_ok_and(|shown| shown == args.limit) {
        let status = group.status().await?;
        context.say(&format!(
            "{} shown of {}; for more: --after {} or a higher --limit",
            thousands(args.limit),
            group::about(&status, status.dead),
            last.message_id
        ));
    }
    Ok(())
}
