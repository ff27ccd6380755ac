//! `sqlstreams maintain …`.

mod status;

use std::sync::{Arc, Mutex, PoisonError};

use clap::{Args, Subcommand};
use serde_json::{Value, json};
use sqlstreams::StepRun;

use crate::context::Context;
use crate::output::{counted, print, print_json, printable};
use crate::signals::Signals;

const AFTER_HELP: &str = "\
Every process that consumes does the upkeep of all streams beside its work, one of them at a time.
This is for doing it without one: it runs until it is stopped, and waits while another process is
at it. When that one dies it takes over within about 10 seconds. Partitions of the logs are made
ahead, idempotency keys that are too old are removed, compacted streams are compacted. Each step is printed
when it was run; with --json as one object per line.

With --once it does what is due and ends, for whoever would rather call it by a timer: once a
minute is good.

Examples:
  sqlstreams maintain
  sqlstreams maintain --once
  sqlstreams maintain status";

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP, args_conflicts_with_subcommands = true)]
pub(crate) struct MaintainArgs {
    /// Do what is due now, and end
    #[arg(long)]
    once: bool,
    #[command(subcommand)]
    command: Option<MaintainCommand>,
}

#[derive(Debug, Subcommand)]
enum MaintainCommand {
    /// Show who does the upkeep, what came of it, and what fails
    Status(status::StatusArgs),
}

pub(crate) async fn run(args: MaintainArgs, context: &Context) -> anyhow::Result<()> {
    match args.command {
        Some(MaintainCommand::Status(args)) => status::run(args, context).await,
        None if args.once => once(context).await,
        None => forever(context).await,
    }
}

async fn once(context: &Context) -> anyhow::Result<()> {
    let maintenance = context.updated().await?.maintenance();
    let runs = Arc::new(Mutex::new(Vec::new()));
    let seen = runs.clone();
    let maintenance = maintenance.on_step(move |run| {
        seen.lock().unwrap_or_else(PoisonError::into_inner).push(run.clone());
    });
    let done = maintenance.once().await?;
    let runs = std::mem::take(&mut *runs.lock().unwrap_or_else(PoisonError::into_inner));
    if context.json() {
        let steps: Vec<Value> = runs.iter().map(to_json).collect();
        return print_json(&json!({ "held": done.held, "steps": steps }));
    }
    for run in &runs {
        print(line(run))?;
    }
    match done.held {
        true => print(format_args!("{} done", counted(done.steps as u64, "step"))),
        false => print("another process does the upkeep; `sqlstreams maintain status` says which"),
    }
}

async fn forever(context: &Context) -> anyhow::Result<()> {
    let client = context.updated().await?;
    let signals = Signals::catch()?;
    context.say("doing the upkeep of all streams; Ctrl-C to stop");
    let (json, stop) = (context.json(), signals.stop.clone());
    let failed = Arc::new(Mutex::new(None));
    let told = failed.clone();
    let maintenance = client.maintenance().stop_on(signals.stop).on_step(move |run| {
        let printed = if json { print(to_json(run)) } else { print(line(run)) };
        if let Err(error) = printed {
            *told.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            stop.cancel();
        }
    });
    maintenance.run().await?;
    match failed.lock().unwrap_or_else(PoisonError::into_inner).take() {
        Some(error) => Err(error),
        None => Ok(()),
    }
}

fn line(run: &StepRun) -> String {
    let stream = run.stream.as_deref().map(|name| format!(" of stream {name:?}"));
    let came = match &run.error {
        Some(error) => format!("failed: {}", printable(error, 200)),
        None => format!("{:.1} ms", run.took.as_secs_f64() * 1e3),
    };
    format!("{}{}: {came}", run.step, stream.unwrap_or_default())
}

fn to_json(run: &StepRun) -> Value {
    json!({
        "step": run.step,
        "stream": run.stream,
        "seconds": run.took.as_secs_f64(),
        "error": run.error,
    })
}
