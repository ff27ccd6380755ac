//! The commands, one per file.

pub(crate) mod up;

use std::process::ExitCode;

use crate::cli::Command;
use crate::context::Context;
use crate::demo;

/// Runs a command. What it returns is the exit code of the process when it did what it should.
pub(crate) async fn run(command: Command, context: &Context) -> anyhow::Result<ExitCode> {
    match command {
        Command::Demo(args) => demo::run(args, context).await?,
        Command::Up(args) => up::run(&args, context).await?,
    }
    Ok(ExitCode::SUCCESS)
}
