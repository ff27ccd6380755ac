//! `sqlstreams bench consume`.

use std::process::ExitCode;

use anyhow::ensure;
use clap::Args;
use serde::Serialize;
use sqlstreams::{Outgoing, Stream};

use super::place::{Place, Tables};
use super::report::{Chart, Report};
use super::server::Server;
use super::versus::{
    self, Family, Kind, Line, Meter, Pace, Verdict, bare, contest, families, print_found,
};
use super::workload::{Handling, Payloads};
use super::{followers, measured};
use crate::context::Context;
use crate::output::{print, thousands};

/// What a group has to reach of reading the same rows.
const TARGET: f64 = 0.7;
/// The most WAL that a message may cost to consume, in bytes.
const WAL: f64 = 1.0;
/// The most write transactions of a thousand messages.
const COMMITS: f64 = 5.0;
/// Ids per query of the bare loop: the fastest of those that were tried.
pub(crate) const RANGE: i64 = 1_000;
/// Messages per transaction when the log is filled.
const BATCH: usize = 5_000;

const AFTER_HELP: &str = "\
Messages a second of a new group whose handler does nothing, beside a plain connection that reads the
same rows by ranges of ids, in turns in the same run. Without a database it starts a private
PostgreSQL. The exit code is 0 once it has measured, whether the targets hold or not: ask for
.targets_met.

Examples:
  sqlstreams bench consume
  sqlstreams bench consume --messages 1000000 --bytes 100
  sqlstreams bench consume --json | jq '.lines[] | {name, per_second}'";

#[derive(Debug, Clone, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct ConsumeArgs {
    /// Messages in the log
    #[arg(long, value_name = "N", default_value_t = 500_000,
          value_parser = clap::value_parser!(u32).range(1_000..=100_000_000))]
    messages: u32,
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
    messages: u32,
    #[serde(flatten)]
    payloads: Payloads,
    #[serde(flatten)]
    handling: Handling,
    lines: Vec<Line>,
    dead_rows: Vec<Family>,
    targets: Vec<Verdict>,
    targets_met: bool,
}

pub(crate) async fn run(args: ConsumeArgs, context: &Context) -> anyhow::Result<ExitCode> {
    let work = async |place: &mut Place<String>| measure(&args, context, place).await;
    let facts = measured(context, "bench_consume_", &[], work, Facts::print).await?;
    Ok(facts.err().unwrap_or(ExitCode::SUCCESS))
}

pub(crate) async fn measure(
    args: &ConsumeArgs,
    context: &Context,
    place: &mut Place<String>,
) -> anyhow::Result<Facts> {
    let messages = if args.pace.quick { args.messages.min(200_000) } else { args.messages };
    let (log, range) = fill(context, place, messages, &args.payloads).await?;
    let meter = Meter::open(&place.url, place.server.is_throw_away()).await?;
    let names = ["bare range read", "group"];
    let mut turn = 0;
    let lines = contest(context, &meter, args.pace.rounds(), &names, async |which| {
        turn += 1;
        let read = match which {
            0 => bare::read(&place.url, &log, range, RANGE).await?,
            _ => drain(&place.stream, &format!("turn {turn}"), args.handling.concurrency).await?,
        };
        ensure!(read == u64::from(messages), "{read} messages came of {messages}");
        Ok(read)
    });
    let lines = lines.await?;
    let dead_rows = families(&place.db, context.schema()).await?;
    let cost = &lines[1].cost;
    let (wal, commits) = (cost.wal_per_message(), cost.commits_per_message() * 1_000.0);
    let targets = vec![
        versus::verdict("group / bare range read", &lines, 1, &[0], TARGET),
        Verdict::new("WAL bytes per message", Kind::Count, wal, WAL),
        Verdict::new("write transactions per 1,000 messages", Kind::Count, commits, COMMITS),
    ];
    Ok(Facts {
        sqlstreams: env!("CARGO_PKG_VERSION"),
        postgresql: place.server.clone(),
        messages,
        payloads: args.payloads,
        handling: args.handling,
        lines,
        dead_rows,
        targets_met: targets.iter().all(|target| target.met),
        targets,
    })
}

/// Sends so many messages. Returns the name of the log, and the first and the last id.
pub(crate) async fn fill(
    context: &Context,
    place: &Place<String>,
    messages: u32,
    payloads: &Payloads,
) -> anyhow::Result<(String, (i64, i64))> {
    context.say(&format!("producing {} messages", thousands(messages)));
    let (producer, payload) = (place.stream.producer(), payloads.payload());
    let (mut first, mut last, mut left) = (None, 0, messages as usize);
    while left > 0 {
        let batch = (0..left.min(BATCH)).map(|_| Outgoing::new(&payload));
        let receipts = producer.send_all(batch).await?;
        left -= receipts.len();
        first = first.or(receipts.first().map(|receipt| receipt.id));
        last = receipts.last().map_or(last, |receipt| receipt.id);
    }
    let log = Tables::in_schema(context.schema(), &format!("message_log_{}", place.stream.id()));
    // As a log is that has been there for a while.
    place.db.batch_execute(&format!("VACUUM ANALYZE {log}")).await?;
    Ok((log, (first.unwrap_or(1), last)))
}

/// Goes through the stream once, as a new group. Returns how many messages were handled.
async fn drain(stream: &Stream<String>, group: &str, concurrency: u16) -> anyhow::Result<u64> {
    let group = stream.group(group).create().await?;
    let handled = followers::go_through(std::slice::from_ref(&group), concurrency).await?;
    group.drop_group().await?;
    Ok(handled)
}

impl Report for Facts {
    fn print(&self) -> anyhow::Result<()> {
        print(format_args!(
            "{} messages of {} bytes, {} handlers at once. {}\n",
            thousands(self.messages),
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
        Chart::of_lines("consume", &self.lines, &[(1, 0, TARGET)])
    }
}
