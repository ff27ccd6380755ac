//! The commands, one per file.

pub(crate) mod consume;
pub(crate) mod dead;
pub(crate) mod delayed;
pub(crate) mod doctor;
pub(crate) mod down;
pub(crate) mod group;
pub(crate) mod maintain;
pub(crate) mod message;
pub(crate) mod migrate;
pub(crate) mod produce;
pub(crate) mod schedule;
pub(crate) mod stream;
pub(crate) mod up;

use std::process::ExitCode;

use sqlstreams::{Bytes, Client, Group, Stream};

use crate::bench;
use crate::cli::Command;
use crate::context::Context;
use crate::demo;
use crate::failure::Failure;

/// Runs a command. What it returns is the exit code of the process.
pub(crate) async fn run(command: Command, context: &Context) -> anyhow::Result<ExitCode> {
    match command {
        Command::Demo(args) => return demo::run(args, context).await,
        Command::Up(args) => up::run(args, context).await?,
        Command::Down(args) => down::run(args, context).await?,
        Command::Migrate(args) => migrate::run(args, context).await?,
        Command::Stream(command) => return stream::run(command, context).await,
        Command::Produce(args) => return produce::run(args, context).await,
        Command::Consume(args) => return consume::run(args, context).await,
        Command::Group(command) => group::run(command, context).await?,
        Command::Dead(command) => dead::run(command, context).await?,
        Command::Delayed(command) => delayed::run(command, context).await?,
        Command::Message(command) => message::run(command, context).await?,
        Command::Maintain(args) => maintain::run(args, context).await?,
        Command::Schedule(command) => schedule::run(command, context).await?,
        Command::Doctor(args) => return doctor::run(args, context).await,
        Command::Bench(command) => return bench::run(command, context).await,
    }
    Ok(ExitCode::SUCCESS)
}

/// A stream that exists, its payloads being bytes to us.
async fn open_stream(client: &Client, name: &str) -> sqlstreams::Result<Stream<Vec<u8>, Bytes>> {
    client.stream::<Vec<u8>>(name).codec::<Bytes>().open().await
}

/// A group that exists.
async fn open_group(
    client: &Client,
    stream: &str,
    group: &str,
) -> sqlstreams::Result<Group<Vec<u8>, Bytes>> {
    open_stream(client, stream).await?.group(group).open().await
}

/// Refuses what cannot be undone unless it was confirmed; `what` says what would be lost.
fn confirm(yes: bool, what: impl FnOnce() -> String) -> Result<(), Failure> {
    match yes {
        true => Ok(()),
        false => Err(Failure::usage("not_confirmed", format!("this would {}", what()))
            .hint("There is no way back; repeat the command with --yes to do it.")),
    }
}
