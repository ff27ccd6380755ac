//! `sqlstreams group drop`.

use clap::Args;
use serde_json::json;
use sqlstreams::ErrorKind;

use crate::commands::{confirm, open_group};
use crate::context::Context;
use crate::output::{counted, print, print_json};

const AFTER_HELP: &str = "\
The messages stay in the stream. A consumer that names the group later begins anew.

Examples:
  sqlstreams group drop orders receipts --yes";

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct DropArgs {
    /// The stream
    stream: String,
    /// The group
    group: String,
    /// Do it: there is no way back
    #[arg(long)]
    yes: bool,
}

pub(crate) async fn run(args: DropArgs, context: &Context) -> anyhow::Result<()> {
    let group = open_group(&context.reader().await?, &args.stream, &args.group).await?;
    // One without its cursor, which has no status, can be dropped as well.
    let with = match group.status().await {
        Ok(_) => {
            let dead = counted(group.count_dead_letters().await?, "dead letter");
            format!("with its position and {dead}")
        }
        // (Not one of the server's.)
        Err(error) if error.kind() == ErrorKind::Database && error.sql_state().is_none() => {
            "whose cursor is missing".to_owned()
        }
        Err(error) => return Err(error.into()),
    };
    let (stream, name) = (&args.stream, &args.group);
    confirm(args.yes, || format!("drop group {name:?} of stream {stream:?} {with}"))?;
    group.drop_group().await?;
    match context.json() {
        true => print_json(&json!({"stream": stream, "dropped": name})),
        false => print(format_args!("dropped group {name:?} of stream {stream:?}")),
    }
}
