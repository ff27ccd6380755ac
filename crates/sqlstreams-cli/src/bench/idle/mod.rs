//! `sqlstreams bench idle`.

mod relay;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::Args;
use serde::Serialize;
use sqlstreams::{CancellationToken, Client, Consumed, Delivery, Start};
use tokio::task::JoinSet;

use self::relay::Relay;
use super::measured;
use super::place::Place;
use super::report::{Bar, Chart, Report};
use super::server::Server;
use super::versus::{Kind, Meter, Verdict, print_verdict};
use crate::context::Context;
use crate::output::{print, thousands};
use crate::progress::Progress;
use crate::values;

/// The most statements a second.
const STATEMENTS: f64 = 2.0;
/// The most of a processor that the server and the consumers take together, in per cent.
const PROCESSOR: f64 = 1.0;
/// They have settled when so much time has brought no more statements than so many.
const CALM: (Duration, u64) = (Duration::from_secs(2), 4);

const AFTER_HELP: &str = "\
What streams cost of which nothing comes: in one process and over the connections of one client, a
consumer for a group of each of very many streams. Once they have settled it counts the statements
that they send and what the server and this process take of a processor. The statements are counted
on their way, which takes a connection that is not encrypted. Without a database it starts a private
PostgreSQL. The exit code is 0 once it has measured, whether the targets hold or not: ask for
.targets_met.

Examples:
  sqlstreams bench idle
  sqlstreams bench idle --streams 50 --for 1m
  sqlstreams bench idle --json | jq '.statements_per_second'";

#[derive(Debug, Clone, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct IdleArgs {
    /// Streams, with a group and a consumer each [default: 1000; with --quick 100]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    streams: Option<u32>,
    /// How long to measure [default: 20s; with --quick 5s]
    #[arg(long = "for", value_name = "DURATION", value_parser = values::duration)]
    time: Option<Duration>,
    /// How long to wait at most until they have settled
    #[arg(long, value_name = "DURATION", default_value = "1m", value_parser = values::duration)]
    settle: Duration,
    /// Measure briefly
    #[arg(long)]
    quick: bool,
}

impl IdleArgs {
    fn streams(&self) -> u32 {
        self.streams.unwrap_or(if self.quick { 100 } else { 1_000 })
    }

    fn time(&self) -> Duration {
        self.time.unwrap_or(Duration::from_secs(if self.quick { 5 } else { 20 }))
    }
}

/// What was measured: the document that `--json` prints.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Facts {
    sqlstreams: &'static str,
    postgresql: Server,
    streams: u32,
    seconds: f64,
    /// How long it took them to settle; none if they had not when there was no more time.
    settled_in_seconds: Option<f64>,
    /// None where they could not be counted.
    statements_per_second: Option<f64>,
    /// Per cent of one processor; only known of a server of this machine.
    server_cpu_percent: Option<f64>,
    client_cpu_percent: Option<f64>,
    targets: Vec<Verdict>,
    targets_met: bool,
}

pub(crate) async fn run(args: IdleArgs, context: &Context) -> anyhow::Result<ExitCode> {
    let work = async |place: &mut Place<i64>| measure(&args, context, place).await;
    let facts = measured(context, "bench_idle_", &[], work, Facts::print).await?;
    Ok(facts.err().unwrap_or(ExitCode::SUCCESS))
}

pub(crate) async fn measure(
    args: &IdleArgs,
    context: &Context,
    place: &mut Place<i64>,
) -> anyhow::Result<Facts> {
    let streams = args.streams();
    context.say(&format!("making {} streams", thousands(streams)));
    let names = make(context, place, streams).await?;
    if place.server.is_throw_away() {
        // It all was new to them: what that leaves to autovacuum is not to be done while it is measured.
        for sql in ["VACUUM ANALYZE", "CHECKPOINT"] {
            place.db.batch_execute(sql).await.context("could not tidy up the new tables")?;
        }
    }
    let relay = Relay::start(&place.url).await?;
    let url = relay.as_ref().map_or(&place.url, |relay| &relay.url);
    let consumers = Consumers::start(context, url, &names).await?;
    let passed = || relay.as_ref().map_or(0, Relay::statements);

    context.say("waiting until they have settled");
    let begun = Instant::now();
    let settled = loop {
        let before = passed();
        tokio::time::sleep(CALM.0).await;
        match begun.elapsed() {
            so_far if passed() - before <= CALM.1 => break Some(so_far),
            so_far if so_far >= args.settle => break None,
            _ => {}
        }
    };
    context.say("measuring");
    let meter = Meter::open(&place.url, place.server.is_throw_away()).await?;
    let before = passed();
    let begun = meter.begin().await?;
    tokio::time::sleep(args.time()).await;
    let statements = passed() - before;
    let cost = meter.end(begun, 0).await?;
    consumers.stop().await?;
    if let Some(relay) = &relay {
        relay.closed().await;
    }

    let [server, client] =
        [cost.server_cpu, cost.client_cpu].map(|cpu| Some(cpu? / cost.seconds * 100.0));
    let statements = relay.is_some().then_some(statements as f64 / cost.seconds);
    let targets = targets(statements, server, client);
    Ok(Facts {
        sqlstreams: env!("CARGO_PKG_VERSION"),
        postgresql: place.server.clone(),
        streams,
        seconds: cost.seconds,
        settled_in_seconds: settled.map(|settled| settled.as_secs_f64()),
        statements_per_second: statements,
        server_cpu_percent: server,
        client_cpu_percent: client,
        targets_met: targets.iter().all(|target| target.met),
        targets,
    })
}

/// Those of what is known.
fn targets(statements: Option<f64>, server: Option<f64>, client: Option<f64>) -> Vec<Verdict> {
    let statements = statements
        .map(|n| Verdict::new("statements/s of idle streams", Kind::Count, n, STATEMENTS));
    let processor = server.zip(client).map(|(server, client)| {
        let what = "% of a processor for idle streams";
        Verdict::new(what, Kind::Time, server + client, PROCESSOR)
    });
    statements.into_iter().chain(processor).collect()
}

/// Makes streams with a group each. Returns their names.
async fn make(
    context: &Context,
    place: &mut Place<i64>,
    streams: u32,
) -> anyhow::Result<Vec<String>> {
    let progress = Progress::new(context, Some(streams.into()), "streams");
    let mut names = Vec::new();
    for n in 0..streams {
        let stream = place.another_stream(&n.to_string(), |stream| stream).await?;
        stream.group(GROUP).start(Start::Latest).create().await?;
        names.push(stream.name().to_owned());
        progress.update(names.len() as u64, names.len() as u64);
    }
    progress.clear();
    Ok(names)
}

const GROUP: &str = "idle";

/// They end with this value.
struct Consumers {
    stop: CancellationToken,
    running: JoinSet<sqlstreams::Result<Consumed>>,
}

impl Consumers {
    async fn start(context: &Context, url: &str, names: &[String]) -> anyhow::Result<Self> {
        let client = Client::builder(url).schema(context.schema()).migrate(false).connect().await?;
        let (stop, mut running) = (CancellationToken::new(), JoinSet::new());
        for name in names {
            let stream = client.stream::<i64>(name).open().await?;
            let consumer = stream.group(GROUP).consumer().stop_on(stop.clone());
            running.spawn(consumer.run(|_: Delivery<i64>| std::future::ready(())));
        }
        Ok(Self { stop, running })
    }

    async fn stop(mut self) -> anyhow::Result<()> {
        self.stop.cancel();
        while let Some(ended) = self.running.join_next().await {
            ended?.context("a consumer ended early")?;
        }
        Ok(())
    }
}

impl Report for Facts {
    fn print(&self) -> anyhow::Result<()> {
        let settled = match self.settled_in_seconds {
            Some(seconds) => format!("settled after {seconds:.0} s"),
            None => "not settled yet".to_owned(),
        };
        print(format_args!(
            "{} streams, {settled}, measured for {:.0} s. {}\n",
            thousands(self.streams),
            self.seconds,
            self.postgresql
        ))?;
        for (what, found) in [
            ("statements/s", self.statements_per_second),
            ("server, % of a processor", self.server_cpu_percent),
            ("consumers, % of a processor", self.client_cpu_percent),
        ] {
            let found = found.map_or("?".to_owned(), |found| format!("{found:.2}"));
            print(format_args!("{what:<28} {found:>8}"))?;
        }
        print("")?;
        print_verdict(&self.targets)
    }

    fn verdicts(&self) -> Vec<Verdict> {
        self.targets.clone()
    }

    fn charts(&self) -> Vec<Chart> {
        let bars = self.targets.iter();
        let bars = bars.map(|it| Bar::of(&it.what, it.measured).marked(it.target)).collect();
        let title = format!("idle: {} streams", thousands(self.streams));
        vec![Chart::plain(title, "", bars)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_known_has_a_target() {
        let kinds = |found: Vec<Verdict>| found.iter().map(|it| it.kind).collect::<Vec<_>>();
        assert_eq!(kinds(targets(Some(1.0), None, Some(1.0))), [Kind::Count]);
        assert_eq!(kinds(targets(None, Some(0.4), Some(0.5))), [Kind::Time]);
        let both = targets(Some(2.5), Some(0.7), Some(0.7));
        assert_eq!(both.iter().map(|it| it.met).collect::<Vec<_>>(), [false, false]);
    }
}
