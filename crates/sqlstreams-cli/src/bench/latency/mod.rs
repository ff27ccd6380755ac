//! `sqlstreams bench latency`.

mod bare;
mod client;
mod facts;
mod measure;
mod ping;
mod plan;
mod report;
mod sender;
mod targets;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;

pub(crate) use self::bare::TABLE;
use self::facts::Facts;
use self::ping::Ping;
use self::plan::Plan;
use super::measured;
use super::place::Place;
use crate::context::Context;
use crate::progress::Progress;
use crate::values;

/// What is not counted, at the beginning.
const WARM_UP: Duration = Duration::from_secs(2);
/// The same where it is to be brief.
const QUICK_WARM_UP: Duration = Duration::from_secs(1);

const AFTER_HELP: &str = "\
Sends one message after the other at a steady rate, each durable by itself, and has a consumer in
the same process handle them. A message's time begins when it was due: if the one before it takes
long, it is sent all the same, and if that is impossible its waiting counts. What is printed:
  bare insert+commit  a row inserted over a plain connection, as the reference
  commit              until the send call returned: the message is durable
  produce → handler   until the handler began
  handler − commit    the difference, message by message; less than nothing if the handler was first
  sent too late       how late the benchmark itself was, which is part of the times above
The first 2 s are not counted, with --quick the first. Without a database it starts a private PostgreSQL, as durable as any.
The exit code is 0 once it has measured, whether the targets hold or not: ask for .targets_met.

Examples:
  sqlstreams bench latency
  sqlstreams bench latency --rate 2000 --for 1m --payload-bytes 1000
  sqlstreams bench latency --no-listener
  sqlstreams bench latency --for 10s --json | jq '.produce_to_handler_ms.p99, .targets_met'";

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct LatencyArgs {
    /// Messages a second
    #[arg(long, value_name = "N", default_value_t = 500,
          value_parser = clap::value_parser!(u32).range(1..=100_000))]
    rate: u32,
    /// How long to measure, after the warm-up
    #[arg(long = "for", value_name = "DURATION", default_value = "30s",
          value_parser = values::duration)]
    time: Duration,
    /// Let the consumer poll instead of being told of new messages
    #[arg(long)]
    no_listener: bool,
    /// How long each payload is
    #[arg(long, value_name = "N", default_value_t = 256,
          value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    payload_bytes: u32,
    /// Warm up and measure the reference briefly
    #[arg(long)]
    quick: bool,
}

/// The group that handles.
const GROUP: &str = "bench";

pub(crate) async fn run(args: LatencyArgs, context: &Context) -> anyhow::Result<ExitCode> {
    let work = async |place: &mut Place<Ping>| measure(&args, context, place).await;
    let facts = measured(context, "bench_latency_", &[TABLE], work, report::print_facts).await?;
    Ok(facts.err().unwrap_or(ExitCode::SUCCESS))
}

pub(crate) async fn measure(
    args: &LatencyArgs,
    context: &Context,
    place: &mut Place<Ping>,
) -> anyhow::Result<Facts> {
    let (bytes, listener) = (usize::try_from(args.payload_bytes)?, !args.no_listener);
    context.say("measuring bare inserts");
    let bare = bare::measure(place, args.rate, bytes, args.quick).await?;

    context.say("measuring messages");
    let client = client::client(&place.url, context, listener).await?;
    let stream = client.stream::<Ping>(place.stream.name()).open().await?;
    let warm_up = if args.quick { QUICK_WARM_UP } else { WARM_UP };
    let plan = Plan::new(Instant::now(), args.rate, warm_up, args.time);
    let progress = Progress::new(context, Some(plan.total), "messages");
    // Clients of their own, as in two processes: neither knows of the other but through the server.
    let group = stream.group(GROUP).create().await?;
    let producer = place.stream.producer();
    let measured = measure::measure(plan, bytes, producer, group, &progress).await;
    progress.clear();
    let measured = measured?;

    let (commit, handler) = (measured.commit.percentiles(), measured.handler.percentiles());
    let targets = targets::targets(commit, handler, listener);
    Ok(Facts {
        sqlstreams: env!("CARGO_PKG_VERSION"),
        postgresql: place.server.clone(),
        rate: args.rate,
        seconds: args.time.as_secs_f64(),
        payload_bytes: bytes,
        listener,
        bare_commit_ms: bare.percentiles(),
        commit_ms: commit,
        produce_to_handler_ms: handler,
        handler_minus_commit_ms: measured.difference.percentiles(),
        sent_late_ms: measured.lateness.percentiles(),
        produce_to_handler_histogram: measured.handler.bars(),
        targets_met: targets.iter().all(|target| target.met),
        targets,
    })
}
