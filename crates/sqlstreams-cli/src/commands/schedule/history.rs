//! `sqlstreams schedule history`.

use clap::Args;
use serde_json::{Value, json};

use crate::context::Context;
use crate::output::{print, print_json, print_table, short_time, table, thousands, time};

const AFTER_HELP: &str = "\
The latest first; the latest 100 are kept. Columns: TIME is the time that the message is for; KIND is due
(produced in time), caught_up (produced late), skipped (not at all) or manual (`schedule run`); AT is when
that was; MISSED counts the times before it for which there is no message.

Examples:
  sqlstreams schedule history nightly
  sqlstreams schedule history nightly --json | jq '[.[].missed] | add'";

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct HistoryArgs {
    /// The schedule
    name: String,
    /// How many at most
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    limit: u32,
    /// Only those before this one
    #[arg(long, value_name = "NUMBER")]
    before: Option<i64>,
}

pub(crate) async fn run(args: HistoryArgs, context: &Context) -> anyhow::Result<()> {
    let schedule = super::open(&context.reader().await?, &args.name).await?;
    let runs = schedule.history(args.before, args.limit).await?;
    if context.json() {
        return print_json(&Value::from_iter(runs.iter().map(|run| {
            json!({
                "number": run.number,
                "kind": run.kind.as_str(),
                "fire_time": time(run.fire_time),
                "at": time(run.at),
                "message": run.message_id,
                "missed": run.missed,
            })
        })));
    }
    let Some(last) = runs.last() else {
        return print(match args.before {
            None => "it has done nothing yet",
            Some(_) => "no more is known",
        });
    };
    let mut rows = table(&["#NUMBER", "TIME", "KIND", "AT", "#MESSAGE", "#MISSED"]);
    for run in &runs {
        rows.add_row([
            run.number.to_string(),
            short_time(run.fire_time),
            run.kind.to_string(),
            time(run.at),
            run.message_id.map_or_else(|| "-".to_owned(), |id| id.to_string()),
            thousands(run.missed),
        ]);
    }
    print_table(&rows)?;
    if runs.len() == args.limit as usize && last.number > 1 {
        context.say(&format!("for more: --before {} or a higher --limit", last.number));
    }
    Ok(())
}
