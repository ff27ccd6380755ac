//! `sqlstreams bench ordered`.

mod measure;
mod others;

use std::process::ExitCode;

use clap::Args;
use serde::Serialize;
use sqlstreams::{Mode, Outgoing};

use self::measure::Drained;
use self::others::{Beside, Times};
use super::measured;
use super::place::Place;
use super::report::{Bar, Chart, Report};
use super::server::Server;
use super::versus::{Kind, Verdict};
use crate::context::Context;
use crate::output::{print, thousands};

/// What an ordered group has to reach of a parallel one's rate.
const TARGET: f64 = 0.7;
/// How often the two take turns.
const ROUNDS: u32 = 2;
/// Characters of a payload.
const PAYLOAD: usize = 1_000;

const AFTER_HELP: &str = "\
What it costs that messages of one key are handled one at a time and in order: how fast an ordered
group goes through a stream, beside a parallel group on the same messages, in turns, in the same
run. The handlers do nothing but look at the order. Then it measures how long messages of many keys
take to their handlers: by themselves, beside one key of which 100,000 messages wait (with
--quick 10,000) whose handler takes 10 ms, and beside one whose first message always fails. Without a database it starts a private
PostgreSQL. The exit code is 1 if a message came out of order, and 0 else, whether the target holds
or not: ask for .target_met.

Examples:
  sqlstreams bench ordered
  sqlstreams bench ordered --consumers 4 --keys 100
  sqlstreams bench ordered --json | jq '.ratio, .others_beside_a_backlog_ms'";

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct OrderedArgs {
    /// Messages of 1 KB [default: 200000; with --quick 40000]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000_000))]
    messages: Option<u32>,
    /// Keys, which the messages have in turn
    #[arg(long, value_name = "N", default_value_t = 10_000,
          value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    keys: u32,
    /// Consumers, each with connections of its own
    #[arg(long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u16).range(1..=64))]
    consumers: u16,
    /// Handlers of each consumer
    #[arg(long, value_name = "N", default_value_t = 16,
          value_parser = clap::value_parser!(u16).range(1..=1_000))]
    concurrency: u16,
    /// Measure briefly
    #[arg(long)]
    quick: bool,
}

impl OrderedArgs {
    fn messages(&self) -> u32 {
        self.messages.unwrap_or(if self.quick { 40_000 } else { 200_000 })
    }
}

/// What was measured: the document that `--json` prints.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Facts {
    sqlstreams: &'static str,
    postgresql: Server,
    messages: u32,
    keys: u32,
    consumers: u16,
    parallel_per_second: f64,
    ordered_per_second: f64,
    /// The second by the first.
    ratio: f64,
    target: f64,
    target_met: bool,
    /// Messages of the ordered group that were handled after a later one of their key.
    out_of_order: u64,
    others_ms: Times,
    others_beside_a_backlog_ms: Times,
    others_beside_a_failing_key_ms: Times,
}

pub(crate) async fn run(args: OrderedArgs, context: &Context) -> anyhow::Result<ExitCode> {
    let work = async |place: &mut Place<String>| measure(&args, context, place).await;
    Ok(match measured(context, "bench_ordered_", &[], work, print_facts).await? {
        Err(interrupted) => interrupted,
        Ok(facts) if facts.out_of_order > 0 => ExitCode::FAILURE,
        Ok(_) => ExitCode::SUCCESS,
    })
}

pub(crate) async fn measure(
    args: &OrderedArgs,
    context: &Context,
    place: &mut Place<String>,
) -> anyhow::Result<Facts> {
    context.say(&format!("producing {} messages", thousands(u64::from(args.messages()))));
    let payload = "x".repeat(PAYLOAD);
    let producer = place.stream.producer();
    let numbers: Vec<u32> = (0..args.messages()).collect();
    for batch in numbers.chunks(5_000) {
        let key = |n: &u32| (n % args.keys).to_string();
        producer.send_all(batch.iter().map(|n| Outgoing::new(&payload).key(key(n)))).await?;
    }
    let (mut parallel, mut ordered) = (0.0, 0.0);
    let mut out_of_order = 0;
    for round in 0..ROUNDS {
        for mode in [Mode::Parallel, Mode::Ordered] {
            context.say(&format!("measuring, round {} of {ROUNDS}, {mode}", round + 1));
            let group = format!("{mode}-{round}");
            let Drained { rate, out_of_order: wrong } =
                measure::drain(args, context, place, &group, mode).await?;
            match mode {
                Mode::Ordered => {
                    ordered += rate / f64::from(ROUNDS);
                    out_of_order += wrong;
                }
                _ => parallel += rate / f64::from(ROUNDS),
            }
        }
    }
    let times = async |beside| {
        context.say("measuring how long messages of other keys take");
        others::times(context, place, beside, args.quick).await
    };
    let ratio = ordered / parallel.max(f64::MIN_POSITIVE);
    Ok(Facts {
        sqlstreams: env!("CARGO_PKG_VERSION"),
        postgresql: place.server.clone(),
        messages: args.messages(),
        keys: args.keys,
        consumers: args.consumers,
        parallel_per_second: parallel,
        ordered_per_second: ordered,
        ratio,
        target: TARGET,
        target_met: ratio >= TARGET,
        out_of_order,
        others_ms: times(Beside::Nothing).await?,
        others_beside_a_backlog_ms: times(Beside::Backlog).await?,
        others_beside_a_failing_key_ms: times(Beside::Failing).await?,
    })
}

impl Report for Facts {
    fn print(&self) -> anyhow::Result<()> {
        print_facts(self)
    }

    fn verdicts(&self) -> Vec<Verdict> {
        vec![
            Verdict::new("ordered / parallel", Kind::Ratio, self.ratio, self.target),
            Verdict::new("messages out of order", Kind::Count, self.out_of_order as f64, 0.0),
        ]
    }

    fn charts(&self) -> Vec<Chart> {
        let ordered = Bar::of("ordered", self.ordered_per_second);
        let parallel = Bar::of("parallel", self.parallel_per_second);
        let bars = vec![parallel, ordered.marked(self.parallel_per_second * self.target)];
        vec![Chart::plain("ordered: rates", "messages/s", bars)]
    }
}

fn print_facts(facts: &Facts) -> anyhow::Result<()> {
    print(format_args!(
        "{} messages of {} keys, {} consumers. {}\n",
        thousands(u64::from(facts.messages)),
        thousands(u64::from(facts.keys)),
        facts.consumers,
        facts.postgresql
    ))?;
    for (what, rate) in
        [("parallel", facts.parallel_per_second), ("ordered", facts.ordered_per_second)]
    {
        print(format_args!("{what:<12} {:>9} messages/s", thousands(rate as u64)))?;
    }
    print(format_args!("{:<12} {:>9}", "out of order", thousands(facts.out_of_order)))?;
    let Facts { ratio, target, .. } = facts;
    let holds = if facts.target_met { "holds" } else { "does not hold" };
    print(format_args!("{:<12} {ratio:>9.2}, and the target of {target} {holds}\n", "ratio"))?;
    print(format_args!("{:<26} {:>9} {:>9} {:>9}", "other keys", "p50 ms", "p95 ms", "waiting"))?;
    for (what, Times { p50, p95, waiting }) in [
        ("by themselves", facts.others_ms),
        ("beside a backlog", facts.others_beside_a_backlog_ms),
        ("beside a key that fails", facts.others_beside_a_failing_key_ms),
    ] {
        print(format_args!("{what:<26} {p50:>9.1} {p95:>9.1} {waiting:>9}"))?;
    }
    Ok(())
}
