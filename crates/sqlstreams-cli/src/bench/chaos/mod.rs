//! `sqlstreams bench chaos`.
//!
//! A producer that nobody disturbs ([`produce`]), processes that consume ([`worker`]) and are killed and frozen
//! ([`workers`], [`disturb`]), and a count of what they left behind ([`business`], [`count`]).

mod business;
mod count;
mod disturb;
mod drain;
mod facts;
mod groups;
mod produce;
mod report;
mod transactional;
mod worker;
mod workers;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use sqlstreams::{CancellationToken, Group};

use self::business::{BOOKED, HANDLED};
use self::count::Count;
use self::facts::Facts;
use self::groups::{Groups, LEASE};
pub(crate) use self::worker::{WorkerArgs, run as run_worker};
use self::workers::Workers;
use super::measured;
use super::place::Place;
use crate::context::Context;
use crate::failure::Failure;
use crate::progress::Progress;
use crate::values;

const AFTER_HELP: &str = "\
Starts consumers as processes, produces at a steady rate, and at random kills a process (kill -9),
freezes it (SIGSTOP) for a moment or for longer than its lease lasts, or restarts it (SIGTERM). At
the end all run until nothing is left to do; then what they wrote to tables is counted:
  plain          handlers write by themselves: nothing may be lost, but things may be repeated
  ordered        the same, in an ordered group: messages of one key in their order
  transactional  handlers write in the transaction that settles the message: exactly once
Of a hundred messages some fail at first. Repeated are rows beyond one a message that was handled: who
dies between writing one and saying so has it written again. Out of order are messages that a handler had
while an earlier one of their key was neither handled nor dead: none may be in ordered, and some
are in plain, if there is anything to see. The longest pause is that between two rows, at least one process being
awake at all times.

With --messages it sends so many as fast as it goes, and disturbs until the groups have handed them
all out; else it sends at a rate for a time.

Without a database it starts a private PostgreSQL. With -v it tells what it does to whom. The exit
code is 1 if a message was lost or altered, if the ordered group was not in order or the transactional one
not exact, if something is left undone, or if a worker ended by itself or did not stop when asked to.

Examples:
  sqlstreams bench chaos
  sqlstreams bench chaos --messages 1000000 --keys 1000 --consumers 8 --failures 5
  sqlstreams bench chaos --for 10m --consumers 8 --rate 500
  sqlstreams bench chaos --seed 7 -v
  sqlstreams bench chaos --for 20s --json | jq .plain";

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct ChaosArgs {
    /// How long to disturb them
    #[arg(long = "for", value_name = "DURATION", default_value = "60s",
          value_parser = values::duration)]
    time: Duration,
    /// How many processes consume, at most 100
    #[arg(long, value_name = "N", default_value_t = 3,
          value_parser = clap::value_parser!(u16).range(1..=100))]
    consumers: u16,
    /// Messages a second
    #[arg(long, value_name = "N", default_value_t = 200,
          value_parser = clap::value_parser!(u32).range(1..=10_000))]
    rate: u32,
    /// So many messages instead, as fast as it goes; at most 10 million
    #[arg(long, value_name = "N", conflicts_with_all = ["time", "rate"],
          value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    messages: Option<u32>,
    /// How many keys the messages have, in turn
    #[arg(long, value_name = "N", default_value_t = 100,
          value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    keys: u32,
    /// Of a hundred messages, how many fail at their first attempt
    #[arg(long, value_name = "PERCENT", default_value_t = 5,
          value_parser = clap::value_parser!(u8).range(0..=100))]
    failures: u8,
    /// Repeats the disturbances of another run, if not quite at the same moments [default: a new one]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
}

pub(crate) async fn run(args: ChaosArgs, context: &Context) -> anyhow::Result<ExitCode> {
    let work = async |place: &mut Place<i64>| chaos(&args, context, place).await;
    let tables = [HANDLED, BOOKED];
    let facts = match measured(context, "bench_chaos_", &tables, work, report::print_facts).await? {
        Err(interrupted) => return Ok(interrupted),
        Ok(facts) if facts.ok => return Ok(ExitCode::SUCCESS),
        Ok(facts) => facts,
    };
    Err(Failure::failed("chaos_not_survived", facts.complaints().join("; "))
        .hint(format!(
            "That is a defect of SQLStreams. --seed {} -v disturbs the workers alike and tells more.",
            facts.seed
        ))
        .into())
}

async fn chaos(
    args: &ChaosArgs,
    context: &Context,
    place: &mut Place<i64>,
) -> anyhow::Result<Facts> {
    let seed = args.seed.unwrap_or_else(|| fastrand::u64(..1_000_000));
    business::create(&place.db, &place.tables).await?;
    let groups = Groups::create(&place.stream).await?;
    let mut workers = Workers::start(
        context,
        &place.url,
        place.stream.name(),
        args.consumers.into(),
        args.failures,
    )?;

    let begin = Instant::now();
    let total = match args.messages {
        Some(messages) => messages.into(),
        None => args.time.as_millis().try_into().unwrap_or(u64::MAX),
    };
    let progress = Progress::new(context, Some(total), "messages");
    let enough = CancellationToken::new();
    let work = async {
        let produced = match args.messages {
            Some(messages) => {
                let produced = produce::produce_all(&place.stream, messages, args.keys).await?;
                drain::hand_out(&groups, produced.last(), &progress).await?;
                produced
            }
            None => {
                let until = begin + args.time;
                produce::produce(&place.stream, args.rate, args.keys, until, &progress).await?
            }
        };
        enough.cancel();
        Ok(produced)
    };
    let (produced, ()) = tokio::try_join!(work, disturb::disturb(&mut workers, seed, &enough))?;
    let seconds = begin.elapsed().as_secs_f64();
    progress.clear();
    context.say("waiting for the workers to finish");
    let drained = drain::drain(&groups, produced.last(), &mut workers).await?;
    let workers = workers.stop().await?;

    let rows = async |group: &Group<i64>, table: &str| {
        business::rows(&place.db, &place.tables, table, group.name()).await
    };
    let count = async |group: &Group<i64>, table: &str| {
        let rows = rows(group, table).await?;
        let dead = count::dead_letters(group).await?;
        anyhow::Ok(Count::of(group.name(), &produced.acknowledged, &rows, &dead, args.keys))
    };
    let mut facts = Facts {
        sqlstreams: env!("CARGO_PKG_VERSION"),
        postgresql: place.server.clone(),
        seed,
        consumers: args.consumers.into(),
        seconds,
        rate: args.messages.is_none().then_some(args.rate),
        keys: args.keys,
        failures: args.failures,
        lease_seconds: LEASE.as_secs_f64(),
        produced: produced.acknowledged.len() as u64,
        refused: produced.refused,
        workers,
        drained_in_seconds: drained.map(|time| time.as_secs_f64()),
        plain: count(&groups.plain, HANDLED).await?,
        ordered: count(&groups.ordered, HANDLED).await?,
        transactional: count(&groups.transactional, BOOKED).await?,
        ok: false,
    };
    facts.ok = facts.complaints().is_empty();
    Ok(facts)
}
