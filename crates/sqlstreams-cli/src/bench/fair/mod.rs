//! `sqlstreams bench fair`.

mod measure;

use std::process::ExitCode;

use clap::Args;
use serde::Serialize;
use sqlstreams::{Mode, Outgoing, Start};

use self::measure::drain;
use super::measured;
use super::place::Place;
use super::server::Server;
use crate::context::Context;
use crate::output::{print, thousands};

/// What a fair group has to reach of a parallel one's rate where no tenant has more than others.
const TARGET: f64 = 0.8;
/// How often the two take turns.
const ROUNDS: u32 = 2;
/// Characters of a payload.
const PAYLOAD: usize = 1_000;
/// The key of the tenant that has very many messages.
const BIG: &str = "big";
/// The other tenants, and how many messages each of them has.
const SMALL: u32 = 300;
const EACH: u32 = 4;

const AFTER_HELP: &str = "\
What a fair group is good for, and what it costs, beside a parallel group on the same messages in the
same run. First messages of many keys in turn: how fast each of the two goes through them. Then a
burst of one tenant, and after it 300 tenants with four messages each: how many of the big tenant's
messages are handled before those of a small one, in the median. The handlers do nothing. Without a
database it starts a private PostgreSQL. The exit code is 0 once it has measured, whether the target
holds or not: ask for .target_met.

Examples:
  sqlstreams bench fair
  sqlstreams bench fair --backlog 1000000
  sqlstreams bench fair --json | jq .ratio";

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct FairArgs {
    /// Messages of 1 KB without a burst
    #[arg(long, value_name = "N", default_value_t = 200_000,
          value_parser = clap::value_parser!(u32).range(1..=100_000_000))]
    messages: u32,
    /// Keys, which they have in turn
    #[arg(long, value_name = "N", default_value_t = 10_000,
          value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    keys: u32,
    /// Messages of 1 KB in the burst
    #[arg(long, value_name = "N", default_value_t = 100_000,
          value_parser = clap::value_parser!(u32).range(1..=100_000_000))]
    backlog: u32,
    /// Handlers
    #[arg(long, value_name = "N", default_value_t = 16,
          value_parser = clap::value_parser!(u16).range(1..=1_000))]
    concurrency: u16,
}

/// What was measured: the document that `--json` prints.
#[derive(Debug, Clone, Serialize)]
struct Facts {
    sqlstreams: &'static str,
    postgresql: Server,
    messages: u32,
    keys: u32,
    parallel_per_second: f64,
    fair_per_second: f64,
    /// The second by the first.
    ratio: f64,
    target: f64,
    target_met: bool,
    backlog: u32,
    /// Messages of the burst that were handled before one of a small tenant, in the median.
    parallel_before: u64,
    fair_before: u64,
}

pub(crate) async fn run(args: FairArgs, context: &Context) -> anyhow::Result<ExitCode> {
    let work = async |place: &mut Place<String>| measure(&args, context, place).await;
    Ok(match measured(context, "bench_fair_", &[], work, print_facts).await? {
        Err(interrupted) => interrupted,
        Ok(_) => ExitCode::SUCCESS,
    })
}

async fn measure(
    args: &FairArgs,
    context: &Context,
    place: &mut Place<String>,
) -> anyhow::Result<Facts> {
    let FairArgs { messages, keys, backlog, concurrency } = *args;
    let stream = &place.stream;
    context.say(&format!("producing {} messages", thousands(messages)));
    produce(place, (0..messages).map(|n| (n % keys).to_string())).await?;
    let (mut parallel, mut fair) = (0.0, 0.0);
    for round in 0..ROUNDS {
        for mode in [Mode::Parallel, Mode::Fair] {
            context.say(&format!("measuring, round {} of {ROUNDS}, {mode}", round + 1));
            let group = stream.group(format!("{mode}-{round}")).mode(mode).create().await?;
            let rate = drain(&group, concurrency, messages.into()).await?.rate / f64::from(ROUNDS);
            match mode {
                Mode::Fair => fair += rate,
                _ => parallel += rate,
            }
        }
    }

    let mut groups = Vec::new();
    for mode in [Mode::Parallel, Mode::Fair] {
        let group = stream.group(format!("{mode}-burst")).mode(mode).start(Start::Latest);
        groups.push(group.create().await?);
    }
    context.say(&format!("producing a burst of {} messages", thousands(backlog)));
    let burst = (0..backlog).map(|_| BIG.to_owned());
    produce(place, burst.chain((0..SMALL * EACH).map(|n| format!("tenant-{}", n % SMALL)))).await?;
    let mut before = Vec::new();
    for group in &groups {
        context.say(&format!("measuring the burst, {}", group.name()));
        let of_small = drain(group, concurrency, u64::from(backlog + SMALL * EACH)).await?.before;
        before.push(of_small.get(of_small.len() / 2).copied().unwrap_or_default());
    }
    let ratio = fair / parallel.max(f64::MIN_POSITIVE);
    Ok(Facts {
        sqlstreams: env!("CARGO_PKG_VERSION"),
        postgresql: place.server.clone(),
        messages,
        keys,
        parallel_per_second: parallel,
        fair_per_second: fair,
        ratio,
        target: TARGET,
        target_met: ratio >= TARGET,
        backlog,
        parallel_before: before[0],
        fair_before: before[1],
    })
}

async fn produce(place: &Place<String>, keys: impl Iterator<Item = String>) -> anyhow::Result<()> {
    let (producer, payload) = (place.stream.producer(), "x".repeat(PAYLOAD));
    let keys: Vec<String> = keys.collect();
    for batch in keys.chunks(5_000) {
        producer
            .send_all(batch.iter().map(|key| Outgoing::new(&payload).key(key.as_str())))
            .await?;
    }
    Ok(())
}

fn print_facts(facts: &Facts) -> anyhow::Result<()> {
    print(format_args!(
        "{} messages of {} keys in turn. {}\n",
        thousands(facts.messages),
        thousands(facts.keys),
        facts.postgresql
    ))?;
    for (what, rate) in [("parallel", facts.parallel_per_second), ("fair", facts.fair_per_second)] {
        print(format_args!("{what:<12} {:>9} messages/s", thousands(rate as u64)))?;
    }
    let Facts { ratio, target, .. } = facts;
    let holds = if facts.target_met { "holds" } else { "does not hold" };
    print(format_args!("{:<12} {ratio:>9.2}, and the target of {target} {holds}\n", "ratio"))?;
    print(format_args!(
        "A burst of {} messages of one tenant; of these were handled before a small tenant's, in the median\n",
        thousands(facts.backlog)
    ))?;
    for (what, before) in [("parallel", facts.parallel_before), ("fair", facts.fair_before)] {
        print(format_args!("{what:<12} {:>9}", thousands(before)))?;
    }
    Ok(())
}
