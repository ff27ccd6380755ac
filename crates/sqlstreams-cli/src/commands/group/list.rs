//! `sqlstreams group list`.

use clap::Args;
use serde_json::Value;

use crate::commands::open_stream;
use crate::context::Context;
use crate::output::{print, print_json, print_table};

const AFTER_HELP: &str = concat!(
    super::columns!(),
    "
Examples:
  sqlstreams group list orders
  sqlstreams group list orders --json | jq '.[] | select(.dead > 0)'"
);

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct ListArgs {
    /// The stream
    stream: String,
}

pub(crate) async fn run(args: ListArgs, context: &Context) -> anyhow::Result<()> {
    let groups = open_stream(&context.reader().await?, &args.stream).await?.groups().await?;
    if context.json() {
        return print_json(&Value::from_iter(groups.iter().map(super::to_json)));
    }
    match groups.is_empty() {
        true => print("no groups yet; `sqlstreams consume STREAM --group NAME` makes one"),
        false => print_table(&super::to_table(&groups)),
    }
}
