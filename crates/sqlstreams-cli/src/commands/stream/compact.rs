//! `sqlstreams stream compact`.

use std::time::Duration;

use clap::Args;
use serde_json::json;

use crate::commands::open_stream;
use crate::context::Context;
use crate::output::{counted, print, print_json, thousands};
use crate::values;

const AFTER_HELP: &str = "\
Of each key the newest message stays. Older ones are removed once every group has resolved them; what
is in a group's exception queue stays, dead letters too. It may run at any time, together with
producers, consumers and itself, and may be stopped and begun again.

Examples:
  sqlstreams stream compact prices
  sqlstreams stream compact prices --tombstone-age 7d";

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct CompactArgs {
    /// The stream, a compacted one
    name: String,
    /// Leave messages that are younger. Producers whose connection broke ask for about 5 minutes
    /// what became of their messages
    #[arg(long, value_name = "DURATION", default_value = "5m", value_parser = values::duration_or_none)]
    min_age: Duration,
    /// Leave tombstones that are younger: longer than anybody takes to read the log from its beginning
    #[arg(long, value_name = "DURATION", default_value = "24h", value_parser = values::duration_or_none)]
    tombstone_age: Duration,
}

pub(crate) async fn run(args: CompactArgs, context: &Context) -> anyhow::Result<()> {
    let stream = open_stream(&context.writer().await?, &args.name).await?;
    let done = stream.compact(args.min_age, args.tombstone_age).await?;
    if context.json() {
        return print_json(&json!({
            "looked_at": done.looked_at,
            "removed": done.removed,
            "floor": done.floor,
            "busy": done.busy,
        }));
    }
    print(format_args!(
        "removed {} of {} up to id {} from stream {:?}",
        thousands(done.removed),
        counted(done.looked_at, "message"),
        thousands(done.floor),
        stream.name()
    ))?;
    if done.busy {
        context.say("somebody else compacts the stream, so this run ended early");
    }
    Ok(())
}
