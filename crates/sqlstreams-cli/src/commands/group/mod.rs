//! `sqlstreams group …`.

mod alter;
mod bindings;
mod create;
mod drop;
mod list;
mod pause;
mod replay;
mod seek;
mod settings;
mod show;

use clap::Subcommand;
use comfy_table::Table;
use serde_json::{Value, json};
use sqlstreams::GroupStatus;

use crate::context::Context;
use crate::output::{printable, short_time, table, thousands, time};

/// What the columns mean, for the help of those that show them.
macro_rules! columns {
    () => {
        "\
Columns: ids up to CLAIMED were handed out, up to RESOLVED are done or have become exceptions;
LAG is how many ids there are beyond CLAIMED, an upper bound of the messages that wait; READY
failed and wait for their next attempt, INFLIGHT are being tried again, DEFERRED wait for an earlier
message of their key (in ordered groups), DEAD are dead letters, each an estimate with ~ before it
where there are more than 100,000;
LIMITS are a pause and the settings max_in_flight and rate_limit.
"
    };
}
pub(crate) use columns;

#[derive(Debug, Subcommand)]
pub(crate) enum GroupCommand {
    /// List the groups of a stream
    List(list::ListArgs),
    /// Show where a group stands
    Show(show::ShowArgs),
    /// Create a group before anybody consumes it
    Create(create::CreateArgs),
    /// Change settings of a group
    Alter(alter::AlterArgs),
    /// List the bindings of a group, or change, explain or test them
    Bindings(bindings::BindingsArgs),
    /// Stop handing out messages to the group's consumers
    Pause(pause::PauseArgs),
    /// Hand out messages again
    Resume(pause::PauseArgs),
    /// Move a group to another place of its stream, forward or back
    Seek(seek::SeekArgs),
    Replay(replay::ReplayArgs),
    /// Drop a group with its position and its dead letters
    Drop(drop::DropArgs),
}

pub(crate) async fn run(command: GroupCommand, context: &Context) -> anyhow::Result<()> {
    match command {
        GroupCommand::List(args) => list::run(args, context).await,
        GroupCommand::Show(args) => show::run(args, context).await,
        GroupCommand::Create(args) => create::run(args, context).await,
        GroupCommand::Alter(args) => alter::run(args, context).await,
        GroupCommand::Bindings(args) => bindings::run(args, context).await,
        GroupCommand::Pause(args) => pause::pause(args, context).await,
        GroupCommand::Resume(args) => pause::resume(args, context).await,
        GroupCommand::Seek(args) => seek::run(args, context).await,
        GroupCommand::Replay(args) => replay::run(args, context).await,
        GroupCommand::Drop(args) => drop::run(args, context).await,
    }
}

pub(crate) fn to_json(group: &GroupStatus) -> Value {
    json!({
        "stream": group.stream,
        "group": group.group,
        "claimed": group.claimed,
        "resolved": group.resolved,
        "head": group.head,
        "lag": group.lag,
        "open_leases": group.open_leases,
        "ready": group.ready,
        "inflight": group.inflight,
        "deferred": group.deferred,
        "dead": group.dead,
        "estimated": group.estimated,
        "expired": group.expired,
        "superseded": group.superseded,
        "dropped": group.dropped,
        "replaying": group.replaying,
        "paused": group.paused,
        "expires_at": group.expires_at.map(time),
        "max_in_flight": group.max_in_flight,
        "rate_limit": group.rate_limit,
        "mode": group.mode.as_str(),
        "newest_only": group.newest_only,
        "lease_seconds": group.lease.as_secs_f64(),
        "max_attempts": group.retry.max_attempts,
        "backoff_base_seconds": group.retry.backoff_base.as_secs_f64(),
        "backoff_factor": group.retry.backoff_factor,
        "backoff_cap_seconds": group.retry.backoff_cap.as_secs_f64(),
    })
}

/// What holds the group back, in a few words.
fn limits(group: &GroupStatus) -> String {
    let paused = group.paused.then(|| "paused".to_owned());
    let expires = group.expires_at.map(|at| format!("expires {}", short_time(at)));
    let in_flight = group.max_in_flight.map(|most| format!("{} in flight", thousands(most)));
    let rate = group.rate_limit.map(|rate| format!("{rate}/s"));
    [paused, in_flight, rate, expires].into_iter().flatten().collect::<Vec<_>>().join(", ")
}

/// A number of exceptions; those beyond 100,000 are estimates.
pub(crate) fn about(group: &GroupStatus, number: i64) -> String {
    let mark = if group.estimated && number > 100_000 { "~" } else { "" };
    format!("{mark}{}", thousands(number))
}

pub(crate) fn to_table(groups: &[GroupStatus]) -> Table {
    let mut rows = table(&[
        "GROUP",
        "#CLAIMED",
        "#RESOLVED",
        "#LAG",
        "#LEASES",
        "#READY",
        "#INFLIGHT",
        "#DEFERRED",
        "#DEAD",
        "LIMITS",
    ]);
    for group in groups {
        let numbers = [group.claimed, group.resolved, group.lag, group.open_leases];
        let exceptions = [group.ready, group.inflight, group.deferred, group.dead];
        let name = [printable(&group.group, 60)].into_iter();
        let exceptions = exceptions.map(|number| about(group, number));
        rows.add_row(name.chain(numbers.map(thousands)).chain(exceptions).chain([limits(group)]));
    }
    rows
}
