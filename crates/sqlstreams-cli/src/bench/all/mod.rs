//! `sqlstreams bench all`.

mod html;
mod plan;
mod svg;

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use serde::Serialize;
use serde_json::{Map, Value};
use sqlstreams::{Codec, Json};

use self::plan::Member;
use super::place::{self, Place};
use super::report::{Chart, Report};
use super::versus::{Kind, Verdict, number};
use super::{
    consume, failures, fanout, growth, horizon, idle, latency, ordered, pipeline, produce,
};
use crate::context::{Context, Database};
use crate::failure::Failure;
use crate::output::{print, print_json, print_table, table};
use crate::signals::Signals;

const AFTER_HELP: &str = "\
Runs produce, consume, pipeline, latency, fanout, ordered, failures, horizon, growth and idle one
after the other on one server, with their defaults, which takes about half an hour, or with `--quick`
with small ones, in less than 90 seconds on two processors that have nothing else to do. Each prints
its own table below the command that runs it by itself; at the end comes a table of all targets.
`--html` writes a page with charts, which needs nothing but a browser.

The exit code is 1 on a gross miss, which no machine is to blame for:
  - a ratio below half of its target, or a cost above twice its limit: both are of two things that
    were measured beside each other
  - a count beyond twice its limit: WAL bytes per message, write transactions per message, statements
    of idle streams, messages out of order or lost
Rates and times are the machine's: however they miss their targets, the exit code is 0.
Without a database it starts a private PostgreSQL.

Examples:
  sqlstreams bench all --quick
  sqlstreams bench all --html report.html
  sqlstreams bench all --quick --only consume,pipeline
  sqlstreams bench all --quick --json | jq '.targets[] | select(.met | not)'";

#[derive(Debug, Clone, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct AllArgs {
    /// Measure briefly, which says little about rates, and enough about ratios and counts
    #[arg(long)]
    quick: bool,
    /// Run these, instead of all
    #[arg(long, value_name = "NAME,NAME", value_enum, value_delimiter = ',')]
    only: Vec<Member>,
    /// Write a page with charts
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

/// What one of them found.
struct Section {
    name: String,
    command: String,
    seconds: f64,
    facts: Value,
    verdicts: Vec<Verdict>,
    charts: Vec<Chart>,
}

/// A target, and whose it is.
#[derive(Debug, Clone, Serialize)]
struct Target {
    bench: String,
    #[serde(flatten)]
    verdict: Verdict,
    gross: bool,
}

pub(crate) async fn run(args: AllArgs, context: &Context) -> anyhow::Result<ExitCode> {
    if let Some(file) = &args.html {
        // Before half an hour has passed.
        fs::write(file, "").map_err(|error| not_written(file, &error))?;
    }
    let signals = Signals::catch()?;
    let interrupted = || ExitCode::from(signals.exit_code().unwrap_or(130));
    let start = signals.stop.run_until_cancelled(context.given_or_throw_away());
    let Some(database) = start.await else { return Ok(interrupted()) };
    let database = database?;
    let running = Running { context, signals: &signals, database: &database };
    let sections = running.all(&args).await;
    // The server goes before anybody hears that it is gone.
    database.close().await;
    let Some(sections) = sections? else { return Ok(interrupted()) };

    let targets = targets(&sections);
    match context.json() {
        true => print_json(&document(&args, &sections, &targets)?)?,
        false => print_targets(&targets)?,
    }
    if let Some(file) = &args.html {
        let page = html::page(&sections, &targets);
        fs::write(file, page).map_err(|error| not_written(file, &error))?;
    }
    let gross = targets.iter().any(|target| target.gross);
    Ok(if gross { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn not_written(file: &std::path::Path, error: &std::io::Error) -> Failure {
    Failure::failed("not_written", format!("could not write {}: {error}", file.display()))
}

/// What all of them run with.
struct Running<'a> {
    context: &'a Context,
    signals: &'a Signals,
    database: &'a Database,
}

impl Running<'_> {
    /// Nothing when interrupted.
    async fn all(&self, args: &AllArgs) -> anyhow::Result<Option<Vec<Section>>> {
        let mut sections = Vec::new();
        for member in Member::value_variants() {
            if !args.only.is_empty() && !args.only.contains(member) {
                continue;
            }
            match self.member(*member, args.quick).await? {
                Some(section) => sections.push(section),
                None => return Ok(None),
            }
        }
        Ok(Some(sections))
    }

    async fn member(&self, member: Member, quick: bool) -> anyhow::Result<Option<Section>> {
        // One future at a time, and none of them small.
        match member {
            Member::Produce => Box::pin(self.one(member, quick, &[], produce::measure)).await,
            Member::Consume => Box::pin(self.one(member, quick, &[], consume::measure)).await,
            Member::Pipeline => {
                Box::pin(self.one(member, quick, &[pipeline::CURSOR], pipeline::measure)).await
            }
            Member::Latency => {
                Box::pin(self.one(member, quick, &[latency::TABLE], latency::measure)).await
            }
            Member::Fanout => Box::pin(self.one(member, quick, &[], fanout::measure)).await,
            Member::Ordered => Box::pin(self.one(member, quick, &[], ordered::measure)).await,
            Member::Failures => Box::pin(self.one(member, quick, &[], failures::measure)).await,
            Member::Horizon => Box::pin(self.one(member, quick, &[], horizon::measure)).await,
            Member::Growth => Box::pin(self.one(member, quick, &[], growth::measure)).await,
            Member::Idle => Box::pin(self.one(member, quick, &[], idle::measure)).await,
        }
    }

    async fn one<A: Args, T, F: Report>(
        &self,
        member: Member,
        quick: bool,
        tables: &[&str],
        measure: impl AsyncFnOnce(&A, &Context, &mut Place<T>) -> anyhow::Result<F>,
    ) -> anyhow::Result<Option<Section>>
    where
        T: Send + Sync + 'static,
        Json: Codec<T>,
    {
        let context = self.context;
        let command = format!("sqlstreams bench {}", member.line(quick));
        let args = member.args::<A>(quick)?;
        context.say(&command);
        let begun = Instant::now();
        let prefix = format!("bench_{}_", member.name());
        let work = async |place: &mut Place<T>| measure(&args, context, place).await;
        let done =
            place::on(self.database, context, self.signals, &prefix, tables, true, work).await;
        let done = done.with_context(|| format!("`{command}` did not come to its end"));
        let Some(facts) = done? else { return Ok(None) };
        if !context.json() {
            print(format_args!("== {command}"))?;
            facts.print()?;
            print(format_args!("took {:.0} s\n", begun.elapsed().as_secs_f64()))?;
        }
        Ok(Some(Section {
            name: member.name(),
            command,
            seconds: begun.elapsed().as_secs_f64(),
            facts: serde_json::to_value(&facts)?,
            verdicts: facts.verdicts(),
            charts: facts.charts(),
        }))
    }
}

fn targets(sections: &[Section]) -> Vec<Target> {
    let of = |section: &Section| {
        let target = |verdict: &Verdict| Target {
            bench: section.name.clone(),
            verdict: verdict.clone(),
            gross: verdict.is_gross(),
        };
        section.verdicts.iter().map(target).collect::<Vec<_>>()
    };
    sections.iter().flat_map(of).collect()
}

/// The document that `--json` prints.
fn document(args: &AllArgs, sections: &[Section], targets: &[Target]) -> anyhow::Result<Value> {
    #[derive(Serialize)]
    struct Document<'a> {
        sqlstreams: &'static str,
        quick: bool,
        benches: Map<String, Value>,
        seconds: Map<String, Value>,
        targets: &'a [Target],
        targets_met: bool,
        gross: bool,
    }
    Ok(serde_json::to_value(Document {
        sqlstreams: env!("CARGO_PKG_VERSION"),
        quick: args.quick,
        benches: sections.iter().map(|one| (one.name.clone(), one.facts.clone())).collect(),
        seconds: sections.iter().map(|one| (one.name.clone(), one.seconds.into())).collect(),
        targets,
        targets_met: targets.iter().all(|target| target.verdict.met),
        gross: targets.iter().any(|target| target.gross),
    })?)
}

/// How a target is told in one word, and how it is compared.
fn words(target: &Target) -> (&'static str, &'static str) {
    let word = match (target.verdict.met, target.gross) {
        (true, _) => "met",
        (false, false) => "missed",
        (false, true) => "MISSED GROSSLY",
    };
    let sign = match target.verdict.kind {
        Kind::Ratio | Kind::Rate => "≥",
        Kind::Cost | Kind::Count | Kind::Time => "≤",
    };
    (word, sign)
}

fn print_targets(targets: &[Target]) -> anyhow::Result<()> {
    print("== All targets")?;
    let mut rows = table(&["bench", "what", "#measured", "#target", ""]);
    for target in targets {
        let (word, sign) = words(target);
        let Verdict { what, measured, target: limit, .. } = &target.verdict;
        let limit = format!("{sign} {}", number(*limit));
        rows.add_row([&target.bench, what, &number(*measured), &limit, word]);
    }
    print_table(&rows)
}
