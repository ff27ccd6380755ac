//! The sqlstreams command.
//!
//! `main` parses ([`cli`]), gathers what commands share ([`context`]), runs one command ([`commands`], [`demo`], [`mod@bench`]) and turns
//! what went wrong into a line, a hint and an exit code ([`failure`]).

mod bench;
mod calendar;
mod cli;
mod commands;
mod context;
mod demo;
mod failure;
mod output;
mod own_stream;
mod payload;
mod progress;
mod prose;
mod signals;
mod span;
mod terminal;
mod transfer;
mod values;

use std::process::ExitCode;

use crate::cli::Cli;
use crate::context::Context;
use crate::failure::Failure;

fn main() -> ExitCode {
    let cli = match Cli::read() {
        Ok(Ok(cli)) => cli,
        Ok(Err(failure)) => return failure.report(wants_json()),
        Err(error) => return refuse(&error),
    };
    let context = Context::new(cli.global);
    terminal::init_tracing(context.verbosity());
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return failure::report(&anyhow::Error::from(error), context.json()),
    };
    let outcome = runtime.block_on(commands::run(cli.command, &context));
    // A thread that waits for a line from a terminal cannot be ended: do not wait for it.
    runtime.shutdown_background();
    outcome.unwrap_or_else(|error| failure::report(&error, context.json()))
}

/// What clap has to say about the command line: help that was asked for, or what is wrong.
fn refuse(error: &clap::Error) -> ExitCode {
    if error.use_stderr() && wants_json() {
        let text = error.to_string();
        let (first, rest) = text.trim().split_once('\n').unwrap_or((text.trim(), ""));
        let message = first.trim_start_matches("error: ");
        let failure = Failure::usage("usage", message);
        return match rest.trim() {
            "" => failure,
            rest => failure.hint(rest),
        }
        .report(true);
    }
    let _ = error.print();
    ExitCode::from(if error.use_stderr() { failure::EXIT_USAGE } else { 0 })
}

/// Whether the command line asks for JSON, whatever else is wrong with it.
fn wants_json() -> bool {
    std::env::args_os().any(|arg| arg == "--json")
}
