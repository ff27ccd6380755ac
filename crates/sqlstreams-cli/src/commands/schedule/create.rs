//! `sqlstreams schedule create`.

use clap::Args;

use super::definition::{Message, Times, definition};
use crate::commands::open_stream;
use crate::context::Context;
use crate::failure::Failure;
use crate::output::{print, print_json};

const AFTER_HELP: &str = concat!(
    definition!(),
    "
Messages are produced by whoever does the maintenance: some process that consumes, or `maintain`. Each
time is produced once, however many there are.

Examples:
  sqlstreams schedule create nightly jobs --cron '30 2 * * *' --zone Europe/Berlin --payload '{\"job\": \"close\"}'
  sqlstreams schedule create pulse jobs --cron '@every 90s' --missed skip --payload '1' --replace
  sqlstreams schedule create launch jobs --at 2027-01-01T00:00:00Z --payload '{\"job\": \"launch\"}'"
);

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct CreateArgs {
    /// The schedule
    name: String,
    /// The stream that it produces for
    stream: String,
    /// Change a schedule of this name to this, if there is one
    #[arg(long)]
    replace: bool,
    #[command(flatten)]
    times: Times,
    #[command(flatten)]
    message: Message,
}

pub(crate) async fn run(args: CreateArgs, context: &Context) -> anyhow::Result<()> {
    if args.times.cron.is_none() && args.times.at.is_none() {
        return Err(Failure::usage("usage", "the schedule has no times")
            .hint("Give --cron '30 2 * * *' or --at 2027-01-01T00:00:00Z.")
            .into());
    }
    if !args.message.is_given() {
        return Err(Failure::usage("usage", "the schedule has no message")
            .hint("Give --payload; or --tombstone, for a compacted stream.")
            .into());
    }
    let client = context.updated().await?;
    let stream = open_stream(&client, &args.stream).await?;
    let schedule = args.message.on(args.times.on(client.schedule(args.name)), &stream);
    let schedule = match args.replace {
        true => schedule.create_or_replace().await?,
        false => schedule.create().await?,
    };
    let info = schedule.info().await?;
    match context.json() {
        true => print_json(&super::to_json(&info)),
        false => {
            let done = if args.replace { "set" } else { "created" };
            let next = super::or_dash(info.next_fire);
            print(format_args!("{done} schedule {:?}, first at {next}", info.name))
        }
    }
}
