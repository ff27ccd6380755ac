//! SQLStreams beside its peers: `scripts/bench-peers`.

mod cpu;
mod machine;
mod measure;
mod messages;
mod peer;
mod peers;
mod place;
mod process;
mod report;
mod run;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use clap::{Parser, ValueEnum as _};
use tokio::signal::unix::{SignalKind, signal};

use self::machine::Machine;
use self::peers::Which;
use self::place::Place;
use self::report::Facts;
use self::run::Plan;

const AFTER_HELP: &str = "\
Each peer runs in turn, alone, with its own best way to move many messages. A round measures
SQLStreams and then the peer, each on a queue that is new and empty:
  produce   messages are stored by the bulk path
  send      64 tasks send one message at a time; each waits until it is stored
  consume   what was produced is received and acknowledged by the bulk path
  pipeline  both at once
The figures are medians of the rounds; ratios are made round by round. How many messages a
measurement moves follows from the peer's rate, so that slow ones end, too. Everything is durable
(PostgreSQL: fsync and synchronous_commit on) but where the report says otherwise, and every
message has to arrive: a peer that loses one has failed. The settings of each peer are printed.
Servers run on this machine, in a folder of their own that goes with the run.

Examples:
  scripts/bench-peers --quick
  scripts/bench-peers --peer pgmq --peer rabbitmq --bytes 1000
  scripts/bench-peers --markdown peers.md --json > peers.json";

/// SQLStreams measured beside its peers, on the same machine in the same run
#[derive(Debug, Parser)]
#[command(name = "bench-peers", after_help = AFTER_HELP)]
struct Args {
    /// Only this peer; may be given more than once
    #[arg(long = "peer", value_name = "PEER")]
    peers: Vec<Which>,
    /// Not this one; may be given more than once
    #[arg(long, value_name = "PEER")]
    without: Vec<Which>,
    /// Payload sizes; may be given more than once [default: 1000 and 100; 1000 with --quick]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(40..=1_000_000))]
    bytes: Vec<u32>,
    /// How often everything is measured
    #[arg(long, value_name = "N", default_value_t = 3,
          value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// About how long a measurement takes [default: 0.7; 0.4 with --quick]
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<f64>,
    /// The most messages of a measurement
    #[arg(long, value_name = "N", default_value_t = 200_000,
          value_parser = clap::value_parser!(u64).range(1..=100_000_000))]
    messages: u64,
    /// A run of less than 3 minutes
    #[arg(long)]
    quick: bool,
    /// Print all figures as JSON instead of tables
    #[arg(long)]
    json: bool,
    /// Write a table for a Markdown page to this file, too
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
    /// Where servers keep their data [default: the system's temporary folder]
    #[arg(long, value_name = "FOLDER")]
    dir: Option<PathBuf>,
    /// Where scripts/bench-peers has put what it installed
    #[arg(long, value_name = "FOLDER", env = "BENCH_PEERS_TOOLS", hide = true)]
    tools: PathBuf,
}

impl Args {
    fn plan(&self) -> Plan {
        let payload_bytes = match (self.bytes.as_slice(), self.quick) {
            ([], true) => vec![1_000],
            ([], false) => vec![1_000, 100],
            (bytes, _) => bytes.iter().map(|&bytes| bytes as usize).collect(),
        };
        let seconds = self.seconds.unwrap_or(if self.quick { 0.4 } else { 0.7 });
        Plan { payload_bytes, rounds: self.rounds, seconds, messages: self.messages }
    }

    fn peers(&self) -> Vec<Which> {
        let all = Which::value_variants().iter().copied();
        let wanted = |which: &Which| match self.peers.as_slice() {
            // Beside itself it is measured only when asked for.
            [] => *which != Which::Sqlstreams,
            peers => peers.contains(which),
        };
        all.filter(|which| wanted(which) && !self.without.contains(which)).collect()
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    let done = tokio::runtime::Runtime::new().context("could not start").and_then(|runtime| {
        let done = runtime.block_on(until_interrupted(&args));
        // Whatever still runs belongs to a peer whose server is gone.
        runtime.shutdown_timeout(Duration::from_secs(2));
        done
    });
    match done {
        Ok(code) => code,
        Err(error) => {
            eprintln!("bench-peers: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// A signal ends the run by dropping it, and with it every server.
async fn until_interrupted(args: &Args) -> Result<ExitCode> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let code = tokio::select! {
        code = run_all(args) => return code,
        _ = interrupt.recv() => 130,
        _ = terminate.recv() => 143,
    };
    eprintln!("bench-peers: interrupted; its servers are stopped");
    Ok(ExitCode::from(code))
}

async fn run_all(args: &Args) -> Result<ExitCode> {
    let begun = Instant::now();
    let (dir, tools) = (args.dir.clone(), args.tools.clone());
    let place = tokio::task::spawn_blocking(move || Place::open(dir.as_deref(), tools)).await??;
    let machine = Machine::look_at(&place).await?;
    let plan = args.plan();
    let mut facts = Facts {
        machine,
        plan: plan.clone(),
        seconds: 0.0,
        sqlstreams: Which::Sqlstreams.open(place.clone()).await?.settings(),
        peers: Vec::new(),
    };
    let mut next = 0;
    for which in args.peers() {
        let say = |what: &str| {
            eprintln!("{:>4.0} s  {}: {what}", begun.elapsed().as_secs_f64(), which.title());
        };
        let outcome = run::run(which, &place, &plan, &mut next, &say).await;
        if let Some(why) = &outcome.not_run {
            say(why);
        }
        facts.peers.push(outcome);
    }
    facts.seconds = begun.elapsed().as_secs_f64();
    if let Some(file) = &args.markdown {
        std::fs::write(file, facts.markdown())
            .with_context(|| format!("could not write {}", file.display()))?;
    }
    match args.json {
        true => println!("{}", serde_json::to_string_pretty(&facts)?),
        false => println!("{}", facts.table()),
    }
    // A peer that is not there is no failure of the run; one that broke down in the midst of it is.
    let broken = |outcome: &run::Outcome| outcome.not_run.is_some() && !outcome.pairs.is_empty();
    Ok(if facts.peers.iter().any(broken) { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
