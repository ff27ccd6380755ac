//! `sqlstreams bench pipeline`.

use std::process::ExitCode;
use std::time::Instant;

use anyhow::Context as _;
use clap::Args;
use serde::Serialize;
use sqlstreams::{CancellationToken, Start};
use tokio::task::JoinSet;

use super::followers::Followers;
use super::measured;
use super::place::{Place, Tables};
use super::produce::batches;
use super::report::{Chart, Report};
use super::server::Server;
use super::versus::bare::{self, Way};
use super::versus::{
    self, Family, Kind, Line, Meter, Moved, Pace, Verdict, contest, families, print_found,
};
use super::workload::{Handling, Payloads, Sending};
use crate::context::Context;
use crate::output::print;

/// What comes out has to reach of the bare loops.
const TARGET: f64 = 0.8;
/// The part of what was produced that may be left when the producers stop.
const BACKLOG: f64 = 0.1;
/// The table with the bare loop's cursor.
pub(crate) const CURSOR: &str = "cursor";
/// The most rows that the bare loop claims at once.
const WIDTH: i64 = 5_000;

const AFTER_HELP: &str = "\
Messages a second through a stream that is written to and read at once: batches of a producer and a
group whose handler does nothing, beside a loop that inserts into a log of the same kind together
with one that moves a cursor over it, in turns in the same run. Counted is what has come out when the
producers stop. Without a database it starts a private PostgreSQL. The exit code is 0 once it has
measured, whether the targets hold or not: ask for .targets_met.

Examples:
  sqlstreams bench pipeline
  sqlstreams bench pipeline --batch 1000 --bytes 100
  sqlstreams bench pipeline --json | jq '.lines[] | {name, per_second}'";

#[derive(Debug, Clone, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct PipelineArgs {
    #[command(flatten)]
    sending: Sending,
    #[command(flatten)]
    payloads: Payloads,
    #[command(flatten)]
    handling: Handling,
    #[command(flatten)]
    pace: Pace,
}

/// What was measured: the document that `--json` prints.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Facts {
    sqlstreams: &'static str,
    postgresql: Server,
    #[serde(flatten)]
    sending: Sending,
    #[serde(flatten)]
    payloads: Payloads,
    #[serde(flatten)]
    handling: Handling,
    lines: Vec<Line>,
    dead_rows: Vec<Family>,
    targets: Vec<Verdict>,
    targets_met: bool,
}

/// How much went in, and how much had come out when that ended.
#[derive(Debug)]
struct Flow {
    produced: Moved,
    handled: u64,
}

pub(crate) async fn run(args: PipelineArgs, context: &Context) -> anyhow::Result<ExitCode> {
    let work = async |place: &mut Place<String>| measure(&args, context, place).await;
    let facts = measured(context, "bench_pipeline_", &[CURSOR], work, Facts::print).await?;
    Ok(facts.err().unwrap_or(ExitCode::SUCCESS))
}

pub(crate) async fn measure(
    args: &PipelineArgs,
    context: &Context,
    place: &mut Place<String>,
) -> anyhow::Result<Facts> {
    // Partitions are made ahead by pace, which plain statements do not know of.
    let whole = place.another_stream("bare", |stream| stream.partition_size(1_000_000_000)).await?;
    let log = Tables::in_schema(context.schema(), &format!("message_log_{}", whole.id()));
    let cursor = place.tables.name(CURSOR);
    let create = format!(
        "CREATE TABLE {cursor} (position bigint) WITH (fillfactor = 50); INSERT INTO {cursor} VALUES (0)"
    );
    place.db.batch_execute(&create).await.context("could not create a table")?;
    let meter = Meter::open(&place.url, place.server.is_throw_away()).await?;
    let (mut produced, mut handled) = (0, 0);
    let names = ["bare insert and claim", "batches and group"];
    let mut turn = 0;
    let lines = contest(context, &meter, args.pace.rounds(), &names, async |which| {
        turn += 1;
        let until = Instant::now() + args.pace.turn();
        let flow = match which {
            0 => plain(args, &place.url, &log, &cursor, until).await?,
            _ => ours(args, place, &format!("turn {turn}"), until).await?,
        };
        if which == 1 {
            produced += flow.produced.messages;
            handled += flow.handled;
        }
        // A message has passed once it has come out.
        Ok(Moved { messages: flow.handled, ..flow.produced })
    });
    let lines = lines.await?;
    let dead_rows = families(&place.db, context.schema()).await?;
    let left = 1.0 - handled as f64 / produced.max(1) as f64;
    let targets = vec![
        versus::verdict("batches and group / bare loops", &lines, 1, &[0], TARGET),
        Verdict::new("part that is left", Kind::Time, left, BACKLOG),
    ];
    Ok(Facts {
        sqlstreams: env!("CARGO_PKG_VERSION"),
        postgresql: place.server.clone(),
        sending: args.sending,
        payloads: args.payloads,
        handling: args.handling,
        lines,
        dead_rows,
        targets_met: targets.iter().all(|target| target.met),
        targets,
    })
}

async fn plain(
    args: &PipelineArgs,
    url: &str,
    log: &str,
    cursor: &str,
    until: Instant,
) -> anyhow::Result<Flow> {
    let payload = args.payloads.payload();
    let stop = CancellationToken::new();
    let mut claims = JoinSet::new();
    let (to, table, at, stopped) =
        (url.to_owned(), log.to_owned(), cursor.to_owned(), stop.clone());
    claims.spawn(async move { bare::claim(&to, &table, &at, WIDTH, &stopped).await });
    let at_once = (args.sending.connections, args.sending.batch);
    let produced = bare::insert(url, log, Way::Copy, &payload, at_once, until).await?;
    stop.cancel();
    let handled = claims.join_next().await.context("a task vanished")???;
    Ok(Flow { produced, handled })
}

async fn ours(
    args: &PipelineArgs,
    place: &Place<String>,
    group: &str,
    until: Instant,
) -> anyhow::Result<Flow> {
    let group = place.stream.group(group).start(Start::Latest).create().await?;
    let followers = Followers::start(std::slice::from_ref(&group), args.handling.concurrency);
    let payload = args.payloads.payload();
    let at_once = (args.sending.connections, args.sending.batch);
    let produced = batches(&place.stream.producer(), &payload, at_once, until).await?;
    let handled = followers.handled();
    followers.stop().await?;
    group.drop_group().await?;
    Ok(Flow { produced, handled })
}

impl Report for Facts {
    fn print(&self) -> anyhow::Result<()> {
        print(format_args!(
            "{} connections with batches of {}, {} bytes each, {} handlers at once. {}\n",
            self.sending.connections,
            self.sending.batch,
            self.payloads.bytes,
            self.handling.concurrency,
            self.postgresql
        ))?;
        print_found(&self.lines, &self.dead_rows, &self.targets)
    }

    fn verdicts(&self) -> Vec<Verdict> {
        self.targets.clone()
    }

    fn charts(&self) -> Vec<Chart> {
        Chart::of_lines("pipeline", &self.lines, &[(1, 0, TARGET)])
    }
}
