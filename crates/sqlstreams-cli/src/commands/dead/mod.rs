//! `sqlstreams dead …`.

mod bulk;
mod discard;
mod list;
mod redrive;
mod show;

use clap::{Args, Subcommand};
use serde_json::{Value, json};
use sqlstreams::Exception;

use crate::context::Context;
use crate::output::time;

#[derive(Debug, Subcommand)]
pub(crate) enum DeadCommand {
    /// List the dead letters of a group
    List(list::ListArgs),
    /// Show a dead letter: its error, its history, its payload
    Show(show::ShowArgs),
    /// Put dead letters back to work
    Redrive(redrive::RedriveArgs),
    /// Give dead letters up for good
    Discard(discard::DiscardArgs),
}

/// Which dead letters.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct Chosen {
    /// The ids of messages
    #[arg(value_name = "ID", value_parser = clap::value_parser!(i64).range(1..))]
    ids: Vec<i64>,
    /// All dead letters of the group
    #[arg(long)]
    all: bool,
}

pub(crate) async fn run(command: DeadCommand, context: &Context) -> anyhow::Result<()> {
    match command {
        DeadCommand::List(args) => list::run(args, context).await,
        DeadCommand::Show(args) => show::run(args, context).await,
        DeadCommand::Redrive(args) => redrive::run(args, context).await,
        DeadCommand::Discard(args) => discard::run(args, context).await,
    }
}

fn to_json(letter: &Exception) -> Value {
    json!({
        "id": letter.message_id,
        "key": letter.key,
        "attempts": letter.attempts,
        "delays": letter.delays,
        "losses": letter.losses,
        "redrives": letter.redrives,
        "error": letter.last_error,
        "first_failed_at": time(letter.first_failed_at),
        "dead_at": letter.dead_at.map(time),
    })
}
