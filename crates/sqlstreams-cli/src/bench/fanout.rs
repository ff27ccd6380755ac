//! `sqlstreams bench fanout`.

use std::process::ExitCode;
use std::time::Instant;

use anyhow::ensure;
use clap::Args;
use serde::Serialize;
use sqlstreams::{Group, Start};

use super::consume::{self, RANGE};
use super::followers::{self, Followers};
use super::measured;
use super::place::Place;
use super::produce::batches;
use super::report::{Chart, Report};
use super::server::Server;
use super::versus::{
    self, Line, Meter, Moved, Pace, Verdict, bare, contest, print_contest, print_verdict,
};
use super::workload::{Handling, Payloads};
use crate::context::Context;
use crate::output::{counted, print, thousands};

/// What many groups together have to handle of what one does by itself.
const TOGETHER: f64 = 1.0;
/// What has to be left of the rate of producing, of what the processors leave to it.
const PRODUCE: f64 = 0.9;
/// Connections that produce, and messages of each of their transactions.
const PRODUCING: (u16, usize) = (2, 250);

const AFTER_HELP: &str = "\
Many groups read the same log at once, in one process and over the connections of one client, with
handlers that do nothing: how many messages they handle a second, all together, beside one group by
itself and beside a plain connection that reads the same rows once, in turns in the same run. Then
how fast batches are produced while the most of those groups follow, beside nobody: of that rate has
to be left what the processor time leaves that they take. Without a database it starts a private
PostgreSQL. The exit code is 0 once it has measured, whether the targets hold or not: ask for
.targets_met.

Examples:
  sqlstreams bench fanout
  sqlstreams bench fanout --groups 1,32 --messages 20000
  sqlstreams bench fanout --json | jq '.reading[] | {name, per_second}'";

#[derive(Debug, Clone, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct FanoutArgs {
    /// How many groups read at once, one number after the other
    #[arg(long, value_name = "N,N", default_value = "1,4,16", value_delimiter = ',',
          value_parser = clap::value_parser!(u16).range(1..=1_000))]
    groups: Vec<u16>,
    /// Messages in the log [default: 100000; with --quick 30000]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(100..=100_000_000))]
    messages: Option<u32>,
    #[command(flatten)]
    payloads: Payloads,
    #[command(flatten)]
    handling: Handling,
    #[command(flatten)]
    pace: Pace,
}

/// What was measured: the document that `--json` prints.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Facts {
    sqlstreams: &'static str,
    postgresql: Server,
    messages: u32,
    #[serde(flatten)]
    payloads: Payloads,
    #[serde(flatten)]
    handling: Handling,
    /// Messages are counted once for each group that handles them.
    reading: Vec<Line>,
    /// Messages are counted as they are produced.
    producing: Vec<Line>,
    /// How many messages those that follow handled, by how many they should have, when producing ended.
    kept_up: f64,
    targets: Vec<Verdict>,
    targets_met: bool,
}

pub(crate) async fn run(args: FanoutArgs, context: &Context) -> anyhow::Result<ExitCode> {
    let work = async |place: &mut Place<String>| measure(&args, context, place).await;
    let facts = measured(context, "bench_fanout_", &[], work, Facts::print).await?;
    Ok(facts.err().unwrap_or(ExitCode::SUCCESS))
}

pub(crate) async fn measure(
    args: &FanoutArgs,
    context: &Context,
    place: &mut Place<String>,
) -> anyhow::Result<Facts> {
    let messages = args.messages.unwrap_or(if args.pace.quick { 30_000 } else { 100_000 });
    let meter = Meter::open(&place.url, place.server.is_throw_away()).await?;
    let reading = reading(args, context, place, &meter, messages).await?;
    let (producing, kept_up) = producing(args, context, place, &meter).await?;

    let mut targets = Vec::new();
    if let Some(many) = most(args).filter(|most| args.groups.contains(&1) && *most > 1) {
        let number = |groups| args.groups.iter().position(|n| *n == groups).map_or(0, |n| n + 1);
        let what = format!("{many} groups together / one");
        targets.push(versus::verdict(&what, &reading, number(many), &[number(1)], TOGETHER));
    }
    if let Some(left) = left_by_processors(&producing) {
        let what = "produced beside groups / by itself";
        targets.push(versus::verdict(what, &producing, 1, &[0], PRODUCE * left));
    }
    Ok(Facts {
        sqlstreams: env!("CARGO_PKG_VERSION"),
        postgresql: place.server.clone(),
        messages,
        payloads: args.payloads,
        handling: args.handling,
        reading,
        producing,
        kept_up,
        targets_met: targets.iter().all(|target| target.met),
        targets,
    })
}

fn most(args: &FanoutArgs) -> Option<u16> {
    args.groups.iter().copied().max()
}

/// The part of the rate that the processors leave, by what they have to do for each message with and without groups.
fn left_by_processors(lines: &[Line]) -> Option<f64> {
    let micros = |line: &Line| {
        let cost = &line.cost;
        Some(cost.per_message(cost.server_cpu? + cost.client_cpu?)).filter(|cpu| *cpu > 0.0)
    };
    Some((micros(&lines[0])? / micros(&lines[1])?).min(1.0))
}

/// So many new groups. They are made before any turn begins.
async fn groups(
    place: &Place<String>,
    name: &str,
    count: u16,
    start: Start,
) -> anyhow::Result<Vec<Group<String>>> {
    let mut groups = Vec::new();
    for n in 0..count {
        let group = place.stream.group(format!("{name} {n}")).start(start);
        groups.push(group.create().await?);
    }
    Ok(groups)
}

async fn reading(
    args: &FanoutArgs,
    context: &Context,
    place: &Place<String>,
    meter: &Meter,
    messages: u32,
) -> anyhow::Result<Vec<Line>> {
    let (log, range) = consume::fill(context, place, messages, &args.payloads).await?;
    let mut names = vec!["bare range read".to_owned()];
    names.extend(args.groups.iter().map(|n| counted((*n).into(), "group")));
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    // Each turn takes groups of its own, the last ones of their list.
    let mut prepared = Vec::new();
    for count in &args.groups {
        let mut rounds = Vec::new();
        for round in 0..=args.pace.rounds() {
            let name = format!("{count} in round {round}");
            rounds.push(groups(place, &name, *count, Start::Beginning).await?);
        }
        prepared.push(rounds);
    }
    contest(context, meter, args.pace.rounds(), &names, async |which| {
        let (read, times) = match which.checked_sub(1) {
            None => (bare::read(&place.url, &log, range, RANGE).await?, 1),
            Some(which) => {
                let groups = prepared[which].pop().unwrap_or_default();
                let handled = followers::go_through(&groups, args.handling.concurrency).await?;
                (handled, u64::from(args.groups[which]))
            }
        };
        let due = u64::from(messages) * times;
        ensure!(read == due, "{read} messages came of {due}");
        Ok(read)
    })
    .await
}

async fn producing(
    args: &FanoutArgs,
    context: &Context,
    place: &Place<String>,
    meter: &Meter,
) -> anyhow::Result<(Vec<Line>, f64)> {
    let many = most(args).unwrap_or(1);
    let producer = place.stream.producer();
    let payload = args.payloads.payload();
    let beside = format!("beside {}", counted(many.into(), "group"));
    let names = ["by itself", beside.as_str()];
    let (mut turn, mut handled, mut due) = (0, 0, 0);
    let lines = contest(context, meter, args.pace.rounds(), &names, async |which| {
        turn += 1;
        let following = match which {
            0 => Vec::new(),
            _ => groups(place, &format!("follower in turn {turn}"), many, Start::Latest).await?,
        };
        let followers = Followers::start(&following, args.handling.concurrency);
        let begun = Instant::now();
        let until = begun + args.pace.turn();
        let produced = batches(&producer, &payload, PRODUCING, until).await?;
        let took = Some(begun.elapsed());
        handled += followers.handled();
        due += produced.messages * following.len() as u64;
        followers.stop().await?;
        for group in following {
            group.drop_group().await?;
        }
        Ok(Moved { took, ..produced })
    });
    Ok((lines.await?, handled as f64 / due.max(1) as f64))
}

impl Report for Facts {
    fn print(&self) -> anyhow::Result<()> {
        print(format_args!(
            "{} messages of {} bytes, {} handlers of each group at once. {}\n",
            thousands(self.messages),
            self.payloads.bytes,
            self.handling.concurrency,
            self.postgresql
        ))?;
        print("Reading, counted once for each group:")?;
        print_contest(&self.reading)?;
        print("\nProducing:")?;
        print_contest(&self.producing)?;
        let kept_up = self.kept_up * 100.0;
        print(format_args!(
            "The groups had handled {kept_up:.0} % of that, each, when it ended.\n"
        ))?;
        print_verdict(&self.targets)
    }

    fn verdicts(&self) -> Vec<Verdict> {
        self.targets.clone()
    }

    fn charts(&self) -> Vec<Chart> {
        let read = Chart::of_lines("fanout, reading", &self.reading, &[]);
        let produced = Chart::of_lines("fanout, producing", &self.producing, &[]);
        [read, produced].concat()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::versus::Cost;

    #[test]
    fn what_is_left_is_told_by_the_processors() {
        let line = |server_cpu| {
            let cost = Cost { messages: 10, server_cpu, client_cpu: Some(1.0), ..Cost::default() };
            Line::new("it", vec![1.0], cost, None)
        };
        assert_eq!(left_by_processors(&[line(Some(1.0)), line(Some(3.0))]), Some(0.5));
        // One that costs less beside others was measured badly, and need not be faster for it.
        assert_eq!(left_by_processors(&[line(Some(3.0)), line(Some(1.0))]), Some(1.0));
        assert_eq!(left_by_processors(&[line(None), line(Some(1.0))]), None);
    }
}
