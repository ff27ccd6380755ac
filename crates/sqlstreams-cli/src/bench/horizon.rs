//! `sqlstreams bench horizon`.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::Args;
use serde::Serialize;
use sqlstreams::{Dsn, Start};
use tokio::task::JoinSet;

use super::followers::Followers;
use super::measured;
use super::place::Place;
use super::produce::batches;
use super::report::{Bar, Chart, Report};
use super::server::Server;
use super::versus::{Family, Kind, Line, Meter, Verdict, families, print_found};
use super::workload::{Handling, Payloads, Sending};
use crate::context::Context;
use crate::output::{print, span};
use crate::values;

/// What has to be left of the rate.
const TARGET: f64 = 0.95;
/// The parts of a half whose rates are told.
const PARTS: u32 = 8;
/// What is not counted, before the first half.
const WARM_UP: Duration = Duration::from_secs(2);

const AFTER_HELP: &str = "\
What it costs that another session holds an old snapshot, so that vacuum can take away nothing that
came to be dead since: messages a second through a stream that is written to and read at once, as in
`bench pipeline`, for one half without and for another with a REPEATABLE READ transaction that sits
there all the time. The lowest and the highest are of eighths of a half. At the end it counts the
dead rows of the tables. With the defaults it writes about 10 GB. Without a database it starts a
private PostgreSQL. The exit code is 0 once it has measured, whether the target holds or not: ask for
.targets_met.

Examples:
  sqlstreams bench horizon
  sqlstreams bench horizon --for 10m --bytes 100
  sqlstreams bench horizon --json | jq '.targets[0].measured, .dead_rows'";

#[derive(Debug, Clone, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct HorizonArgs {
    /// How long each half is [default: 1m; with --quick 8s]
    #[arg(long = "for", value_name = "DURATION", value_parser = values::duration)]
    time: Option<Duration>,
    #[command(flatten)]
    sending: Sending,
    #[command(flatten)]
    payloads: Payloads,
    #[command(flatten)]
    handling: Handling,
    /// Measure briefly
    #[arg(long)]
    quick: bool,
}

/// What was measured: the document that `--json` prints.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Facts {
    sqlstreams: &'static str,
    postgresql: Server,
    seconds: f64,
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

pub(crate) async fn run(args: HorizonArgs, context: &Context) -> anyhow::Result<ExitCode> {
    let work = async |place: &mut Place<String>| measure(&args, context, place).await;
    let facts = measured(context, "bench_horizon_", &[], work, Facts::print).await?;
    Ok(facts.err().unwrap_or(ExitCode::SUCCESS))
}

pub(crate) async fn measure(
    args: &HorizonArgs,
    context: &Context,
    place: &mut Place<String>,
) -> anyhow::Result<Facts> {
    let time = args.time.unwrap_or(Duration::from_secs(if args.quick { 8 } else { 60 }));
    let meter = Meter::open(&place.url, place.server.is_throw_away()).await?;
    context.say("warming up");
    half(args, place, &meter, "warming up", WARM_UP.min(time)).await?;
    context.say("measuring without");
    let without = half(args, place, &meter, "without", time).await?;
    context.say("measuring under a held snapshot");
    let holder = Dsn::parse(&place.url)?.connect().await?;
    let hold = "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM pg_class";
    holder.batch_execute(hold).await.context("could not hold a snapshot")?;
    let under = half(args, place, &meter, "held snapshot", time).await?;
    let dead_rows = families(&place.db, context.schema()).await?;
    holder.batch_execute("COMMIT").await.context("the snapshot was not held")?;

    // Of the whole halves: what becomes slower bit by bit is not to be hidden by what is in the middle.
    let rate = |line: &Line| line.cost.messages as f64 / line.cost.seconds;
    let ratio = rate(&under) / rate(&without);
    let targets = vec![Verdict::new("under a held snapshot / without", Kind::Ratio, ratio, TARGET)];
    Ok(Facts {
        sqlstreams: env!("CARGO_PKG_VERSION"),
        postgresql: place.server.clone(),
        seconds: time.as_secs_f64(),
        sending: args.sending,
        payloads: args.payloads,
        handling: args.handling,
        lines: vec![without, under],
        dead_rows,
        targets_met: targets.iter().all(|target| target.met),
        targets,
    })
}

/// Lets messages pass through a new group for so long. Counted is what comes out.
async fn half(
    args: &HorizonArgs,
    place: &Place<String>,
    meter: &Meter,
    name: &str,
    time: Duration,
) -> anyhow::Result<Line> {
    meter.settle().await?;
    let group = place.stream.group(name).start(Start::Latest).create().await?;
    let followers = Followers::start(std::slice::from_ref(&group), args.handling.concurrency);
    let (producer, payload) = (place.stream.producer(), args.payloads.payload());
    let at_once = (args.sending.connections, args.sending.batch);
    let begun = meter.begin().await?;
    let until = Instant::now() + time;
    let mut producers = JoinSet::new();
    producers.spawn(async move { batches(&producer, &payload, at_once, until).await });
    let (mut rates, mut before, part) = (Vec::new(), 0, time / PARTS);
    for left in (0..PARTS).rev() {
        let from = Instant::now();
        tokio::time::sleep_until((until - part * left).into()).await;
        let handled = followers.handled();
        rates.push((handled - before) as f64 / from.elapsed().as_secs_f64());
        before = handled;
    }
    let produced = producers.join_next().await.context("a task vanished")???;
    let cost = meter.end(begun, followers.handled()).await?;
    followers.stop().await?;
    group.drop_group().await?;
    Ok(Line::new(name, rates, cost, produced.commits.as_ref()))
}

impl Report for Facts {
    fn print(&self) -> anyhow::Result<()> {
        print(format_args!(
            "Halves of {}: {} connections with batches of {}, {} bytes each, {} handlers at once. {}\n",
            span(Duration::from_secs_f64(self.seconds)),
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
        let rates = Chart::rates("horizon: rates", &self.lines, &[(1, 0, TARGET)]);
        let dead = self.dead_rows.iter();
        let dead = dead.map(|family| Bar::of(&family.tables, family.dead_rows as f64)).collect();
        vec![rates, Chart::plain("horizon: dead rows at the end", "rows", dead)]
    }
}
