//! `sqlstreams schedule run`.

use clap::Args;
use serde_json::json;

use crate::context::Context;
use crate::output::{print, print_json};

const AFTER_HELP: &str = "\
Its times stay as they are. It works with one that is paused or over, too.

Examples:
  sqlstreams schedule run nightly";

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct RunArgs {
    /// The schedule
    name: String,
}

pub(crate) async fn run(args: RunArgs, context: &Context) -> anyhow::Result<()> {
    let schedule = super::open(&context.reader().await?, &args.name).await?;
    let id = schedule.run_now().await?;
    let stream = schedule.info().await?.stream;
    match context.json() {
        true => print_json(&json!({"schedule": args.name, "stream": stream, "message": id})),
        false => print(format_args!("produced message {id} of stream {stream:?}")),
    }
}
