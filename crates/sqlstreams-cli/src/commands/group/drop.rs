//! `sqlstreams group drop`.

use clap::Args;
use serde_json::json;

use crate::commands::{confirm, open_group};
use crate::context::Context;
use crate::output::{counted, print, print_json};

const AFTER_HELP: &str = "\
The messages stay in the stream. A consumer that names the group later begins anew.

Examples:
  sqlstreams group drop orders receipts --yes";

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct DropArgs {
    /// The stream
    stream: String,
    /// The group
    group: String,
    /// Do it: there is no way back
    #[arg(long)]
    yes: bool,
}

pub(crate) async fn run(args: DropArgs, context: &Context) -> anyhow::Result<()> {
    let group = open_group(&context.reader().await?, &args.stream, &args.group).await?;
    let status = group.status().await?;
    let dead = group.count_dead_letters().await?;
    confirm(args.yes, || {
        format!(
            "drop group {:?} of stream {:?} with its position and {}",
            status.group,
            status.stream,
            counted(dead, "dead letter")
        )
    })?;
    group.drop_group().await?;
    match context.json() {
        true => print_json(&json!({"stream": status.stream, "dropped": status.group})),
        false => {
            print(format_args!("dropped group {:?} of stream {:?}", status.group, status.stream))
        }
    }
}
