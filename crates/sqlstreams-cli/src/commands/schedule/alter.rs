//! `sqlstreams schedule alter`.

use clap::Args;

use super::definition::{Message, Times, definition};
use crate::commands::open_stream;
use crate::context::Context;
use crate::failure::Failure;
use crate::output::{print, print_json};

const AFTER_HELP: &str = concat!(
    definition!(),
    "
What is not given stays. With other times it begins anew, from now on. The message is changed as a
whole: a --payload without --key has no key.

Examples:
  sqlstreams schedule alter nightly --cron '0 4 * * *'
  sqlstreams schedule alter nightly --missed all --catch-up 7
  sqlstreams schedule alter nightly --payload '{\"job\": \"close\", \"dry\": true}'"
);

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct AlterArgs {
    /// The schedule
    name: String,
    #[command(flatten)]
    times: Times,
    #[command(flatten)]
    message: Message,
}

pub(crate) async fn run(args: AlterArgs, context: &Context) -> anyhow::Result<()> {
    if args.message.has_parts() && !args.message.is_given() {
        return Err(Failure::usage("usage", "a message has a payload")
            .hint("It is changed as a whole: give --payload with its key and headers.")
            .into());
    }
    if !args.message.is_given() && !args.times.is_given() {
        return Err(Failure::usage("usage", "nothing is to be changed")
            .hint("Give what is, for example --cron; see --help.")
            .into());
    }
    let client = context.reader().await?;
    let info = super::open(&client, &args.name).await?.info().await?;
    let mut schedule = args.times.on(client.schedule(args.name));
    if args.message.is_given() {
        schedule = args.message.on(schedule, &open_stream(&client, &info.stream).await?);
    }
    let info = schedule.alter().await?.info().await?;
    match context.json() {
        true => print_json(&super::to_json(&info)),
        false => {
            let next = super::or_dash(info.next_fire);
            print(format_args!("changed schedule {:?}, next at {next}", info.name))
        }
    }
}
