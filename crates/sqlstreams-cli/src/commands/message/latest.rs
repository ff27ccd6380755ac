//! `sqlstreams message latest`.

use clap::Args;

use crate::commands::open_stream;
use crate::context::Context;
use crate::failure::Failure;
use crate::output::{print, print_json};
use crate::payload;

const AFTER_HELP: &str = "\
Prints the payload of the newest message that has the key. Where the key has no value, since it never
had one, it was removed, or the message has expired, the command ends with exit code 3.

Examples:
  sqlstreams message latest prices apples
  sqlstreams message latest prices apples --json | jq .id";

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct LatestArgs {
    /// The stream, a compacted one
    stream: String,
    /// The key
    key: String,
}

pub(crate) async fn run(args: LatestArgs, context: &Context) -> anyhow::Result<()> {
    let stream = open_stream(&context.reader().await?, &args.stream).await?;
    let Some(message) = stream.latest(&args.key).await? else {
        let text = format!("key {:?} of stream {:?} has no value", args.key, args.stream);
        let hint = "`sqlstreams message current` lists the keys that have one.";
        return Err(Failure::not_found("unknown_key", text).hint(hint).into());
    };
    match context.json() {
        true => print_json(&super::to_json(&message, stream.payload_type())),
        false => print(payload::to_text(&message.payload, stream.payload_type())),
    }
}
