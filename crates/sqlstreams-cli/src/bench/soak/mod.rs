//! `sqlstreams bench soak`.

mod groups;
mod sizes;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;
use sqlstreams::{Outgoing, Retention, Stream};

use self::groups::{Consumers, GroupFacts};
use self::sizes::Sizes;
use super::measured;
use super::place::Place;
use super::server::Server;
use crate::context::Context;
use crate::output::{print, thousands};
use crate::progress::Progress;
use crate::values;

/// Ids per partition: the fewest there can be.
const PARTITION: i64 = 1_000;
/// How many ids are kept beside those of the last minute, which always are.
const KEPT: u64 = 10_000;
/// How long dead letters are.
const DEAD_KEPT: Duration = Duration::from_secs(60);
/// Messages per transaction of the producer.
const BATCH: u32 = 50;
/// How often a connection is terminated.
const TROUBLE: Duration = Duration::from_secs(5);
/// How long the groups may take to finish when nothing is produced any more.
const DRAIN: Duration = Duration::from_secs(120);

const AFTER_HELP: &str = "\
A stream with the smallest partitions, whose log is kept short, under a steady load for as long as you
like: partitions are made and go all the time. One group takes everything, one a part by its
bindings, one each key in order; of a thousand messages ten fail once and one for good. Every 5 s a
random connection is terminated. At the end it says what was produced and handled, how many
partitions were made and went, and how large the tables are and were on the way. Without a database
it starts a private PostgreSQL. The exit code is 1 if a message was lost, or partitions did not go.

Examples:
  sqlstreams bench soak
  sqlstreams bench soak --for 1h --rate 3000
  sqlstreams bench soak --for 10m --json | jq .sizes";

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct SoakArgs {
    /// For how long to produce
    #[arg(long = "for", value_name = "DURATION", default_value = "2m",
          value_parser = values::duration)]
    time: Duration,
    /// Messages per second
    #[arg(long, value_name = "N", default_value_t = 2_000,
          value_parser = clap::value_parser!(u32).range(1..=100_000))]
    rate: u32,
}

/// What came of it: the document that `--json` prints.
#[derive(Debug, Clone, Serialize)]
struct Facts {
    sqlstreams: &'static str,
    postgresql: Server,
    seconds: f64,
    produced: u64,
    /// The longest time that a send took.
    longest_send_ms: f64,
    terminated: u64,
    groups: Vec<GroupFacts>,
    partitions_made: i64,
    partitions_left: i64,
    /// Failures of steps of the maintenance, each tried again.
    maintenance_failures: u64,
    /// Sizes on the way and at the end, in bytes.
    sizes: Vec<Sizes>,
    ok: bool,
}

pub(crate) async fn run(args: SoakArgs, context: &Context) -> anyhow::Result<ExitCode> {
    let work = async |place: &mut Place<i64>| soak(&args, context, place).await;
    Ok(match measured(context, "bench_soak_", &[], work, print_facts).await? {
        Err(code) => code,
        Ok(facts) if facts.ok => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
    })
}

async fn soak(args: &SoakArgs, context: &Context, place: &mut Place<i64>) -> anyhow::Result<Facts> {
    let keep = Retention::forever().keep_count(KEPT).keep_dead_for(DEAD_KEPT);
    let stream = place
        .another_stream("log", |stream| stream.partition_size(PARTITION).retention(keep))
        .await?;
    let consumers = Consumers::start(&stream).await?;
    let mut sizes = Vec::new();
    let begun = Instant::now();
    let progress = Progress::new(context, Some(args.time.as_secs()), "messages");
    let mut tick = tokio::time::interval(Duration::from_secs(1) * BATCH / args.rate.max(1));
    let (mut produced, mut longest, mut terminated) = (0_u64, Duration::ZERO, 0_u64);
    let mut trouble = begun + TROUBLE;
    let mut look = begun + args.time / 4;
    let producer = stream.producer();
    while begun.elapsed() < args.time {
        tick.tick().await;
        let numbers: Vec<i64> = (produced as i64..).take(BATCH as usize).collect();
        let batch = numbers.iter().map(|n| {
            let what = if n % 10 == 0 { "a" } else { "b" };
            Outgoing::new(n).key(format!("{}", n % 500)).routing_key(what)
        });
        let sent = Instant::now();
        producer.send_all(batch).await?;
        longest = longest.max(sent.elapsed());
        produced += numbers.len() as u64;
        progress.update(begun.elapsed().as_secs(), produced);
        if Instant::now() >= trouble {
            terminated += terminate_one(place).await?;
            trouble += TROUBLE;
        }
        if Instant::now() >= look {
            sizes.push(Sizes::look(place, context.schema(), &stream, begun).await?);
            look += args.time / 4;
        }
    }
    progress.clear();
    context.say("waiting for the groups");
    let seconds = begun.elapsed().as_secs_f64();
    let groups = consumers.finish(&stream, produced, DRAIN).await?;
    context.say("waiting for the last partitions to go");
    let left = settle(place, context.schema(), &stream).await?;
    sizes.push(Sizes::look(place, context.schema(), &stream, begun).await?);
    let head = stream.info().await?.head;
    let status = place.client.maintenance().status().await?;
    consumers.stop().await?;
    let ok = groups.iter().all(|group| group.lost == 0) && left <= most_left();
    Ok(Facts {
        sqlstreams: env!("CARGO_PKG_VERSION"),
        postgresql: place.server.clone(),
        seconds,
        produced,
        longest_send_ms: longest.as_secs_f64() * 1e3,
        terminated,
        groups,
        partitions_made: head / PARTITION + 1,
        partitions_left: left,
        maintenance_failures: status.steps.iter().map(|step| step.failures).sum(),
        sizes,
        ok,
    })
}

/// Terminates a random connection, on a server of our own. Returns how many.
async fn terminate_one(place: &Place<i64>) -> anyhow::Result<u64> {
    if !place.server.is_throw_away() {
        return Ok(0);
    }
    let sql = "SELECT count(pg_terminate_backend(pid)) FROM (
                   SELECT pid FROM pg_stat_activity
                   WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()
                   ORDER BY random() LIMIT 1) AS x";
    let ended: i64 = place.db.query_one(sql, &[]).await?.get(0);
    Ok(ended.unsigned_abs())
}

/// The most partitions up to the head that may be left: what is kept, the one that is written to, and one that is on its way.
fn most_left() -> i64 {
    KEPT as i64 / PARTITION + 3
}

/// Waits until the log is as short as it is to be. Returns how many partitions it has up to the head.
async fn settle(place: &Place<i64>, schema: &str, stream: &Stream<i64>) -> anyhow::Result<i64> {
    // Nothing goes within a minute of its last message, and partitions go a few at a time.
    let deadline = Instant::now() + Duration::from_secs(300);
    loop {
        let left = sizes::partitions(place, schema, stream).await?;
        if left <= most_left() || Instant::now() >= deadline {
            return Ok(left);
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

fn print_facts(facts: &Facts) -> anyhow::Result<()> {
    print(format_args!(
        "{} messages in {:.0} s, {} connections terminated. {}\n",
        thousands(facts.produced),
        facts.seconds,
        facts.terminated,
        facts.postgresql
    ))?;
    print(format_args!(
        "{:<8} {:>11} {:>9} {:>7} {:>5}",
        "GROUP", "HANDLED", "REPEATED", "DEAD", "LOST"
    ))?;
    for group in &facts.groups {
        let [handled, repeated, dead, lost] =
            [group.handled, group.repeated, group.dead, group.lost].map(thousands);
        print(format_args!("{:<8} {handled:>11} {repeated:>9} {dead:>7} {lost:>5}", group.group))?;
    }
    print(format_args!(
        "\npartitions  {} made, {} left; steps of the maintenance that failed and were tried again: {}\nlongest send {:.0} ms\n",
        thousands(facts.partitions_made),
        facts.partitions_left,
        facts.maintenance_failures,
        facts.longest_send_ms
    ))?;
    print(format_args!(
        "{:>8} {:>10} {:>10} {:>10} {:>10} {:>10}",
        "AFTER", "LOG", "FAILED", "ARCHIVE", "STATE", "CATALOG"
    ))?;
    for at in &facts.sizes {
        let megabytes = |bytes: i64| format!("{:.1} MB", bytes as f64 / 1e6);
        print(format_args!(
            "{:>6.0} s {:>10} {:>10} {:>10} {:>10} {:>10}",
            at.seconds,
            megabytes(at.log),
            megabytes(at.exceptions),
            megabytes(at.archive),
            megabytes(at.state),
            megabytes(at.catalog)
        ))?;
    }
    let verdict =
        if facts.ok { "nothing was lost, and what was to go went" } else { "NOT as it is to be" };
    print(format_args!("\n{verdict}"))
}
