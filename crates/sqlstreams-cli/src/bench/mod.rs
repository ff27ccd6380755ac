//! `sqlstreams bench …`: what is promised, measured on the machine at hand.
//!
//! Each member runs in a stream of its own ([`place`]), on the given database or on a private server, and returns facts,
//! which `--json` prints as they are.

mod all;
mod chaos;
mod consume;
mod delay;
mod failures;
mod fair;
mod fanout;
mod followers;
mod growth;
mod horizon;
mod idle;
mod keys;
mod latency;
mod ordered;
mod pipeline;
mod place;
mod produce;
mod report;
mod routing;
mod server;
mod soak;
mod spread;
mod transactional;
mod versus;
mod workload;

use std::process::ExitCode;

use clap::Subcommand;
use serde::Serialize;
use sqlstreams::{Codec, Json};

use self::place::{Place, on_own_stream};
use crate::context::Context;
use crate::output::print_json;
use crate::signals::Signals;

#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Most of them one after the other, with all targets in one table, or as a page with charts
    All(all::AllArgs),
    /// How fast messages are stored, beside the best the server can do
    Produce(produce::ProduceArgs),
    /// How fast a group gets through the log, beside the best the server can do
    Consume(consume::ConsumeArgs),
    /// How fast messages pass through, in and out at once
    Pipeline(pipeline::PipelineArgs),
    /// How long a message takes from its producer to a handler
    Latency(latency::LatencyArgs),
    /// What it costs that many groups read the same log
    Fanout(fanout::FanoutArgs),
    /// How fast a mass failure is recorded, and done once it is mended
    Failures(failures::FailuresArgs),
    /// What a snapshot costs that another session holds
    Horizon(horizon::HorizonArgs),
    /// What streams cost of which nothing comes
    Idle(idle::IdleArgs),
    /// What it costs to settle in the handlers' transactions
    Transactional(transactional::TransactionalArgs),
    /// What it costs to keep the messages of a key in order
    Ordered(ordered::OrderedArgs),
    /// What fairness between tenants costs, and what it is good for
    Fair(fair::FairArgs),
    /// How fast a group with sparse bindings gets through the log
    Routing(routing::RoutingArgs),
    /// What idempotency keys cost
    Keys(keys::KeysArgs),
    /// What delayed messages cost, and how late they come
    Delay(delay::DelayArgs),
    /// What the size of a log costs
    Growth(growth::GrowthArgs),
    /// Partitions that are made and go all the time, for as long as you like
    Soak(soak::SoakArgs),
    /// Kill and freeze consumers, and count what was lost or done twice
    Chaos(chaos::ChaosArgs),
    /// A consumer of `bench chaos`, which starts it
    #[command(hide = true)]
    ChaosWorker(chaos::WorkerArgs),
}

pub(crate) async fn run(command: BenchCommand, context: &Context) -> anyhow::Result<ExitCode> {
    match command {
        BenchCommand::All(args) => all::run(args, context).await,
        BenchCommand::Produce(args) => produce::run(args, context).await,
        BenchCommand::Consume(args) => consume::run(args, context).await,
        BenchCommand::Pipeline(args) => pipeline::run(args, context).await,
        BenchCommand::Latency(args) => latency::run(args, context).await,
        BenchCommand::Fanout(args) => fanout::run(args, context).await,
        BenchCommand::Failures(args) => failures::run(args, context).await,
        BenchCommand::Horizon(args) => horizon::run(args, context).await,
        BenchCommand::Idle(args) => idle::run(args, context).await,
        BenchCommand::Transactional(args) => transactional::run(args, context).await,
        BenchCommand::Ordered(args) => ordered::run(args, context).await,
        BenchCommand::Fair(args) => fair::run(args, context).await,
        BenchCommand::Routing(args) => routing::run(args, context).await,
        BenchCommand::Keys(args) => keys::run(args, context).await,
        BenchCommand::Delay(args) => delay::run(args, context).await,
        BenchCommand::Growth(args) => growth::run(args, context).await,
        BenchCommand::Soak(args) => soak::run(args, context).await,
        BenchCommand::Chaos(args) => chaos::run(args, context).await,
        BenchCommand::ChaosWorker(args) => chaos::run_worker(args, context).await,
    }
}

/// Runs a member on a stream of its own, as [`on_own_stream`] does, and prints its facts: as JSON, or by `print`. The inner error is
/// the exit code of one that was interrupted.
async fn measured<T, F>(
    context: &Context,
    prefix: &str,
    tables: &[&str],
    work: impl AsyncFnOnce(&mut Place<T>) -> anyhow::Result<F>,
    print: impl FnOnce(&F) -> anyhow::Result<()>,
) -> anyhow::Result<Result<F, ExitCode>>
where
    T: Send + Sync + 'static,
    Json: Codec<T>,
    F: Serialize,
{
    let signals = Signals::catch()?;
    let Some(facts) = on_own_stream(context, &signals, prefix, tables, work).await? else {
        return Ok(Err(ExitCode::from(signals.exit_code().unwrap_or(130))));
    };
    match context.json() {
        true => print_json(&serde_json::to_value(&facts)?)?,
        false => print(&facts)?,
    }
    Ok(Ok(facts))
}
