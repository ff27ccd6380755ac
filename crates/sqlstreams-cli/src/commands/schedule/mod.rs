//! `sqlstreams schedule …`.

mod alter;
mod create;
mod definition;
mod drop;
mod history;
mod list;
mod next;
mod pause;
mod run;
mod show;

use clap::Subcommand;
use serde_json::{Value, json};
use sqlstreams::{Client, Schedule, ScheduleInfo};

use crate::context::Context;
use crate::output::{short_time, time};

#[derive(Debug, Subcommand)]
pub(crate) enum ScheduleCommand {
    /// Create a schedule: a message that is produced at certain times
    Create(create::CreateArgs),
    /// List the schedules
    List(list::ListArgs),
    /// Show a schedule and where it stands
    Show(show::ShowArgs),
    /// Change a schedule
    Alter(alter::AlterArgs),
    /// Preview the next times of a schedule, or of a cron expression
    Next(next::NextArgs),
    /// Produce its message now
    Run(run::RunArgs),
    /// Produce nothing until it is resumed
    Pause(pause::PauseArgs),
    /// Go on with the times from now on
    Resume(pause::PauseArgs),
    /// List what it did
    History(history::HistoryArgs),
    /// Drop a schedule with its history
    Drop(drop::DropArgs),
}

pub(crate) async fn run(command: ScheduleCommand, context: &Context) -> anyhow::Result<()> {
    match command {
        ScheduleCommand::Create(args) => create::run(args, context).await,
        ScheduleCommand::List(args) => list::run(args, context).await,
        ScheduleCommand::Show(args) => show::run(args, context).await,
        ScheduleCommand::Alter(args) => alter::run(args, context).await,
        ScheduleCommand::Next(args) => next::run(args, context).await,
        ScheduleCommand::Run(args) => run::run(args, context).await,
        ScheduleCommand::Pause(args) => pause::pause(args, context).await,
        ScheduleCommand::Resume(args) => pause::resume(args, context).await,
        ScheduleCommand::History(args) => history::run(args, context).await,
        ScheduleCommand::Drop(args) => drop::run(args, context).await,
    }
}

async fn open(client: &Client, name: &str) -> sqlstreams::Result<Schedule> {
    client.schedule(name).open().await
}

fn to_json(info: &ScheduleInfo) -> Value {
    json!({
        "id": info.id,
        "name": info.name,
        "stream": info.stream,
        "state": info.state.as_str(),
        "cron": info.cron,
        "at": info.at.map(time),
        "zone": info.zone,
        "missed": info.missed.as_str(),
        "grace_seconds": info.grace.as_secs_f64(),
        "catch_up": info.catch_up,
        "key": info.key,
        "routing_key": info.routing_key,
        "headers": info.headers,
        "expires_in_seconds": info.expires_in.map(|time| time.as_secs_f64()),
        "payload": info.payload,
        "created_at": time(info.created_at),
        "next_fire": info.next_fire.map(time),
        "last_fire": info.last_fire.map(time),
        "last_message": info.last_message,
        "last_at": info.last_at.map(time),
        "produced": info.produced,
        "not_produced": info.not_produced,
        "failures": info.failures,
        "retry_at": info.retry_at.map(time),
        "last_error": info.last_error,
        "failed_at": info.failed_at.map(time),
    })
}

/// When it has its times.
fn times(info: &ScheduleInfo) -> String {
    match (&info.cron, info.at) {
        (Some(cron), _) => cron.clone(),
        (None, Some(at)) => format!("at {}", short_time(at)),
        (None, None) => String::new(),
    }
}

fn or_dash(at: Option<std::time::SystemTime>) -> String {
    at.map_or_else(|| "-".to_owned(), short_time)
}
