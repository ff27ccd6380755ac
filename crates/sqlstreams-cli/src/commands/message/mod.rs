//! `sqlstreams message …`: the current values of a compacted stream.

mod current;
mod latest;
mod remove;

use clap::Subcommand;
use serde_json::{Value, json};
use sqlstreams::{Message, PayloadType};

use crate::context::Context;
use crate::output::time;
use crate::payload;

#[derive(Debug, Subcommand)]
pub(crate) enum MessageCommand {
    /// Show the current value of a key
    Latest(latest::LatestArgs),
    /// List the current values, in the order of their keys
    Current(current::CurrentArgs),
    /// Remove keys: send a tombstone for each
    Remove(remove::RemoveArgs),
}

pub(crate) async fn run(command: MessageCommand, context: &Context) -> anyhow::Result<()> {
    match command {
        MessageCommand::Latest(args) => latest::run(args, context).await,
        MessageCommand::Current(args) => current::run(args, context).await,
        MessageCommand::Remove(args) => remove::run(args, context).await,
    }
}

fn to_json(message: &Message<Vec<u8>>, payload_type: PayloadType) -> Value {
    json!({
        "id": message.id,
        "key": message.key,
        "routing_key": message.routing_key,
        "headers": message.headers,
        "produced_at": time(message.produced_at),
        "payload": payload::to_value(&message.payload, payload_type),
    })
}
