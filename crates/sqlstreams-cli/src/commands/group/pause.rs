//! `sqlstreams group pause` and `sqlstreams group resume`.

use clap::Args;

use crate::commands::open_group;
use crate::context::Context;
use crate::output::{print, print_json};

const AFTER_HELP: &str = "\
While a group is paused its consumers, wherever they run, start no message: those that handlers
have in hand are finished. It takes effect within a second, and lasts until `group resume`,
whatever is restarted meanwhile. Doing it twice is harmless.

Examples:
  sqlstreams group pause orders receipts
  sqlstreams group resume orders receipts";

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct PauseArgs {
    /// The stream
    stream: String,
    /// The group
    group: String,
}

pub(crate) async fn pause(args: PauseArgs, context: &Context) -> anyhow::Result<()> {
    set(args, true, context).await
}

pub(crate) async fn resume(args: PauseArgs, context: &Context) -> anyhow::Result<()> {
    set(args, false, context).await
}

async fn set(args: PauseArgs, paused: bool, context: &Context) -> anyhow::Result<()> {
    let group = open_group(&context.reader().await?, &args.stream, &args.group).await?;
    match paused {
        true => group.pause().await?,
        false => group.resume().await?,
    }
    let status = group.status().await?;
    if context.json() {
        return print_json(&super::to_json(&status));
    }
    let done = if paused { "paused" } else { "resumed" };
    print(format_args!("{done} group {:?} of stream {:?}", status.group, status.stream))
}
