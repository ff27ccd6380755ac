//! `sqlstreams stream alter`.

use std::time::Duration;

use clap::{ArgAction, ArgGroup, Args};

use crate::commands::open_stream;
use crate::context::Context;
use crate::output::{print, print_json, span};
use crate::values;

const AFTER_HELP: &str = "\
With --notify on, every insert wakes the stream's consumers when its transaction commits: for
producers that are plain SQL. Otherwise they find such messages within a second. Commits that
notify follow one another in PostgreSQL, which limits how many there can be per second. What
`produce` and the library send wakes consumers in any case.
Waits up to 3 s for transactions that write to the stream.

--idempotency-window says how long the stream remembers the idempotency keys of its messages: 5m to
365d. Keys that were forgotten under a shorter window stay so.

Examples:
  sqlstreams stream alter orders --notify on
  sqlstreams stream alter orders --idempotency-window 7d";

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
#[command(group = ArgGroup::new("setting").required(true).multiple(true))]
pub(crate) struct AlterArgs {
    /// The stream
    name: String,
    /// Whether every insert wakes consumers from inside its transaction: on or off
    #[arg(long, value_name = "ON|OFF", group = "setting", value_parser = values::on_or_off,
          action = ArgAction::Set)]
    notify: Option<bool>,
    /// How long to remember idempotency keys
    #[arg(long, value_name = "DURATION", group = "setting", value_parser = values::duration)]
    idempotency_window: Option<Duration>,
}

pub(crate) async fn run(args: AlterArgs, context: &Context) -> anyhow::Result<()> {
    let stream = open_stream(&context.reader().await?, &args.name).await?;
    // The one that may be out of range first.
    if let Some(window) = args.idempotency_window {
        stream.set_idempotency_window(window).await?;
    }
    if let Some(notify) = args.notify {
        stream.set_notify(notify).await?;
    }
    if context.json() {
        return print_json(&super::to_json(&stream.info().await?));
    }
    if let Some(window) = args.idempotency_window {
        let window = span(window);
        print(format_args!("stream {:?} remembers idempotency keys for {window}", stream.name()))?;
    }
    if let Some(notify) = args.notify {
        let does = if notify { "wake" } else { "do not wake" };
        print(format_args!("inserts into stream {:?} {does} consumers", stream.name()))?;
    }
    Ok(())
}
