//! `sqlstreams group create`.

use clap::Args;
use sqlstreams::{Binding, RetryPolicy, Start};

use super::settings::{Settings, settings};
use crate::commands::open_stream;
use crate::context::Context;
use crate::output::{print, print_json};
use crate::values;

const AFTER_HELP: &str = concat!(
    settings!(),
    "
`sqlstreams consume` creates a group that is missing, too, with the defaults.

Examples:
  sqlstreams group create orders receipts
  sqlstreams group create orders receipts --bind 'orders.*.created' --bind 'refunds.#'
  sqlstreams group create orders mail --from latest --max-in-flight 8 --rate-limit 50"
);

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct CreateArgs {
    /// The stream
    stream: String,
    /// The group
    group: String,
    /// Where it starts: beginning, latest, an id, a time (UTC without an offset), or '2h ago'
    #[arg(long, value_name = "WHERE", value_parser = values::start,
          default_value = "beginning")]
    from: Start,
    /// Only messages that match are for it: a pattern, or JSON; may be repeated. See `group bindings`
    #[arg(long, value_name = "BINDING", value_parser = values::binding)]
    bind: Vec<Binding>,
    #[command(flatten)]
    settings: Settings,
}

pub(crate) async fn run(args: CreateArgs, context: &Context) -> anyhow::Result<()> {
    let stream = open_stream(&context.reader().await?, &args.stream).await?;
    let group = stream.group(args.group).start(args.from);
    let group = args.bind.into_iter().fold(group, |group, binding| group.bind(binding));
    let group = args.settings.on(group, RetryPolicy::default()).create().await?;
    let status = group.status().await?;
    match context.json() {
        true => print_json(&super::to_json(&status)),
        false => {
            print(format_args!("created group {:?} of stream {:?}", status.group, status.stream))
        }
    }
}
