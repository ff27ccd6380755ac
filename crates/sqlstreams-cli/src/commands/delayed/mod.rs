//! `sqlstreams delayed …`.

mod cancel;
mod list;

use clap::Subcommand;

use crate::context::Context;

#[derive(Debug, Subcommand)]
pub(crate) enum DelayedCommand {
    /// List the messages that are not due yet
    List(list::ListArgs),
    /// Take messages back that are not due yet
    Cancel(cancel::CancelArgs),
}

pub(crate) async fn run(command: DelayedCommand, context: &Context) -> anyhow::Result<()> {
    match command {
        DelayedCommand::List(args) => list::run(args, context).await,
        DelayedCommand::Cancel(args) => cancel::run(args, context).await,
    }
}
