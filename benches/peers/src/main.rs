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

/// The script prints it before anything is built.
const HELP: &str = include_str!("../help.txt");

/// As [`HELP`] says.
#[derive(Debug, Parser)]
#[command(name = "bench-peers", override_help = HELP)]
struct Args {
    #[arg(long = "peer")]
    peers: Vec<Which>,
    #[arg(long)]
    without: Vec<Which>,
    #[arg(long, value_parser = clap::value_parser!(u32).range(40..=1_000_000))]
    bytes: Vec<u32>,
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    #[arg(long)]
    seconds: Option<f64>,
    #[arg(long, default_value_t = 200_000,
          value_parser = clap::value_parser!(u64).range(1..=100_000_000))]
    messages: u64,
    #[arg(long)]
    quick: bool,
    #[arg(long)]
    json: bool,
    #[arg(long)]
    markdown: Option<PathBuf>,
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Where the script has put what it fetched; it tells by the variable.
    #[arg(long, env = "BENCH_PEERS_TOOLS", hide = true)]
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
            // Itself beside itself is measured only when asked for.
            [] => !matches!(which, Which::Sqlstreams | Which::SqlstreamsBatches),
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

/// A signal ends the run by dropping it, and with it every server. What was measured until then is reported.
async fn until_interrupted(args: &Args) -> Result<ExitCode> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut facts = None;
    let interrupted = tokio::select! {
        done = run_all(args, &mut facts) => { done?; None }
        _ = interrupt.recv() => Some(130),
        _ = terminate.recv() => Some(143),
    };
    if interrupted.is_some() {
        eprintln!("bench-peers: interrupted; its servers are stopped");
    }
    let Some(facts) = facts.filter(|facts| !facts.peers.is_empty()) else {
        return Ok(ExitCode::from(interrupted.unwrap_or(0)));
    };
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
    let failed = u8::from(facts.peers.iter().any(broken));
    Ok(ExitCode::from(interrupted.unwrap_or(failed)))
}

async fn run_all(args: &Args, facts: &mut Option<Facts>) -> Result<()> {
    let begun = Instant::now();
    let (dir, tools) = (args.dir.clone(), args.tools.clone());
    let place = tokio::task::spawn_blocking(move || Place::open(dir.as_deref(), tools)).await??;
    let machine = Machine::look_at(&place).await?;
    let plan = args.plan();
    let facts = facts.insert(Facts {
        machine,
        plan: plan.clone(),
        seconds: 0.0,
        sqlstreams: Which::Sqlstreams.open(place.clone()).await?.settings(),
        peers: Vec::new(),
    });
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
        facts.seconds = begun.elapsed().as_secs_f64();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_help_names_every_option_and_peer() {
        let command = Args::command();
        let options = command.get_arguments().filter(|option| !option.is_hide_set());
        for option in options.filter_map(|option| option.get_long()) {
            assert!(HELP.contains(&format!(" --{option} ")), "--{option}");
        }
        for which in Which::value_variants() {
            let name = which.to_possible_value().unwrap();
            assert!(HELP.contains(name.get_name()), "{}", name.get_name());
        }
    }

    #[test]
    fn without_choices_all_peers_run() {
        let args = Args::parse_from(["bench-peers", "--tools", "t", "--without", "redis"]);
        let peers = args.peers();
        assert_eq!(peers.len(), Which::value_variants().len() - 3);
        assert!(!peers.contains(&Which::Redis) && !peers.contains(&Which::Sqlstreams));
    }
}
