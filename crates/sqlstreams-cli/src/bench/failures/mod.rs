//! `sqlstreams bench failures`.

mod fresh;
mod ledger;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use clap::Args;
use serde::Serialize;
use sqlstreams::{CancellationToken, Delivery, Group, Outgoing, RetryPolicy};
use tokio::task::JoinSet;

use self::fresh::Fresh;
use self::ledger::{Job, Ledger};
use super::measured;
use super::place::Place;
use super::report::{Bar, Chart, Report};
use super::server::Server;
use super::spread::Percentiles;
use super::versus::{
    Family, Kind, Line, Meter, Verdict, families, print_contest, print_families, print_verdict,
};
use crate::bench::workload::{Handling, Payloads};
use crate::context::Context;
use crate::output::{print, print_table, table, thousands};
use crate::values;

/// How many dead letters a second are to be recorded.
const RECORDED: f64 = 20_000.0;
/// How many a second are to be redriven and done.
const DRAINED: f64 = 10_000.0;
/// Messages per transaction when the log is filled.
const BATCH: u64 = 5_000;
/// How often it looks whether something has come to its end.
const LOOK: Duration = Duration::from_millis(5);
/// When nothing has happened for so long, what is missing does not come any more.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long fresh messages can come at their rate: longer than anybody waits.
const LONGEST: Duration = Duration::from_secs(3_600);

const AFTER_HELP: &str = "\
A mass failure and its end. All messages of a log fail, each at its only attempt: how many dead
letters are recorded a second. Then they are redriven, page by page, and done: how many a second,
from the first page until nothing is left. All the while fresh messages come that do not fail. In the
first part they wait behind those that fail, as they come later in the log; in the second they are
handled beside those that are tried again. At the end everything is counted. Without a database it
starts a private PostgreSQL. The exit code is 1 if a message was lost, and 0 else, whether the targets
hold or not: ask for .targets_met.

Examples:
  sqlstreams bench failures
  sqlstreams bench failures --messages 1000000 --fresh 5000
  sqlstreams bench failures --json | jq '.lines[] | {name, per_second}'";

#[derive(Debug, Clone, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct FailuresArgs {
    /// Messages that fail at first [default: 100000; with --quick 20000]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    messages: Option<u32>,
    /// Fresh messages a second
    #[arg(long, value_name = "N", default_value_t = 1_000,
          value_parser = clap::value_parser!(u32).range(1..=20_000))]
    fresh: u32,
    /// Messages that are redriven at once
    #[arg(long, value_name = "N", default_value = "5000", value_parser = values::at_least_one)]
    page: usize,
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
    messages: u64,
    #[serde(flatten)]
    payloads: Payloads,
    #[serde(flatten)]
    handling: Handling,
    page: usize,
    lines: Vec<Line>,
    fresh_per_second: u32,
    fresh_sent: u64,
    fresh_handled: u64,
    /// From the call that sent a fresh message to its handler.
    fresh_beside_failures_ms: Percentiles,
    fresh_beside_redriven_ms: Percentiles,
    /// Messages that were never done, failing and fresh ones.
    lost: u64,
    /// How often a message was done that had been before.
    repeated: u64,
    dead_rows: Vec<Family>,
    targets: Vec<Verdict>,
    targets_met: bool,
}

pub(crate) async fn run(args: FailuresArgs, context: &Context) -> anyhow::Result<ExitCode> {
    let work = async |place: &mut Place<Job>| measure(&args, context, place).await;
    Ok(match measured(context, PREFIX, &[], work, Facts::print).await? {
        Err(interrupted) => interrupted,
        Ok(facts) if facts.lost > 0 => ExitCode::FAILURE,
        Ok(_) => ExitCode::SUCCESS,
    })
}

pub(crate) const PREFIX: &str = "bench_failures_";

pub(crate) async fn measure(
    args: &FailuresArgs,
    context: &Context,
    place: &mut Place<Job>,
) -> anyhow::Result<Facts> {
    let messages = args.messages.unwrap_or(if args.quick { 20_000 } else { 100_000 });
    let most_fresh = u64::from(args.fresh) * LONGEST.as_secs();
    let ledger = Arc::new(Ledger::new(messages as usize, usize::try_from(most_fresh)?)?);
    let messages = u64::from(messages);
    context.say(&format!("producing {} messages", thousands(messages)));
    let pad = args.payloads.payload();
    fill(place, messages, &pad).await?;
    let group = place.stream.group("bench").retry(RetryPolicy::attempts(1)).create().await?;
    let meter = Meter::open(&place.url, place.server.is_throw_away()).await?;
    meter.settle().await?;

    context.say("letting all of them fail");
    let fresh = Fresh::start(place.stream.producer(), ledger.clone(), args.fresh, most_fresh, pad);
    let begun = meter.begin().await?;
    let mut consumer = Consumer::start(&group, args.handling.concurrency, ledger.clone());
    consumer.until("failed", messages, || ledger.failed()).await?;
    consumer.until_group("recorded", messages, async || dead(&group).await).await?;
    let recorded = meter.end(begun, messages).await?;

    context.say("redriving them");
    ledger.mend();
    let begun = meter.begin().await?;
    let redriven = redrive(&group, i64::try_from(args.page)?).await?;
    ensure!(redriven == messages, "{redriven} dead letters were redriven of {messages}");
    consumer.until("done", messages, || ledger.done.once()).await?;
    consumer.until_group("settled", 0, async || waiting(&group).await).await?;
    let drained = meter.end(begun, messages).await?;

    let fresh_sent = fresh.stop().await?;
    // What does not come is counted as lost.
    let _ = consumer.until("handled", fresh_sent, || ledger.fresh.once()).await;
    consumer.stop().await?;
    let lost = (messages - ledger.done.once().min(messages))
        + (fresh_sent - ledger.fresh.once().min(fresh_sent));
    let rate = |cost: f64| vec![messages as f64 / cost];
    let lines = vec![
        Line::new("recorded as dead", rate(recorded.seconds), recorded, None),
        Line::new("redriven and done", rate(drained.seconds), drained, None),
    ];
    let targets = vec![
        Verdict::new("dead letters recorded/s", Kind::Rate, lines[0].per_second, RECORDED),
        Verdict::new("redriven and done/s", Kind::Rate, lines[1].per_second, DRAINED),
        Verdict::new("messages lost to failures", Kind::Count, lost as f64, 0.0),
    ];
    let [beside_failures, beside_redriven] = ledger.times().map(|times| times.percentiles());
    Ok(Facts {
        sqlstreams: env!("CARGO_PKG_VERSION"),
        postgresql: place.server.clone(),
        messages,
        payloads: args.payloads,
        handling: args.handling,
        page: args.page,
        lines,
        fresh_per_second: args.fresh,
        fresh_sent,
        fresh_handled: ledger.fresh.once(),
        fresh_beside_failures_ms: beside_failures,
        fresh_beside_redriven_ms: beside_redriven,
        lost,
        repeated: ledger.repeated(),
        dead_rows: families(&place.db, context.schema()).await?,
        targets_met: targets.iter().all(|target| target.met),
        targets,
    })
}

async fn fill(place: &Place<Job>, messages: u64, pad: &str) -> anyhow::Result<()> {
    let producer = place.stream.producer();
    for first in (0..messages).step_by(usize::try_from(BATCH)?) {
        let numbers = first..messages.min(first + BATCH);
        let jobs: Vec<Job> =
            numbers.map(|n| Job { fresh: false, n, sent: 0, pad: pad.to_owned() }).collect();
        producer.send_all(jobs.iter().map(Outgoing::new)).await?;
    }
    Ok(())
}

/// Redrives all dead letters, page by page. Returns how many.
async fn redrive(group: &Group<Job>, page: i64) -> anyhow::Result<u64> {
    let mut redriven = 0;
    loop {
        match group.redrive(None, page).await?.len() {
            0 => return Ok(redriven),
            more => redriven += more as u64,
        }
    }
}

async fn dead(group: &Group<Job>) -> anyhow::Result<u64> {
    Ok(group.status().await?.dead.unsigned_abs())
}

/// Exceptions of any kind that are left.
async fn waiting(group: &Group<Job>) -> anyhow::Result<u64> {
    let status = group.status().await?;
    Ok((status.ready + status.inflight + status.dead).unsigned_abs())
}

/// Ends with this value.
struct Consumer {
    stop: CancellationToken,
    running: JoinSet<sqlstreams::Result<sqlstreams::Consumed>>,
}

impl Consumer {
    fn start(group: &Group<Job>, concurrency: u16, ledger: Arc<Ledger>) -> Self {
        let (stop, mut running) = (CancellationToken::new(), JoinSet::new());
        let consumer = group.consumer().concurrency(concurrency.into()).stop_on(stop.clone());
        running.spawn(
            consumer.run(move |job: Delivery<Job>| std::future::ready(ledger.handle(&job.payload))),
        );
        Self { stop, running }
    }

    /// Waits until it has counted so many.
    async fn until(
        &mut self,
        doing: &str,
        count: u64,
        counted: impl Fn() -> u64,
    ) -> anyhow::Result<()> {
        let (mut before, mut since) = (counted(), Instant::now());
        while before < count {
            self.look().await?;
            let now = counted();
            if now > before {
                (before, since) = (now, Instant::now());
            }
            ensure!(since.elapsed() < PATIENCE, "only {now} messages were {doing} of {count}");
        }
        Ok(())
    }

    /// Waits until the group has exactly so many, as the server sees it.
    async fn until_group(
        &mut self,
        doing: &str,
        count: u64,
        counted: impl AsyncFn() -> anyhow::Result<u64>,
    ) -> anyhow::Result<()> {
        let since = Instant::now();
        loop {
            let now = counted().await?;
            if now == count {
                return Ok(());
            }
            ensure!(since.elapsed() < PATIENCE, "{now} instead of {count} messages were {doing}");
            self.look().await?;
        }
    }

    async fn look(&mut self) -> anyhow::Result<()> {
        match tokio::time::timeout(LOOK, self.running.join_next()).await {
            Err(_) => Ok(()),
            Ok(ended) => {
                ended.context("the consumer vanished")?.context("the consumer ended early")??;
                anyhow::bail!("the consumer ended early");
            }
        }
    }

    async fn stop(mut self) -> anyhow::Result<()> {
        self.stop.cancel();
        while let Some(ended) = self.running.join_next().await {
            ended?.context("the consumer ended early")?;
        }
        Ok(())
    }
}

impl Report for Facts {
    fn print(&self) -> anyhow::Result<()> {
        print(format_args!(
            "{} messages of {} bytes that fail at first, {} handlers at once, pages of {}. {}\n",
            thousands(self.messages),
            self.payloads.bytes,
            self.handling.concurrency,
            thousands(self.page as u64),
            self.postgresql
        ))?;
        print_contest(&self.lines)?;
        print("")?;
        let mut rows = table(&["fresh messages", "#p50 ms", "#p99 ms", "#longest", "#messages"]);
        for (name, times) in [
            ("behind those that fail", self.fresh_beside_failures_ms),
            ("beside redriven ones", self.fresh_beside_redriven_ms),
        ] {
            let mut cells = vec![name.to_owned()];
            cells.extend([times.p50, times.p99, times.max].map(|ms| format!("{ms:.1}")));
            cells.push(thousands(times.count));
            rows.add_row(cells);
        }
        print_table(&rows)?;
        print_families(&self.dead_rows)?;
        print(format_args!(
            "\n{} lost; {} done more than once",
            thousands(self.lost),
            thousands(self.repeated)
        ))?;
        print_verdict(&self.targets)
    }

    fn verdicts(&self) -> Vec<Verdict> {
        self.targets.clone()
    }

    fn charts(&self) -> Vec<Chart> {
        let targets = [RECORDED, DRAINED];
        let bars = self.lines.iter().zip(targets);
        let bars = bars.map(|(line, target)| Bar::of(&line.name, line.per_second).marked(target));
        let rates = Chart::plain("failures: rates", "messages/s", bars.collect());
        let processors = Chart::processors("failures: processor time", &self.lines);
        [Some(rates), processors].into_iter().flatten().collect()
    }
}
