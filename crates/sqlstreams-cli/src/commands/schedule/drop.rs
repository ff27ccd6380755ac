//! `sqlstreams schedule drop`.

use clap::Args;
use serde_json::json;

use crate::commands::confirm;
use crate::context::Context;
use crate::output::{print, print_json};

const AFTER_HELP: &str = "\
What it has produced stays in the stream. Dropping a stream drops its schedules, too.

Examples:
  sqlstreams schedule drop nightly --yes";

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct DropArgs {
    /// The schedule
    name: String,
    /// Do it: there is no way back
    #[arg(long)]
    yes: bool,
}

pub(crate) async fn run(args: DropArgs, context: &Context) -> anyhow::Result<()> {
    let schedule = super::open(&context.reader().await?, &args.name).await?;
    let info = schedule.info().await?;
    confirm(args.yes, || format!("drop schedule {:?} of stream {:?}", info.name, info.stream))?;
    schedule.drop_schedule().await?;
    match context.json() {
        true => print_json(&json!({"dropped": info.name})),
        false => print(format_args!("dropped schedule {:?}", info.name)),
    }
}
