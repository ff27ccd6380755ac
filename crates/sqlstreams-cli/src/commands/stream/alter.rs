//! `sqlstreams stream alter`.

use std::time::Duration;

use clap::{ArgAction, ArgGroup, Args};

use super::retention::{self, RetentionArgs};
use crate::commands::open_stream;
use crate::context::Context;
use crate::output::{print, print_json, span};
use crate::values;

const AFTER_HELP: &str = "\
With --notify on, every insert wakes the stream's consumers when its transaction commits: for
producers that are plain SQL. Otherwise they find such messages within a second. Commits that
notify follow one another in PostgreSQL, which limits how many there can be per second. What
`produce` and the library send wakes consumers in any case.
Waits up to 3 s for transactions that write to the stream.

--idempotency-window says how long the stream remembers the idempotency keys of its messages: 5m to
365d. Keys that were forgotten under a shorter window stay so.

--expire-groups-after says after how long groups are dropped that nobody consumes, 1h to 3650d, or
never, as it is at first. `group show` warns at three quarters of that. It is counted from now on.

Retention: messages go when they lie beyond one of the limits, a partition of the log at a time, by
the upkeep that consumers and `maintain` do, or `stream retain`. So at least what a limit names is kept, and up to a
partition more: with --retain-for 7d everything of the last 7 days. What a group has not resolved is kept all the same, and `stream show`
names that group; with --drop-unread on it goes, and the group goes on behind the gap. Failed messages, dead letters too, can
be redriven when their partition is gone; --retain-dead-for says how long dead letters are kept.

Examples:
  sqlstreams stream alter orders --notify on
  sqlstreams stream alter orders --expire-groups-after 30d
  sqlstreams stream alter orders --idempotency-window 7d
  sqlstreams stream alter orders --retain-for 30d --retain-bytes 100GB --retain-dead-for 90d
  sqlstreams stream alter orders --retain-bytes none";

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
#[command(group = ArgGroup::new("setting").required(true).multiple(true))]
pub(crate) struct AlterArgs {
    /// The stream
    name: String,
    /// Whether every insert wakes consumers from inside its transaction: on or off
    #[arg(long, value_name = "ON|OFF", group = "setting", value_parser = values::on_or_off,
          action = ArgAction::Set)]
    notify: Option<bool>,
    /// How long to remember idempotency keys
    #[arg(long, value_name = "DURATION", group = "setting", value_parser = values::duration)]
    idempotency_window: Option<Duration>,
    /// Drop groups that nobody has consumed for so long; `never` keeps them
    #[arg(long, value_name = "DURATION|never", group = "setting", value_parser = duration_or_never)]
    expire_groups_after: Option<Expiry>,
    #[command(flatten)]
    retention: RetentionArgs,
}

/// How long a group lives without a consumer; `None`: for ever.
#[derive(Debug, Clone, Copy)]
struct Expiry(Option<Duration>);

fn duration_or_never(text: &str) -> Result<Expiry, String> {
    match text {
        "never" => Ok(Expiry(None)),
        text => values::duration(text).map(|after| Expiry(Some(after))),
    }
}

pub(crate) async fn run(args: AlterArgs, context: &Context) -> anyhow::Result<()> {
    let stream = open_stream(&context.reader().await?, &args.name).await?;
    // The one that may be out of range first.
    if let Some(window) = args.idempotency_window {
        stream.set_idempotency_window(window).await?;
    }
    if args.retention.is_given()
        && let Some(retention) = args.retention.change(&stream.info().await?.retention)
    {
        stream.set_retention(&retention).await?;
    }
    if let Some(Expiry(after)) = args.expire_groups_after {
        stream.set_group_expiry(after).await?;
    }
    if let Some(notify) = args.notify {
        stream.set_notify(notify).await?;
    }
    if context.json() {
        return print_json(&super::to_json(&stream.info().await?));
    }
    if let Some(window) = args.idempotency_window {
        let window = span(window);
        print(format_args!("stream {:?} remembers idempotency keys for {window}", stream.name()))?;
    }
    if let Some(Expiry(after)) = args.expire_groups_after {
        let name = stream.name();
        match after.map(span) {
            Some(after) => print(format_args!(
                "groups of stream {name:?} are dropped when nobody has consumed them for {after}"
            ))?,
            None => print(format_args!("groups of stream {name:?} do not expire"))?,
        }
    }
    if let Some(notify) = args.notify {
        let does = if notify { "wake" } else { "do not wake" };
        print(format_args!("inserts into stream {:?} {does} consumers", stream.name()))?;
    }
    if args.retention.is_given() {
        let info = stream.info().await?;
        let kept = retention::describe(&info.retention);
        print(format_args!("stream {:?} keeps messages: {kept}", stream.name()))?;
        if let Some(advice) = retention::advice(&info) {
            context.say(&advice);
        }
    }
    Ok(())
}
