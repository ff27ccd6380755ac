//! `sqlstreams group …`.

mod drop;
mod list;
mod show;

use clap::Subcommand;
use comfy_table::Table;
use serde_json::{Value, json};
use sqlstreams::GroupStatus;

use crate::context::Context;
use crate::output::{printable, table, thousands};

/// What the columns mean, for the help of those that show them.
macro_rules! columns {
    () => {
        "\
Columns: ids up to CLAIMED were handed out, up to RESOLVED are done or have become exceptions;
LAG is how many ids there are beyond CLAIMED, an upper bound of the messages that wait; READY
failed and wait for their next attempt, INFLIGHT are being tried again, DEAD are dead letters.
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
    /// Drop a group with its position and its dead letters
    Drop(drop::DropArgs),
}

pub(crate) async fn run(command: GroupCommand, context: &Context) -> anyhow::Result<()> {
    match command {
        GroupCommand::List(args) => list::run(args, context).await,
        GroupCommand::Show(args) => show::run(args, context).await,
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
        "dead": group.dead,
    })
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
        "#DEAD",
    ]);
    for group in groups {
        let numbers = [
            group.claimed,
            group.resolved,
            group.lag,
            group.open_leases,
            group.ready,
            group.inflight,
            group.dead,
        ];
        rows.add_row([printable(&group.group, 60)].into_iter().chain(numbers.map(thousands)));
    }
    rows
}
