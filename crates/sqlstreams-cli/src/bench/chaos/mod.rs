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
use sqlstreams::Group;

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
  ordered        the same, one message at a time in each process
  transactional  handlers write in the transaction that settles the message: exactly once
Repeated are rows beyond one a message: who dies between writing one and saying so has it written
again. The longest pause is that between two rows, at least one process being awake at all times. Of `ordered` it is told how many messages a process handled after one with a higher id, as it
must when it takes over what another left behind.

Without a database it starts a private PostgreSQL. With -v it tells what it does to whom. The exit
code is 1 if a message was lost or altered, if the transactional group is not exact, if something is
left undone, or if a worker ended by itself or did not stop when asked to.

Examples:
  sqlstreams bench chaos
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
    let mut workers =
        Workers::start(context, &place.url, place.stream.name(), args.consumers.into())?;

    let until = Instant::now() + args.time;
    let total = args.time.as_millis().try_into().unwrap_or(u64::MAX);
    let progress = Progress::new(context, Some(total), "messages");
    let (produced, ()) = tokio::try_join!(
        produce::produce(&place.stream, args.rate, until, &progress),
        disturb::disturb(&mut workers, seed, until),
    )?;
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
        anyhow::Ok(Count::of(group.name(), &produced.acknowledged, &rows, &dead))
    };
    let mut facts = Facts {
        sqlstreams: env!("CARGO_PKG_VERSION"),
        postgresql: place.server.clone(),
        seed,
        consumers: args.consumers.into(),
        seconds: args.time.as_secs_f64(),
        rate: args.rate,
        lease_seconds: LEASE.as_secs_f64(),
        produced: produced.acknowledged.len() as u64,
        refused: produced.refused,
        workers,
        drained_in_seconds: drained.map(|time| time.as_secs_f64()),
        plain: count(&groups.plain, HANDLED).await?,
        ordered: count(&groups.ordered, HANDLED).await?,
        late_in_ordered: count::late(&rows(&groups.ordered, HANDLED).await?),
        transactional: count(&groups.transactional, BOOKED).await?,
        ok: false,
    };
    facts.ok = facts.complaints().is_empty();
    Ok(facts)
}
