//! `sqlstreams stream compact`.

use std::time::Duration;

use clap::Args;
use serde_json::json;
use sqlstreams::Left;

use crate::commands::open_stream;
use crate::context::Context;
use crate::output::{counted, print, print_json, thousands};
use crate::values;

const AFTER_HELP: &str = "\
Of each key the newest message stays. Older ones are removed once every group has resolved them; what
is in a group's exception queue stays, dead letters too. It may run at any time, together with
producers, consumers and itself, and may be stopped and begun again.

Then the disk space of each partition of the log of which at least half is gone is given back, by
VACUUM (FULL): whoever reads that partition waits meanwhile, a moment per 100 MB; producers do not. A partition
that somebody uses is left for the next time. Only the owner of the tables may do that part.

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
    let stream = open_stream(&context.updated().await?, &args.name).await?;
    let done = stream.compact(args.min_age, args.tombstone_age).await?;
    let reclaimed = if done.busy { Vec::new() } else { stream.reclaim().await? };
    if context.json() {
        let partitions: Vec<_> = reclaimed
            .iter()
            .map(|done| {
                json!({
                    "partition": done.partition,
                    "bytes_before": done.bytes_before,
                    "bytes_after": done.bytes_after,
                    "left": done.left.map(left),
                })
            })
            .collect();
        return print_json(&json!({
            "looked_at": done.looked_at,
            "removed": done.removed,
            "floor": done.floor,
            "busy": done.busy,
            "reclaimed": partitions,
        }));
    }
    print(format_args!(
        "removed {} of {} up to id {} from stream {:?}",
        thousands(done.removed),
        counted(done.looked_at, "message"),
        thousands(done.floor),
        stream.name()
    ))?;
    for done in &reclaimed {
        match done.left {
            None => print(format_args!(
                "{} took {} bytes, and takes {} now",
                done.partition,
                thousands(done.bytes_before),
                thousands(done.bytes_after)
            ))?,
            Some(why) => context.say(&format!(
                "{} takes {} bytes, of which half are free, but {}",
                done.partition,
                thousands(done.bytes_before),
                left(why)
            )),
        }
    }
    if done.busy {
        context.say("somebody else compacts the stream, so this run ended early");
    }
    Ok(())
}

/// Why the space of a partition was not given back.
fn left(why: Left) -> &'static str {
    match why {
        Left::Busy => "it is in use",
        Left::NotPermitted => "only its owner may give the space back",
        _ => "it was left",
    }
}
