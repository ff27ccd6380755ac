//! `sqlstreams dead redrive`.

use clap::Args;

use super::Chosen;
use super::bulk::{self, Deed};
use crate::commands::open_group;
use crate::context::Context;

const AFTER_HELP: &str = "\
The group's consumers try them again with their attempts counted from 0; other groups do not notice.
Doing it twice is harmless. --all takes as many as there are when it begins, in batches of 1,000.

Examples:
  sqlstreams dead redrive orders --group receipts 1042 1043
  sqlstreams dead redrive orders --group receipts --all";

#[derive(Debug, Args)]
#[command(
    after_help = AFTER_HELP,
    override_usage = "sqlstreams dead redrive [OPTIONS] <STREAM> --group <GROUP> <--all|ID...>"
)]
pub(crate) struct RedriveArgs {
    /// The stream
    stream: String,
    /// The group
    #[arg(long, short, value_name = "GROUP")]
    group: String,
    #[command(flatten)]
    chosen: Chosen,
}

pub(crate) async fn run(args: RedriveArgs, context: &Context) -> anyhow::Result<()> {
    let group = open_group(&context.reader().await?, &args.stream, &args.group).await?;
    bulk::run(Deed::Redrive, &group, &args.chosen, context).await
}
