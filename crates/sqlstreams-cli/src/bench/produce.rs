//! `sqlstreams bench produce`.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use clap::Args;
use serde::Serialize;
use sqlstreams::{Outgoing, Producer};
use tokio::task::JoinSet;

use super::measured;
use super::place::{Place, Tables};
use super::report::{Chart, Report};
use super::server::Server;
use super::spread::Spread;
use super::versus::bare::{self, Way};
use super::versus::{
    self, Family, Kind, Line, Meter, Moved, Pace, Verdict, contest, families, print_found,
};
use super::workload::{Payloads, Sending};
use crate::context::Context;
use crate::output::print;

/// What batches have to reach of the best loop of plain statements.
const BATCHES: f64 = 0.9;
/// What single sends have to reach of batches.
const SINGLE: f64 = 0.5;
/// The most WAL of a message in a batch, by that of a row of the plain loop.
const WAL: f64 = 1.1;
/// The most write transactions of a batch: its own, and one in another that sees to partitions or to the pace.
const COMMITS: f64 = 2.0;

const AFTER_HELP: &str = "\
Durable messages a second: batches and single sends, beside loops of plain statements into a log of
the same kind, in turns in the same run. Without a database it starts a private PostgreSQL. The exit
code is 0 once it has measured, whether the targets hold or not: ask for .targets_met.

Examples:
  sqlstreams bench produce
  sqlstreams bench produce --batch 1000 --bytes 100
  sqlstreams bench produce --json | jq '.lines[] | {name, per_second}'";

#[derive(Debug, Clone, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct ProduceArgs {
    #[command(flatten)]
    sending: Sending,
    /// Tasks that send one message at a time
    #[arg(long, value_name = "N", default_value_t = 256,
          value_parser = clap::value_parser!(u16).range(1..=10_000))]
    tasks: u16,
    #[command(flatten)]
    payloads: Payloads,
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
    tasks: u16,
    #[serde(flatten)]
    payloads: Payloads,
    lines: Vec<Line>,
    dead_rows: Vec<Family>,
    targets: Vec<Verdict>,
    targets_met: bool,
}

pub(crate) async fn run(args: ProduceArgs, context: &Context) -> anyhow::Result<ExitCode> {
    let work = async |place: &mut Place<String>| measure(&args, context, place).await;
    let facts = measured(context, "bench_produce_", &[], work, Facts::print).await?;
    Ok(facts.err().unwrap_or(ExitCode::SUCCESS))
}

pub(crate) async fn measure(
    args: &ProduceArgs,
    context: &Context,
    place: &mut Place<String>,
) -> anyhow::Result<Facts> {
    // Partitions are made ahead by pace, which plain statements do not know of.
    let whole = place.another_stream("bare", |stream| stream.partition_size(1_000_000_000)).await?;
    let table = Tables::in_schema(context.schema(), &format!("message_log_{}", whole.id()));
    let meter = Meter::open(&place.url, place.server.is_throw_away()).await?;
    let payload = args.payloads.payload();
    let producer = place.stream.producer();
    let at_once = (args.sending.connections, args.sending.batch);
    let url = &place.url;
    let names = ["bare unnest", "bare COPY", "batches", "single sends"];
    let lines = contest(context, &meter, args.pace.rounds(), &names, async |which| {
        let until = Instant::now() + args.pace.turn();
        match which {
            0 => bare::insert(url, &table, Way::Unnest, &payload, at_once, until).await,
            1 => bare::insert(url, &table, Way::Copy, &payload, at_once, until).await,
            2 => batches(&producer, &payload, at_once, until).await,
            _ => single(&producer, &payload, args.tasks, until).await.map(Moved::from),
        }
    });
    let lines = lines.await?;
    let dead_rows = families(&place.db, context.schema()).await?;
    let [wal, bare_wal] = [2, 0].map(|line: usize| lines[line].cost.wal_per_message());
    let commits = lines[2].cost.commits_per_message() * args.sending.batch as f64;
    let targets = vec![
        versus::verdict("batches / best bare loop", &lines, 2, &[0, 1], BATCHES),
        versus::verdict("single sends / batches", &lines, 3, &[2], SINGLE),
        Verdict::new("WAL of batches / of the plain loop", Kind::Count, wal / bare_wal, WAL),
        Verdict::new("write transactions per batch", Kind::Count, commits, COMMITS),
    ];
    Ok(Facts {
        sqlstreams: env!("CARGO_PKG_VERSION"),
        postgresql: place.server.clone(),
        sending: args.sending,
        tasks: args.tasks,
        payloads: args.payloads,
        lines,
        dead_rows,
        targets_met: targets.iter().all(|target| target.met),
        targets,
    })
}

/// Sends batches, so many at once, until then.
pub(crate) async fn batches(
    producer: &Producer<String>,
    payload: &str,
    (at_once, batch): (u16, usize),
    until: Instant,
) -> anyhow::Result<Moved> {
    let mut senders = JoinSet::new();
    for _ in 0..at_once {
        let (producer, payload) = (producer.clone(), payload.to_owned());
        senders.spawn(async move {
            let (mut sent, mut commits) = (0, Spread::new()?);
            while Instant::now() < until {
                let begun = Instant::now();
                let messages = (0..batch).map(|_| Outgoing::new(&payload));
                sent += producer.send_all(messages).await?.len() as u64;
                commits.record(begun.elapsed().as_nanos().cast_signed());
            }
            anyhow::Ok((sent, commits))
        });
    }
    Moved::sum(senders).await
}

async fn single(
    producer: &Producer<String>,
    payload: &str,
    tasks: u16,
    until: Instant,
) -> anyhow::Result<u64> {
    let payload: Arc<String> = Arc::new(payload.to_owned());
    let mut senders = JoinSet::new();
    for _ in 0..tasks {
        let (producer, payload) = (producer.clone(), payload.clone());
        senders.spawn(async move {
            let mut sent = 0;
            while Instant::now() < until {
                producer.send(&payload).await?;
                sent += 1;
            }
            anyhow::Ok(sent)
        });
    }
    sum(senders).await
}

/// How many all of them sent.
async fn sum(mut tasks: JoinSet<anyhow::Result<u64>>) -> anyhow::Result<u64> {
    let mut sum = 0;
    while let Some(ended) = tasks.join_next().await {
        sum += ended??;
    }
    Ok(sum)
}

impl Report for Facts {
    fn print(&self) -> anyhow::Result<()> {
        let Facts { sending: Sending { connections, batch }, tasks, postgresql, .. } = self;
        let bytes = self.payloads.bytes;
        print(format_args!(
            "{connections} connections with batches of {batch}, {tasks} tasks with single sends, {bytes} bytes each.\n{postgresql}\n"
        ))?;
        print_found(&self.lines, &self.dead_rows, &self.targets)
    }

    fn verdicts(&self) -> Vec<Verdict> {
        self.targets.clone()
    }

    fn charts(&self) -> Vec<Chart> {
        Chart::of_lines("produce", &self.lines, &[(2, 1, BATCHES), (3, 2, SINGLE)])
    }
}
