//! `sqlstreams bench keys`.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;
use sqlstreams::{Outgoing, Producer};
use tokio::task::JoinSet;

use super::measured;
use super::place::Place;
use super::server::Server;
use crate::context::Context;
use crate::output::{print, thousands};
use crate::values;

/// What sending with keys has to reach of the rate without.
const TARGET: f64 = 0.4;
/// How often they take turns.
const ROUNDS: u32 = 4;

const AFTER_HELP: &str = "\
What idempotency keys cost: messages a second that are sent without keys, with a new key each, and
once more with keys that are known already, in turns in the same run. Without a database it starts a
private PostgreSQL, as durable as any. The exit code is 0 once it has measured, whether the target
holds or not: ask for .target_met.

Examples:
  sqlstreams bench keys
  sqlstreams bench keys --connections 4 --batch 1000 --for 20s
  sqlstreams bench keys --json | jq .ratio";

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct KeysArgs {
    /// How many send at once
    #[arg(long, value_name = "N", default_value_t = 2,
          value_parser = clap::value_parser!(u16).range(1..=7))]
    connections: u16,
    /// Messages per transaction
    #[arg(long, value_name = "N", default_value = "250", value_parser = values::at_least_one)]
    batch: usize,
    /// Bytes per payload
    #[arg(long, value_name = "N", default_value_t = 1_000,
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    bytes: u32,
    /// How long to measure each of the three
    #[arg(long = "for", value_name = "DURATION", default_value = "10s",
          value_parser = values::duration)]
    time: Duration,
}

/// What was measured: the document that `--json` prints.
#[derive(Debug, Clone, Serialize)]
struct Facts {
    sqlstreams: &'static str,
    postgresql: Server,
    connections: u16,
    batch: usize,
    bytes: u32,
    without_keys_per_second: f64,
    with_keys_per_second: f64,
    duplicates_per_second: f64,
    /// The second by the first.
    ratio: f64,
    target: f64,
    target_met: bool,
}

/// Which keys messages get.
#[derive(Debug, Clone, Copy)]
enum Keys {
    None,
    New,
    Known,
}

pub(crate) async fn run(args: KeysArgs, context: &Context) -> anyhow::Result<ExitCode> {
    let work = async |place: &mut Place<String>| measure(&args, context, place).await;
    let facts = measured(context, "bench_keys_", &[], work, print_facts).await?;
    Ok(facts.err().unwrap_or(ExitCode::SUCCESS))
}

async fn measure(
    args: &KeysArgs,
    context: &Context,
    place: &mut Place<String>,
) -> anyhow::Result<Facts> {
    let sender = Sender {
        producer: place.stream.producer(),
        payload: "x".repeat(args.bytes as usize),
        batch: args.batch,
        next: AtomicU64::new(0),
    };
    let sender = Arc::new(sender);
    let time = args.time / ROUNDS;
    // Partitions and connections are made outside of what is measured.
    for keys in [Keys::New, Keys::None] {
        sender.rate(keys, args.connections, time / 4).await?;
    }
    let mut rates = [0.0; 3];
    for round in 0..ROUNDS {
        context.say(&format!("measuring, round {} of {ROUNDS}", round + 1));
        for (rate, keys) in rates.iter_mut().zip([Keys::None, Keys::New, Keys::Known]) {
            *rate += sender.rate(keys, args.connections, time).await? / f64::from(ROUNDS);
        }
    }
    let [without, with, duplicates] = rates;
    let ratio = with / without.max(f64::MIN_POSITIVE);
    Ok(Facts {
        sqlstreams: env!("CARGO_PKG_VERSION"),
        postgresql: place.server.clone(),
        connections: args.connections,
        batch: args.batch,
        bytes: args.bytes,
        without_keys_per_second: without,
        with_keys_per_second: with,
        duplicates_per_second: duplicates,
        ratio,
        target: TARGET,
        target_met: ratio >= TARGET,
    })
}

struct Sender {
    producer: Producer<String>,
    payload: String,
    batch: usize,
    /// The number of the next new key.
    next: AtomicU64,
}

impl Sender {
    /// Messages a second of so many that send at once.
    async fn rate(
        self: &Arc<Self>,
        keys: Keys,
        at_once: u16,
        time: Duration,
    ) -> anyhow::Result<f64> {
        let begun = Instant::now();
        let mut senders = JoinSet::new();
        for _ in 0..at_once {
            let sender = self.clone();
            senders.spawn(async move { sender.send(keys, begun + time).await });
        }
        let mut sent = 0;
        while let Some(sender) = senders.join_next().await {
            sent += sender??;
        }
        Ok(sent as f64 / begun.elapsed().as_secs_f64())
    }

    async fn send(&self, keys: Keys, until: Instant) -> anyhow::Result<usize> {
        let mut sent = 0;
        while Instant::now() < until {
            let size = self.batch as u64;
            let first = match keys {
                Keys::None => 0,
                Keys::New => self.next.fetch_add(size, Ordering::Relaxed),
                // Of those that were sent any.
                Keys::Known => {
                    fastrand::u64(..self.next.load(Ordering::Relaxed).max(size) / size) * size
                }
            };
            let batch = (first..first + size).map(|number| {
                let message = Outgoing::new(&self.payload);
                match keys {
                    Keys::None => message,
                    Keys::New | Keys::Known => message.idempotency_key(format!("order-{number}")),
                }
            });
            let receipts = self.producer.send_all(batch).await?;
            let duplicates = receipts.iter().filter(|receipt| receipt.is_duplicate()).count();
            let expected = if matches!(keys, Keys::Known) { receipts.len() } else { 0 };
            anyhow::ensure!(
                duplicates == expected,
                "{duplicates} of {} messages are duplicates, not {expected}",
                receipts.len()
            );
            sent += receipts.len();
        }
        Ok(sent)
    }
}

fn print_facts(facts: &Facts) -> anyhow::Result<()> {
    let Facts { connections, batch, bytes, postgresql, .. } = facts;
    print(format_args!(
        "{connections} at once, batches of {batch}, {bytes} bytes each. {postgresql}\n"
    ))?;
    for (what, rate) in [
        ("without keys", facts.without_keys_per_second),
        ("with new keys", facts.with_keys_per_second),
        ("with known keys", facts.duplicates_per_second),
    ] {
        print(format_args!("{what:<16} {:>8} messages/s", thousands(rate as u64)))?;
    }
    let Facts { ratio, target, .. } = facts;
    let holds = if facts.target_met { "holds" } else { "does not hold" };
    print(format_args!("{:<16} {ratio:>8.2}, and the target of {target} {holds}", "ratio"))
}
