//! `sqlstreams bench growth`.

mod claims;
mod fill;

use std::process::ExitCode;

use clap::Args;
use serde::Serialize;

use super::measured;
use super::place::Place;
use super::report::{Bar, Chart, Report};
use super::server::Server;
use super::versus::{Kind, Verdict};
use crate::context::Context;
use crate::output::{print, thousands};

/// How long claims of a large log may take, by those of a small one.
const MOST_COST: f64 = 1.2;
/// How many messages are consumed at each place of a log.
const CONSUMED: u64 = 100_000;
/// How often the two logs take turns.
const ROUNDS: u32 = 5;

const AFTER_HELP: &str = "\
What the size of a log costs: how long it takes to consume messages at the beginning, in the middle
and at the head of a large log, by what it takes in a small one, in turns.
Without a database it starts a private PostgreSQL. The exit code is 0 once it has measured,
whether the target holds or not: ask for .target_met.

Examples:
  sqlstreams bench growth
  sqlstreams bench growth --messages 100000000      (needs about 15 GB, and a quarter of an hour)
  sqlstreams bench growth --json | jq '.places[].cost'";

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct GrowthArgs {
    /// Messages in the large log
    #[arg(long, value_name = "N", default_value_t = 10_000_000,
          value_parser = clap::value_parser!(u64).range(10_000..=10_000_000_000))]
    messages: u64,
    /// Messages in the small one
    #[arg(long, value_name = "N", default_value_t = 1_000_000,
          value_parser = clap::value_parser!(u64).range(1_000..=10_000_000_000))]
    small: u64,
}

/// What was measured: the document that `--json` prints.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Facts {
    sqlstreams: &'static str,
    postgresql: Server,
    messages: u64,
    small: u64,
    /// Messages consumed at each place.
    consumed: u64,
    places: Vec<PlaceFacts>,
    target: f64,
    target_met: bool,
}

#[derive(Debug, Clone, Serialize)]
struct PlaceFacts {
    place: &'static str,
    small_ms: f64,
    large_ms: f64,
    /// The second by the first.
    cost: f64,
}

pub(crate) async fn run(args: GrowthArgs, context: &Context) -> anyhow::Result<ExitCode> {
    let work = async |place: &mut Place<i64>| measure(&args, context, place).await;
    let facts = measured(context, "bench_growth_", &[], work, print_facts).await?;
    Ok(facts.err().unwrap_or(ExitCode::SUCCESS))
}

pub(crate) async fn measure(
    args: &GrowthArgs,
    context: &Context,
    place: &mut Place<i64>,
) -> anyhow::Result<Facts> {
    let small = place.another_stream("small", |stream| stream).await?;
    fill::fill(context, place, &small, args.small).await?;
    fill::fill(context, place, &place.stream, args.messages).await?;

    let consumed = CONSUMED.min(args.small / 2);
    let mut places = Vec::new();
    for (name, part) in [("beginning", 0.0), ("middle", 0.5), ("head", 1.0)] {
        let mut best = [f64::INFINITY; 2];
        // In turns, so that a machine that slows down slows both.
        for round in 0..ROUNDS {
            context.say(&format!("consuming at the {name}, round {} of {ROUNDS}", round + 1));
            let logs = [(&small, args.small), (&place.stream, args.messages)];
            for ((log, messages), best) in logs.into_iter().zip(&mut best) {
                let first = ((messages - consumed) as f64 * part) as i64 + 1;
                let group = format!("{name} {round}");
                *best = best.min(claims::consume(log, &group, first, consumed).await?);
            }
        }
        let [small_ms, large_ms] = best;
        places.push(PlaceFacts { place: name, small_ms, large_ms, cost: large_ms / small_ms });
    }
    Ok(Facts {
        sqlstreams: env!("CARGO_PKG_VERSION"),
        postgresql: place.server.clone(),
        messages: args.messages,
        small: args.small,
        consumed,
        target_met: places.iter().all(|facts| facts.cost <= MOST_COST),
        places,
        target: MOST_COST,
    })
}

impl Report for Facts {
    fn print(&self) -> anyhow::Result<()> {
        print_facts(self)
    }

    fn verdicts(&self) -> Vec<Verdict> {
        let verdict = |place: &PlaceFacts| {
            let what = format!("large log / small one ({})", place.place);
            Verdict::new(what, Kind::Cost, place.cost, self.target)
        };
        self.places.iter().map(verdict).collect()
    }

    fn charts(&self) -> Vec<Chart> {
        let bars =
            self.places.iter().flat_map(|PlaceFacts { place, small_ms, large_ms, .. }| {
                let large = Bar::of(format!("{place}, large log"), *large_ms);
                [
                    Bar::of(format!("{place}, small log"), *small_ms),
                    large.marked(small_ms * self.target),
                ]
            });
        vec![Chart::plain("growth: consuming the same number of messages", "ms", bars.collect())]
    }
}

fn print_facts(facts: &Facts) -> anyhow::Result<()> {
    let [messages, small, consumed] = [facts.messages, facts.small, facts.consumed].map(thousands);
    print(format_args!(
        "A log of {messages} messages beside one of {small}. {}\n",
        facts.postgresql
    ))?;
    print(format_args!("{:<10}  {:>10}  {:>10}  {:>5}", "consuming", "small", "large", "cost"))?;
    for PlaceFacts { place, small_ms, large_ms, cost } in &facts.places {
        print(format_args!("{place:<10}  {small_ms:>7.0} ms  {large_ms:>7.0} ms  {cost:>5.2}"))?;
    }
    let holds = if facts.target_met { "holds" } else { "does not hold" };
    print(format_args!("\n{consumed} messages at each place. The target of {MOST_COST} {holds}."))
}
