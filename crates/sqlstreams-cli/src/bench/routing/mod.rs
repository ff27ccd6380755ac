//! `sqlstreams bench routing`.

mod bare;
mod bound;

use std::process::ExitCode;

use anyhow::ensure;
use clap::Args;
use serde::Serialize;
use sqlstreams::Outgoing;

use super::measured;
use super::place::{Place, Tables};
use super::server::Server;
use crate::context::Context;
use crate::output::{print, thousands};

/// What a group has to reach of the bare scan's speed.
const TARGET: f64 = 0.5;
/// How often the two take turns.
const ROUNDS: u32 = 3;
/// Bindings that match the same messages, and what they are in SQL by hand.
const BINDINGS: [(&str, &str); 3] = [
    ("orders.eu.created", "routing_key = 'orders.eu.created'"),
    (
        "orders.eu.created.#",
        "(routing_key = 'orders.eu.created' OR starts_with(routing_key, 'orders.eu.created.'))",
    ),
    ("orders.*.created", r"routing_key ~ '^orders\.[^.]*\.created$'"),
];
/// Messages per transaction of the producer.
const BATCH: i64 = 10_000;

const AFTER_HELP: &str = "\
How fast a group whose bindings match few of the messages gets through the log: ids a second of one
consumer, beside a plain connection that reads the same rows by ranges of 50,000 ids with the same
condition in its query, in the same run. Without a database it starts a private PostgreSQL. The exit
code is 0 once it has measured, whether the target holds or not: ask for .target_met.

Examples:
  sqlstreams bench routing
  sqlstreams bench routing --messages 10000000
  sqlstreams bench routing --one-in 1000 --json | jq '.bindings[].ratio'";

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct RoutingArgs {
    /// Messages in the log
    #[arg(long, value_name = "N", default_value_t = 2_000_000,
          value_parser = clap::value_parser!(i64).range(1_000..=1_000_000_000))]
    messages: i64,
    /// One in so many matches
    #[arg(long, value_name = "N", default_value_t = 100_000,
          value_parser = clap::value_parser!(i64).range(1..))]
    one_in: i64,
}

/// What was measured: the document that `--json` prints.
#[derive(Debug, Clone, Serialize)]
struct Facts {
    sqlstreams: &'static str,
    postgresql: Server,
    messages: i64,
    one_in: i64,
    /// How many messages match.
    matching: u64,
    bindings: Vec<BindingFacts>,
    target: f64,
    target_met: bool,
}

#[derive(Debug, Clone, Serialize)]
struct BindingFacts {
    binding: &'static str,
    bare_ids_per_second: f64,
    group_ids_per_second: f64,
    /// The second by the first.
    ratio: f64,
}

pub(crate) async fn run(args: RoutingArgs, context: &Context) -> anyhow::Result<ExitCode> {
    let work = async |place: &mut Place<i64>| measure(&args, context, place).await;
    let facts = measured(context, "bench_routing_", &[], work, print_facts).await?;
    Ok(facts.err().unwrap_or(ExitCode::SUCCESS))
}

async fn measure(
    args: &RoutingArgs,
    context: &Context,
    place: &mut Place<i64>,
) -> anyhow::Result<Facts> {
    context.say(&format!("producing {} messages", thousands(args.messages)));
    let (matching, last) = produce(args, place).await?;
    let log = Tables::in_schema(context.schema(), &format!("message_log_{}", place.stream.id()));
    // As a log is that has been there for a while.
    place.db.batch_execute(&format!("VACUUM ANALYZE {log}")).await?;

    let mut bindings = Vec::new();
    for (binding, filter) in BINDINGS {
        let (mut bare, mut group) = (0.0, 0.0);
        // In turns, so that a machine that slows down slows both.
        for round in 0..ROUNDS {
            context.say(&format!("measuring {binding}, round {} of {ROUNDS}", round + 1));
            let name = format!("{binding} {round}");
            for (rate, measured) in [
                (&mut bare, bare::measure(&place.url, &log, filter, last).await?),
                (&mut group, bound::measure(&place.stream, &name, binding, last).await?),
            ] {
                ensure!(measured.1 == matching, "{} messages came of {matching}", measured.1);
                *rate += measured.0 / f64::from(ROUNDS);
            }
        }
        bindings.push(BindingFacts {
            binding,
            bare_ids_per_second: bare,
            group_ids_per_second: group,
            ratio: group / bare.max(f64::MIN_POSITIVE),
        });
    }
    Ok(Facts {
        sqlstreams: env!("CARGO_PKG_VERSION"),
        postgresql: place.server.clone(),
        messages: args.messages,
        one_in: args.one_in,
        matching,
        target_met: bindings.iter().all(|facts| facts.ratio >= TARGET),
        bindings,
        target: TARGET,
    })
}

/// Sends the messages, of which the first, each so many, and the last match. Returns how many do, and the last one's id.
async fn produce(args: &RoutingArgs, place: &Place<i64>) -> anyhow::Result<(u64, i64)> {
    let producer = place.stream.producer();
    let matches = |n: i64| n % args.one_in == 0 || n == args.messages - 1;
    let mut last = 0;
    for first in (0..args.messages).step_by(BATCH as usize) {
        let numbers: Vec<i64> = (first..args.messages.min(first + BATCH)).collect();
        let messages = numbers.iter().map(|n| {
            let what = if matches(*n) { "created" } else { "changed" };
            Outgoing::new(n).routing_key(format!("orders.eu.{what}"))
        });
        last = producer.send_all(messages).await?.last().map_or(last, |sent| sent.id);
    }
    let matching = (0..args.messages).step_by(args.one_in as usize).count() as u64;
    Ok((matching + u64::from((args.messages - 1) % args.one_in != 0), last))
}

fn print_facts(facts: &Facts) -> anyhow::Result<()> {
    let Facts { messages, matching, target, .. } = facts;
    let [messages, matching] = [thousands(*messages), thousands(*matching)];
    print(format_args!("{messages} messages, {matching} of them match. {}\n", facts.postgresql))?;
    print(format_args!("{:<20}  {:>12}  {:>12}  {:>5}", "ids/s", "bare scan", "group", "ratio"))?;
    for binding in &facts.bindings {
        let BindingFacts { binding, bare_ids_per_second, group_ids_per_second, ratio } = binding;
        let [bare, group] =
            [bare_ids_per_second, group_ids_per_second].map(|rate| thousands(*rate as u64));
        print(format_args!("{binding:<20}  {bare:>12}  {group:>12}  {ratio:>5.2}"))?;
    }
    let holds = if facts.target_met { "holds" } else { "does not hold" };
    print(format_args!("\nThe target of {target} {holds}."))
}
