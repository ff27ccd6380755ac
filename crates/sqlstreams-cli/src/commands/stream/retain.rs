//! `sqlstreams stream retain`.

use clap::Args;
use serde_json::json;

use super::retention;
use crate::commands::open_stream;
use crate::context::Context;
use crate::output::{counted, print, print_json, thousands};

const AFTER_HELP: &str = "\
Does now what the upkeep does every few seconds: lets messages go that the stream's retention does
not keep (`stream alter --help`), and dead letters that are too old. It waits for nobody for longer than a few seconds; what is in use
leaves when it is run again. Only the owner of the tables may do it.

Examples:
  sqlstreams stream retain orders
  sqlstreams stream retain orders --json | jq .hold";

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct RetainArgs {
    /// The stream
    name: String,
}

pub(crate) async fn run(args: RetainArgs, context: &Context) -> anyhow::Result<()> {
    let stream = open_stream(&context.updated().await?, &args.name).await?;
    let done = stream.retain().await?;
    let info = stream.info().await?;
    if context.json() {
        return print_json(&json!({
            "partitions": done.partitions,
            "dead_letters": done.dead_letters,
            "first_id": info.first_id,
            "hold": retention::to_json(&info)["hold"],
        }));
    }
    print(format_args!(
        "{} and {} of stream {:?} went; it is kept from id {} on",
        counted(done.partitions, "partition"),
        counted(done.dead_letters, "dead letter"),
        info.name,
        thousands(info.first_id)
    ))?;
    if let Some(hold) = &info.hold {
        context.say(&format!("more is held up {}", retention::held(hold)));
    }
    Ok(())
}
