//! `sqlstreams stream alter`.

use clap::{ArgAction, Args};

use crate::commands::open_stream;
use crate::context::Context;
use crate::output::{print, print_json};
use crate::values;

const AFTER_HELP: &str = "\
With --notify on, every insert wakes the stream's consumers when its transaction commits: for
producers that are plain SQL. Otherwise they find such messages within a second. Commits that
notify follow one another in PostgreSQL, which limits how many there can be per second. What
`produce` and the library send wakes consumers in any case.
Waits up to 3 s for transactions that write to the stream.

Examples:
  sqlstreams stream alter orders --notify on";

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct AlterArgs {
    /// The stream
    name: String,
    /// Whether every insert wakes consumers from inside its transaction: on or off
    #[arg(long, value_name = "ON|OFF", value_parser = values::on_or_off, action = ArgAction::Set)]
    notify: bool,
}

pub(crate) async fn run(args: AlterArgs, context: &Context) -> anyhow::Result<()> {
    let stream = open_stream(&context.reader().await?, &args.name).await?;
    stream.set_notify(args.notify).await?;
    if context.json() {
        return print_json(&super::to_json(&stream.info().await?));
    }
    let does = if args.notify { "wake" } else { "do not wake" };
    print(format_args!("inserts into stream {:?} {does} consumers", stream.name()))
}
