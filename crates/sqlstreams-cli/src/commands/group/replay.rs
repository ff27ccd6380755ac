//! `sqlstreams group replay …`.

use clap::{Args, Subcommand};
use serde_json::{Value, json};
use sqlstreams::{Binding, ReplayStatus, Start};

use crate::commands::open_group;
use crate::context::Context;
use crate::failure::Failure;
use crate::output::{
    counted, print, print_json, print_table, printable, short_time, table, thousands, time,
};
use crate::values;

const AFTER_HELP: &str = "\
A range of the stream is handed out to the group once more, beside what is new; the group stays
where it is. Messages are tried again and become dead letters as usual. Those that are in hand, wait
for another attempt or are dead letters of the group are left out: for dead letters see
`dead redrive`. With --bind only messages that match one of these bindings come, and in any case only
those that the group's own bindings want at present.

The end is an id, which is the last, or a time, at which it ends; it is never beyond what the group
has claimed. One replay of a group follows the other. An ordered group has none: see `group seek`.

Examples:
  sqlstreams group replay orders receipts --from 1000 --upto 2000
  sqlstreams group replay orders receipts --from '3h ago' --upto '1h ago' --bind 'orders.eu.#'
  sqlstreams group replay orders receipts --from 2026-03-01T12:00:00Z --preview
  sqlstreams group replay list orders receipts
  sqlstreams group replay cancel orders receipts --all";

const LIST_HELP: &str = "\
WAITING ids are still to be handed out, LEASED ones are in hand: upper bounds of the messages. The
last hundred replays are listed, the latest first.

Examples:
  sqlstreams group replay list orders receipts
  sqlstreams group replay list orders receipts --json | jq '.[0].waiting'";

const CANCEL_HELP: &str = "\
What has not been handed out is given up; what handlers have in hand goes on, and so do retries.
Doing it twice is harmless.

Examples:
  sqlstreams group replay cancel orders receipts 7
  sqlstreams group replay cancel orders receipts --all";

/// Hand out a range of the stream to a group once more; list such replays, or cancel them
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP, args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct ReplayArgs {
    #[command(subcommand)]
    command: Option<ReplayCommand>,
    /// The stream
    #[arg(required = true)]
    stream: Option<String>,
    /// The group
    #[arg(required = true)]
    group: Option<String>,
    /// The first: beginning, an id, a time (UTC without an offset), or '2h ago'
    #[arg(long, value_name = "WHERE", value_parser = values::start, allow_hyphen_values = true, default_value = "beginning")]
    from: Start,
    /// The end: latest, an id, which is the last, a time, or '1h ago'
    #[arg(long, value_name = "WHERE", value_parser = values::start, allow_hyphen_values = true, default_value = "latest")]
    upto: Start,
    /// Only messages that match: a pattern, or JSON; may be repeated. See `group bindings`
    #[arg(long, value_name = "BINDING", value_parser = values::binding)]
    bind: Vec<Binding>,
    /// Only tell which ids it would be
    #[arg(long)]
    preview: bool,
}

#[derive(Debug, Subcommand)]
enum ReplayCommand {
    /// List the replays of a group and how far they are
    List(ListArgs),
    /// Give up what of a replay has not been handed out
    Cancel(CancelArgs),
}

#[derive(Debug, Args)]
#[command(after_help = LIST_HELP)]
struct ListArgs {
    /// The stream
    stream: String,
    /// The group
    group: String,
}

#[derive(Debug, Args)]
#[command(after_help = CANCEL_HELP)]
struct CancelArgs {
    /// The stream
    stream: String,
    /// The group
    group: String,
    /// The replay's number
    #[arg(value_parser = clap::value_parser!(i64).range(1..), required_unless_present = "all")]
    replay: Option<i64>,
    /// All of the group's
    #[arg(long, conflicts_with = "replay")]
    all: bool,
}

pub(crate) async fn run(args: ReplayArgs, context: &Context) -> anyhow::Result<()> {
    match args.command {
        Some(ReplayCommand::List(args)) => list(args, context).await,
        Some(ReplayCommand::Cancel(args)) => cancel(args, context).await,
        None => start(args, context).await,
    }
}

async fn start(args: ReplayArgs, context: &Context) -> anyhow::Result<()> {
    let (stream, name) = (args.stream.unwrap_or_default(), args.group.unwrap_or_default());
    let group = open_group(&context.reader().await?, &stream, &name).await?;
    let mut replay = group.replay();
    replay = match args.from {
        Start::Beginning => replay,
        Start::Id(id) => replay.from_id(id),
        Start::Time(at) => replay.from(at),
        _ => {
            return Err(
                Failure::usage("usage", "a replay cannot begin at the latest message").into()
            );
        }
    };
    replay = match args.upto {
        Start::Latest => replay,
        Start::Id(id) => replay.upto_id(id),
        Start::Time(at) => replay.until(at),
        _ => return Err(Failure::usage("usage", "a replay cannot end at the beginning").into()),
    };
    replay = args.bind.into_iter().fold(replay, |replay, binding| replay.bind(binding));
    let range = match args.preview {
        true => replay.preview().await?,
        false => replay.start().await?,
    };
    if context.json() {
        return print_json(&json!({
            "stream": stream,
            "group": name,
            "replay": range.and_then(|range| range.replay),
            "from": range.map(|range| range.from),
            "upto": range.map(|range| range.upto),
        }));
    }
    match range {
        None => print(format_args!(
            "group {name:?} of stream {stream:?} has claimed nothing of that range"
        )),
        Some(range) => {
            let ids = format!("ids {} to {}", thousands(range.from), thousands(range.upto));
            match range.replay {
                Some(replay) => print(format_args!(
                    "replay {replay}: {ids} once more for group {name:?} of stream {stream:?}"
                )),
                None => print(format_args!(
                    "would be {ids} once more for group {name:?} of stream {stream:?}"
                )),
            }
        }
    }
}

fn to_json(replay: &ReplayStatus) -> Value {
    json!({
        "replay": replay.replay,
        "from": replay.from,
        "upto": replay.upto,
        "waiting": replay.waiting,
        "leased": replay.leased,
        "bindings": Value::from_iter(replay.bindings.iter().map(super::bindings::to_json)),
        "created_at": time(replay.created_at),
        "created_by": replay.created_by,
        "cancelled": replay.cancelled,
    })
}

async fn list(args: ListArgs, context: &Context) -> anyhow::Result<()> {
    let group = open_group(&context.reader().await?, &args.stream, &args.group).await?;
    let replays = group.replays().await?;
    if context.json() {
        return print_json(&Value::from_iter(replays.iter().map(to_json)));
    }
    if replays.is_empty() {
        return print("no replays; `sqlstreams group replay` begins one");
    }
    let mut rows = table(&[
        "#REPLAY", "#FROM", "#UPTO", "#WAITING", "#LEASED", "STATE", "BEGUN", "BY", "ONLY",
    ]);
    for replay in &replays {
        let numbers = [replay.replay, replay.from, replay.upto, replay.waiting, replay.leased];
        let state = match (replay.cancelled, replay.waiting + replay.leased) {
            (true, _) => "cancelled",
            (false, 0) => "over",
            (false, _) => "running",
        };
        let only: Vec<String> = replay.bindings.iter().map(ToString::to_string).collect();
        let texts = [
            state.to_owned(),
            short_time(replay.created_at),
            printable(&replay.created_by, 30),
            printable(&only.join("  "), 60),
        ];
        rows.add_row(numbers.map(thousands).into_iter().chain(texts));
    }
    print_table(&rows)
}

async fn cancel(args: CancelArgs, context: &Context) -> anyhow::Result<()> {
    let group = open_group(&context.reader().await?, &args.stream, &args.group).await?;
    let ids = group.cancel_replay(args.replay).await?;
    match context.json() {
        true => print_json(&json!({"stream": args.stream, "group": args.group, "given_up": ids})),
        false => print(format_args!(
            "gave up {} of group {:?} of stream {:?}",
            counted(ids.unsigned_abs(), "id"),
            args.group,
            args.stream
        )),
    }
}
