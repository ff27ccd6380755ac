//! `sqlstreams group show`.

use clap::Args;

use crate::commands::open_group;
use crate::context::Context;
use crate::output::{print, print_json, print_table, short_time, thousands};

const AFTER_HELP: &str = concat!(
    super::columns!(),
    "
Examples:
  sqlstreams group show orders receipts
  sqlstreams group show orders receipts --json | jq .lag"
);

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct ShowArgs {
    /// The stream
    stream: String,
    /// The group
    group: String,
}

pub(crate) async fn run(args: ShowArgs, context: &Context) -> anyhow::Result<()> {
    let group = open_group(&context.reader().await?, &args.stream, &args.group).await?;
    let status = group.status().await?;
    match context.json() {
        true => print_json(&super::to_json(&status)),
        false => {
            print_table(&super::to_table(std::slice::from_ref(&status)))?;
            print(format_args!("\n{}", super::settings::lines(&status)))?;
            if let Some(at) = status.expires_at {
                print(format_args!(
                    "expires  {}: nobody has consumed it for long; consume or pause it to keep it",
                    short_time(at)
                ))?;
            }
            if status.expired + status.superseded > 0 {
                print(format_args!(
                    "passed   {} expired, {} superseded before another attempt",
                    thousands(status.expired),
                    thousands(status.superseded)
                ))?;
            }
            if status.replaying > 0 {
                let ids = thousands(status.replaying);
                print(format_args!("replays  {ids} ids to go, see `group replay list`"))?;
            }
            match group.bindings().await?.len() {
                0 => Ok(()),
                bindings => print(format_args!("bindings {bindings}, see `group bindings`")),
            }
        }
    }
}
