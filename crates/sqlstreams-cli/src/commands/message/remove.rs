//! `sqlstreams message remove`.

use clap::Args;
use serde_json::json;
use sqlstreams::Outgoing;

use crate::commands::open_stream;
use crate::context::Context;
use crate::failure::Failure;
use crate::output::{counted, print, print_json, printable};

const AFTER_HELP: &str = "\
Sends a tombstone for each key, all in one transaction: a message without payload, which consumers
get like any other. From then on the key has no value.

Examples:
  sqlstreams message remove prices apples
  sqlstreams message remove prices apples pears";

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct RemoveArgs {
    /// The stream, a compacted one
    stream: String,
    /// The keys
    #[arg(value_name = "KEY", required = true)]
    keys: Vec<String>,
}

pub(crate) async fn run(args: RemoveArgs, context: &Context) -> anyhow::Result<()> {
    let stream = open_stream(&context.updated().await?, &args.stream).await?;
    let tombstones = args.keys.iter().map(Outgoing::tombstone);
    let sent = stream.producer().send_all(tombstones).await;
    let receipts = sent.map_err(|error| refused(error, &args.keys))?;
    let ids: Vec<i64> = receipts.iter().map(|receipt| receipt.id).collect();
    match context.json() {
        true => print_json(&json!({ "ids": ids })),
        false => print(format_args!(
            "removed {} of stream {:?}",
            counted(ids.len() as u64, "key"),
            stream.name()
        )),
    }
}

/// What is wrong with a key, in terms of keys.
fn refused(error: sqlstreams::Error, keys: &[String]) -> anyhow::Error {
    let Some(key) = error.place().and_then(|place| keys.get(place)) else {
        return error.into();
    };
    let text = error.to_string();
    let reason = match text.split_once(": ") {
        Some((place, reason)) if place.starts_with("message ") => reason,
        _ => &text,
    };
    Failure::failed(error.code(), format!("cannot remove {:?}: {reason}", printable(key, 30)))
        .hint("Nothing was removed.")
        .into()
}
