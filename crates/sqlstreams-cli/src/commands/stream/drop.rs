//! `sqlstreams stream drop`.

use clap::Args;
use serde_json::json;

use crate::commands::{confirm, open_stream};
use crate::context::Context;
use crate::output::{counted, print, print_json, thousands};

const AFTER_HELP: &str = "\
Its schedules go with it. Waits for transactions that use the stream; consumers that run end with an
error.

Examples:
  sqlstreams stream drop orders --yes";

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct DropArgs {
    /// The stream
    name: String,
    /// Do it: there is no way back
    #[arg(long)]
    yes: bool,
}

pub(crate) async fn run(args: DropArgs, context: &Context) -> anyhow::Result<()> {
    let stream = open_stream(&context.reader().await?, &args.name).await?;
    let info = stream.info().await?;
    confirm(args.yes, || {
        format!(
            "drop stream {:?} with all its messages (ids up to {}) and {}",
            info.name,
            thousands(info.head),
            counted(info.groups.unsigned_abs(), "group")
        )
    })?;
    stream.drop_stream().await?;
    match context.json() {
        true => print_json(&json!({"dropped": info.name})),
        false => print(format_args!("dropped stream {:?}", info.name)),
    }
}
