//! `sqlstreams delayed cancel`.

use clap::Args;
use serde_json::json;

use crate::commands::open_stream;
use crate::context::Context;
use crate::failure::Failure;
use crate::output::{counted, print, print_json};

const AFTER_HELP: &str = "\
What is cancelled is gone: nobody gets it. An id that does not wait (any more) ends the command with
exit code 3, after the others were cancelled.

Examples:
  sqlstreams delayed cancel orders 17
  sqlstreams delayed cancel orders 17 18 19";

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct CancelArgs {
    /// The stream
    stream: String,
    /// The ids, as `delayed list` shows them
    #[arg(value_name = "ID", required = true, value_parser = clap::value_parser!(i64).range(1..))]
    ids: Vec<i64>,
}

pub(crate) async fn run(args: CancelArgs, context: &Context) -> anyhow::Result<()> {
    let stream = open_stream(&context.reader().await?, &args.stream).await?;
    let (mut cancelled, mut unknown) = (Vec::new(), Vec::new());
    for id in args.ids {
        match stream.cancel_delayed(id).await? {
            true => cancelled.push(id),
            false => unknown.push(id),
        }
    }
    if !unknown.is_empty() {
        let ids: Vec<String> = unknown.iter().map(i64::to_string).collect();
        let text = format!("not waiting in stream {:?}: {}", stream.name(), ids.join(", "));
        return Err(Failure::not_found("unknown_delayed", text)
            .hint("They are in the stream already, or were cancelled before.")
            .detail("cancelled", cancelled)
            .detail("unknown", unknown)
            .into());
    }
    match context.json() {
        true => print_json(&json!({ "cancelled": cancelled })),
        false => print(format_args!(
            "cancelled {} of stream {:?}",
            counted(cancelled.len() as u64, "delayed message"),
            stream.name()
        )),
    }
}
