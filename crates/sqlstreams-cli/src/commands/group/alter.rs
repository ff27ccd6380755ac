//! `sqlstreams group alter`.

use clap::Args;

use super::settings::{Settings, settings};
use crate::commands::open_stream;
use crate::context::Context;
use crate::failure::Failure;
use crate::output::{print, print_json};

const AFTER_HELP: &str = concat!(
    settings!(),
    "
Examples:
  sqlstreams group alter orders receipts --max-in-flight 8 --rate-limit 50
  sqlstreams group alter orders receipts --rate-limit 0
  sqlstreams group alter orders receipts --max-attempts 10 --backoff-cap 1h"
);

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct AlterArgs {
    /// The stream
    stream: String,
    /// The group
    group: String,
    #[command(flatten)]
    settings: Settings,
}

pub(crate) async fn run(args: AlterArgs, context: &Context) -> anyhow::Result<()> {
    if args.settings.is_empty() {
        return Err(Failure::usage("nothing_to_change", "no setting is named")
            .hint("Name at least one: see `sqlstreams group alter --help`.")
            .into());
    }
    let stream = open_stream(&context.reader().await?, &args.stream).await?;
    let policy = stream.group(&*args.group).open().await?.status().await?.retry;
    let group = args.settings.on(stream.group(args.group), policy).open().await?;
    let status = group.status().await?;
    match context.json() {
        true => print_json(&super::to_json(&status)),
        false => {
            print(format_args!("changed group {:?} of stream {:?}", status.group, status.stream))
        }
    }
}
