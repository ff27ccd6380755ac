//! `sqlstreams dead discard`.

use clap::Args;

use super::Chosen;
use super::bulk::{self, Deed};
use crate::commands::{confirm, open_group};
use crate::context::Context;
use crate::output::counted;

const AFTER_HELP: &str = "\
The group never sees them again; the messages stay in the stream. --all takes as many as there are
when it begins, in batches of 1,000.

Examples:
  sqlstreams dead discard orders --group receipts 1042 --yes
  sqlstreams dead discard orders --group receipts --all --yes";

#[derive(Debug, Args)]
#[command(
    after_help = AFTER_HELP,
    override_usage = "sqlstreams dead discard [OPTIONS] <STREAM> --group <GROUP> <--all|ID...> [--yes]"
)]
pub(crate) struct DiscardArgs {
    /// The stream
    stream: String,
    /// The group
    #[arg(long, short, value_name = "GROUP")]
    group: String,
    #[command(flatten)]
    chosen: Chosen,
    /// Do it: there is no way back
    #[arg(long)]
    yes: bool,
}

pub(crate) async fn run(args: DiscardArgs, context: &Context) -> anyhow::Result<()> {
    let group = open_group(&context.reader().await?, &args.stream, &args.group).await?;
    let count = match args.chosen.all {
        true => group.count_dead_letters().await?,
        false => args.chosen.ids.len() as u64,
    };
    confirm(args.yes, || {
        format!("discard {} of group {:?}", counted(count, "dead letter"), group.name())
    })?;
    bulk::run(Deed::Discard, &group, &args.chosen, context).await
}
