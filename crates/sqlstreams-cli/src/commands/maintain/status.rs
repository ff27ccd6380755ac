//! `sqlstreams maintain status`.

use clap::Args;
use serde_json::{Value, json};
use sqlstreams::{MaintenanceStatus, StepFailure, StepStatus};

use crate::commands::stream::retention;
use crate::context::Context;
use crate::output::{
    counted, print, print_json, print_table, printable, short_time, table, thousands, time,
};

const AFTER_HELP: &str = "\
Columns: STREAMS is for how many streams the step has had something to do, RUNS how often it was
run, FAILED how often in vain, FAILING for how many streams it fails at present; MEAN and LONGEST are how
long it took the last time, over the streams. What fails is tried again by itself, after 1 second at
first and 5 minutes at last, and keeps nothing else from being done. Below that are the streams whose
old messages cannot go, and why (`stream show` says so of one).

Examples:
  sqlstreams maintain status
  sqlstreams maintain status --json | jq '.failures[] | {step, stream, error}'";

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct StatusArgs {}

pub(crate) async fn run(_args: StatusArgs, context: &Context) -> anyhow::Result<()> {
    let status = context.reader().await?.maintenance().status().await?;
    if context.json() {
        return print_json(&to_json(&status));
    }
    match (&status.holder, status.since) {
        (Some(holder), Some(since)) => {
            print(format_args!("done by {}, since {}", printable(holder, 100), short_time(since)))?;
        }
        _ => print("nobody does it: run a consumer, or `sqlstreams maintain`")?,
    }
    if !status.steps.is_empty() {
        let columns =
            ["STEP", "#STREAMS", "#RUNS", "#FAILED", "#FAILING", "#MEAN", "#LONGEST", "LAST"];
        let mut rows = table(&columns);
        for step in &status.steps {
            rows.add_row([
                step.step.clone(),
                thousands(step.streams),
                thousands(step.runs),
                thousands(step.failures),
                thousands(step.failing),
                milliseconds(step.took.as_secs_f64()),
                milliseconds(step.took_longest.as_secs_f64()),
                short_time(step.last),
            ]);
        }
        print("")?;
        print_table(&rows)?;
    }
    for failure in &status.failures {
        let stream = failure.stream.as_deref().map(|name| format!(" of stream {name:?}"));
        print(format_args!(
            "\n{}{} failed {}, last {}: {}",
            failure.step,
            stream.unwrap_or_default(),
            counted(u64::from(failure.times), "time"),
            short_time(failure.at),
            printable(&failure.error, 500)
        ))?;
    }
    for held in &status.holds {
        let why = retention::held(&held.hold);
        print(format_args!("\nretention of stream {:?} is held up {why}", held.stream))?;
    }
    Ok(())
}

fn milliseconds(seconds: f64) -> String {
    format!("{:.1} ms", seconds * 1e3)
}

fn to_json(status: &MaintenanceStatus) -> Value {
    json!({
        "holder": status.holder,
        "since": status.since.map(time),
        "remaining_seconds": status.remaining.map(|left| left.as_secs_f64()),
        "steps": status.steps.iter().map(step_json).collect::<Vec<_>>(),
        "failures": status.failures.iter().map(failure_json).collect::<Vec<_>>(),
        "holds": status.holds.iter().map(|held| {
            let mut json = retention::hold_json(&held.hold);
            json["stream"] = held.stream.clone().into();
            json
        }).collect::<Vec<_>>(),
    })
}

fn step_json(step: &StepStatus) -> Value {
    json!({
        "step": step.step,
        "streams": step.streams,
        "runs": step.runs,
        "failures": step.failures,
        "failing": step.failing,
        "mean_seconds": step.took.as_secs_f64(),
        "longest_seconds": step.took_longest.as_secs_f64(),
        "last": time(step.last),
    })
}

fn failure_json(failure: &StepFailure) -> Value {
    json!({
        "step": failure.step,
        "stream": failure.stream,
        "times": failure.times,
        "error": failure.error,
        "at": time(failure.at),
        "next": failure.next.map(time),
    })
}
