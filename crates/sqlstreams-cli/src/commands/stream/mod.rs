//! `sqlstreams stream …`.

mod alter;
mod compact;
mod create;
mod drop;
mod export;
mod import;
mod list;
mod retain;
pub(crate) mod retention;
mod show;

use std::process::ExitCode;

use clap::Subcommand;
use serde_json::{Value, json};
use sqlstreams::StreamInfo;

use crate::context::Context;
use crate::output::time;

#[derive(Debug, Subcommand)]
pub(crate) enum StreamCommand {
    /// Create a stream
    Create(create::CreateArgs),
    /// List the streams
    List(list::ListArgs),
    /// Show a stream and its groups
    Show(show::ShowArgs),
    /// Change settings of a stream
    Alter(alter::AlterArgs),
    /// Remove what newer messages have superseded in a compacted stream
    Compact(compact::CompactArgs),
    /// Let old messages go now, as the stream's retention says
    Retain(retain::RetainArgs),
    /// Write messages to a file or to stdout
    Export(export::ExportArgs),
    /// Read messages that were exported
    Import(import::ImportArgs),
    /// Drop a stream with all its messages and groups
    Drop(drop::DropArgs),
}

pub(crate) async fn run(command: StreamCommand, context: &Context) -> anyhow::Result<ExitCode> {
    match command {
        StreamCommand::Create(args) => create::run(args, context).await?,
        StreamCommand::List(args) => list::run(args, context).await?,
        StreamCommand::Show(args) => show::run(args, context).await?,
        StreamCommand::Alter(args) => alter::run(args, context).await?,
        StreamCommand::Compact(args) => compact::run(args, context).await?,
        StreamCommand::Retain(args) => retain::run(args, context).await?,
        StreamCommand::Export(args) => return export::run(args, context).await,
        StreamCommand::Import(args) => return import::run(args, context).await,
        StreamCommand::Drop(args) => drop::run(args, context).await?,
    }
    Ok(ExitCode::SUCCESS)
}

fn to_json(stream: &StreamInfo) -> Value {
    json!({
        "id": stream.id,
        "name": stream.name,
        "payload_type": stream.payload_type.as_str(),
        "partition_size": stream.partition_size,
        "created_at": time(stream.created_at),
        "head": stream.head,
        "groups": stream.groups,
        "notify": stream.notify,
        "idempotency_window_seconds": stream.idempotency_window.as_secs_f64(),
        "compacted": stream.compacted,
        "first_id": stream.first_id,
        "retention": retention::to_json(stream),
        "group_expiry_seconds": stream.group_expiry.map(|after| after.as_secs_f64()),
    })
}
