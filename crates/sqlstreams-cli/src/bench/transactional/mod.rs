//! `sqlstreams bench transactional`.

mod bare;
mod handlers;

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use sqlstreams::Client;

use super::measured;
use super::place::Place;
use super::server::Server;
use crate::context::Context;
use crate::output::{print, thousands};
use crate::values;

/// The table that both write to.
const TABLE: &str = "effect";
/// What handlers have to reach of the bare rate.
const TARGET: f64 = 0.5;

const AFTER_HELP: &str = "\
What it costs that handlers settle their messages in their own transactions: commits a second of
handlers with one INSERT each, beside plain connections that do BEGIN, the same INSERT and COMMIT,
as many at once, in the same run. Without a database it starts a private PostgreSQL, as durable as
any. The exit code is 0 once it has measured, whether the target holds or not: ask for .target_met.

Examples:
  sqlstreams bench transactional
  sqlstreams bench transactional --at-once 4 --for 20s
  sqlstreams bench transactional --json | jq .ratio";

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct TransactionalArgs {
    /// Handlers, and connections beside them
    #[arg(long, value_name = "N", default_value_t = 16,
          value_parser = clap::value_parser!(u16).range(1..=500))]
    at_once: u16,
    /// How long to measure each of the two
    #[arg(long = "for", value_name = "DURATION", default_value = "10s",
          value_parser = values::duration)]
    time: Duration,
}

/// What was measured: the document that `--json` prints.
#[derive(Debug, Clone, Serialize)]
struct Facts {
    sqlstreams: &'static str,
    postgresql: Server,
    at_once: u16,
    bare_commits_per_second: f64,
    handler_commits_per_second: f64,
    /// The second by the first.
    ratio: f64,
    target: f64,
    target_met: bool,
}

pub(crate) async fn run(args: TransactionalArgs, context: &Context) -> anyhow::Result<ExitCode> {
    let work = async |place: &mut Place<i64>| measure(&args, context, place).await;
    let facts = measured(context, "bench_transactional_", &[TABLE], work, print_facts).await?;
    Ok(facts.err().unwrap_or(ExitCode::SUCCESS))
}

async fn measure(
    args: &TransactionalArgs,
    context: &Context,
    place: &mut Place<i64>,
) -> anyhow::Result<Facts> {
    let at_once = usize::from(args.at_once);
    let table = place.tables.name(TABLE);
    place.db.batch_execute(&format!("CREATE TABLE {table} (message bigint NOT NULL)")).await?;
    let insert = format!("INSERT INTO {table} VALUES ($1)");
    // One for each handler, one for the rest.
    let client = Client::builder(&place.url)
        .schema(context.schema())
        .migrate(false)
        .pool_size(at_once + 1)
        .connect()
        .await?;
    let stream = client.stream::<i64>(place.stream.name()).open().await?;

    // In turns, so that a machine that slows down slows both.
    let (mut bare, mut handlers) = (0.0, 0.0);
    for round in 0..ROUNDS {
        context.say(&format!("measuring, round {} of {ROUNDS}", round + 1));
        let rate = bare::measure(&place.url, &insert, at_once, args.time / ROUNDS).await?;
        bare += rate / f64::from(ROUNDS);
        let backlog = (rate * (args.time / ROUNDS).as_secs_f64() * 1.5) as i64 + 100;
        let time = args.time / ROUNDS;
        let rate = handlers::measure(&stream, &insert, at_once, time, backlog).await?;
        handlers += rate / f64::from(ROUNDS);
    }
    let ratio = handlers / bare.max(f64::MIN_POSITIVE);
    Ok(Facts {
        sqlstreams: env!("CARGO_PKG_VERSION"),
        postgresql: place.server.clone(),
        at_once: args.at_once,
        bare_commits_per_second: bare,
        handler_commits_per_second: handlers,
        ratio,
        target: TARGET,
        target_met: ratio >= TARGET,
    })
}

/// How often the two take turns.
const ROUNDS: u32 = 4;

fn print_facts(facts: &Facts) -> anyhow::Result<()> {
    print(format_args!("{} at once, one INSERT each. {}\n", facts.at_once, facts.postgresql))?;
    for (what, rate) in [
        ("BEGIN, INSERT, COMMIT", facts.bare_commits_per_second),
        ("the same in handlers", facts.handler_commits_per_second),
    ] {
        print(format_args!("{what:<22} {:>8} commits/s", thousands(rate as u64)))?;
    }
    let Facts { ratio, target, .. } = facts;
    let holds = if facts.target_met { "holds" } else { "does not hold" };
    print(format_args!("{:<22} {ratio:>8.2}, and the target of {target} {holds}", "ratio"))
}
