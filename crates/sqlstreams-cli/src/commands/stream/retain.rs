//! `sqlstreams stream retain`.

use clap::Args;
use serde_json::json;
use sqlstreams::Retained;

use super::retention;
use crate::commands::open_stream;
use crate::context::Context;
use crate::failure::Failure;
use crate::output::{counted, print, print_json, printable, short_time, thousands, time};

const AFTER_HELP: &str = "\
Does now what the upkeep does every few seconds: lets messages go that the stream's retention does
not keep (`stream alter --help`), and dead letters that are too old. It waits for nobody for longer than a few seconds; what is in use
leaves when it is run again. Only the owner of the tables may do it.

Where another process has the stream in hand all the time, the upkeep or another `stream retain`, it ends
with exit code 1 and says which; what was done stays done, and the other goes on with the rest.

Examples:
  sqlstreams stream retain orders
  sqlstreams stream retain orders --json | jq '{hold, busy}'";

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
        print_json(&json!({
            "partitions": done.partitions,
            "dead_letters": done.dead_letters,
            "first_id": info.first_id,
            "hold": retention::to_json(&info)["hold"],
            "busy": done.busy.as_ref().map(|busy| json!({
                "by": busy.by,
                "since": busy.since.map(time),
            })),
        }))?;
        return unless_busy(&done, &info.name);
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
    unless_busy(&done, &info.name)
}

/// Fails where another had the stream in hand.
fn unless_busy(done: &Retained, name: &str) -> anyhow::Result<()> {
    let Some(busy) = &done.busy else { return Ok(()) };
    let who = busy.by.as_deref().map_or("another session".to_owned(), |who| printable(who, 200));
    let since = busy.since.map(|at| format!(" since {}", short_time(at)));
    let text = format!("stream {name:?} is in use by {who}{}", since.unwrap_or_default());
    let hint = "The upkeep or another `stream retain` goes on by itself: nothing needs to be done, or run this again in a moment. A session that is idle in a \
                transaction keeps everybody from it until it ends: end it, with pg_terminate_backend(<process>) if need be.";
    let failure = Failure::failed("stream_busy", text).hint(hint);
    Err(failure.detail("by", busy.by.clone()).detail("since", busy.since.map(time)).into())
}
