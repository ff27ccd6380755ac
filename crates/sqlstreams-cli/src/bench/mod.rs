//! `sqlstreams bench …`: what is promised, measured on the machine at hand.
//!
//! Each member runs in a stream of its own ([`place`]), on the given database or on a private server, and returns facts,
//! which `--json` prints as they are.

mod chaos;
mod delay;
mod keys;
mod latency;
mod ordered;
mod place;
mod routing;
mod server;
mod transactional;

use std::process::ExitCode;

use clap::Subcommand;

use crate::context::Context;

#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// How long a message takes from its producer to a handler
    Latency(latency::LatencyArgs),
    /// What it costs to settle in the handlers' transactions
    Transactional(transactional::TransactionalArgs),
    /// What it costs to keep the messages of a key in order
    Ordered(ordered::OrderedArgs),
    /// How fast a group with sparse bindings gets through the log
    Routing(routing::RoutingArgs),
    /// What idempotency keys cost
    Keys(keys::KeysArgs),
    /// What delayed messages cost, and how late they come
    Delay(delay::DelayArgs),
    /// Kill and freeze consumers, and count what was lost or done twice
    Chaos(chaos::ChaosArgs),
    /// A consumer of `bench chaos`, which starts it
    #[command(hide = true)]
    ChaosWorker(chaos::WorkerArgs),
}

pub(crate) async fn run(command: BenchCommand, context: &Context) -> anyhow::Result<ExitCode> {
    match command {
        BenchCommand::Latency(args) => latency::run(args, context).await,
        BenchCommand::Transactional(args) => transactional::run(args, context).await,
        BenchCommand::Ordered(args) => ordered::run(args, context).await,
        BenchCommand::Routing(args) => routing::run(args, context).await,
        BenchCommand::Keys(args) => keys::run(args, context).await,
        BenchCommand::Delay(args) => delay::run(args, context).await,
        BenchCommand::Chaos(args) => chaos::run(args, context).await,
        BenchCommand::ChaosWorker(args) => chaos::run_worker(args, context).await,
    }
}
