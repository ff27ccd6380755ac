//! The sqlstreams command: see `sqlstreams --help`, or [`cli`] for where that text lives.
//!
//! `main` parses ([`cli`]), gathers what commands share ([`context`]), runs one command ([`commands`], [`demo`]) and turns
//! what went wrong into a line, a hint and an exit code ([`failure`]).

mod cli;
mod commands;
mod context;
mod demo;
mod failure;
mod terminal;

use std::process::ExitCode;

use clap::Parser;

use crate::cli::Cli;
use crate::context::Context;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let context = Context::new(cli.global);
    terminal::init_tracing(context.verbosity());
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return failure::report(&anyhow::Error::from(error), &context),
    };
    let outcome = runtime.block_on(commands::run(cli.command, &context));
    // A thread that waits for a line from a terminal cannot be ended: do not wait for it.
    runtime.shutdown_background();
    match outcome {
        Ok(code) => code,
        Err(error) => failure::report(&error, &context),
    }
}
