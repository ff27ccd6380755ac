//! `sqlstreams demo`: everything at work, in a quarter of a minute.
//!
//! The steps ([`story`]) each return facts ([`facts`]) that they measured and checked; [`report`] shows those to a person,
//! `--json` prints them as they are.

mod bars;
mod checks;
mod facts;
mod live;
mod orders;
mod payments;
mod redrive;
mod replay;
mod report;
mod stage;
mod story;
mod tables;
mod tally;
mod transaction;
mod trouble;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use sqlstreams::{Client, RetryPolicy};

use self::bars::Bars;
use self::checks::Checks;
use self::facts::{Facts, Server};
use self::orders::Order;
use self::payments::ATTEMPTS;
use self::report::Report;
use self::stage::{PAYMENTS, RECEIPTS, Stage};
use self::tables::Tables;
use crate::context::{Context, Database};
use crate::failure::Failure;
use crate::signals::Signals;
use crate::{output, own_stream};

#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// How many orders to produce
    #[arg(long, value_name = "N", default_value_t = 100_000,
          value_parser = clap::value_parser!(u64).range(1..=100_000_000))]
    messages: u64,
    /// Leave the stream in the database
    #[arg(long)]
    keep: bool,
}

pub(crate) async fn run(args: DemoArgs, context: &Context) -> anyhow::Result<ExitCode> {
    if args.keep && context.given_database_url().is_none() {
        return Err(Failure::usage("nothing_to_keep", "--keep needs a database that stays")
            .hint("Set DATABASE_URL or --database-url, for example to that of `sqlstreams up`.")
            .into());
    }
    let signals = Signals::catch()?;
    let report = Report { shown: !context.json() };
    report.title()?;

    let started = Instant::now();
    let Some(database) = signals.stop.run_until_cancelled(context.given_or_throw_away()).await
    else {
        return Ok(interrupted(&signals));
    };
    let database = database?;
    let told = on(&database, started.elapsed(), &args, context, &signals, report).await;
    // The server goes before anybody hears that it is gone.
    database.close().await;
    match told? {
        None => Ok(interrupted(&signals)),
        Some(facts) if context.json() => {
            output::print_json(&serde_json::to_value(facts)?)?;
            Ok(ExitCode::SUCCESS)
        }
        Some(facts) => {
            report.end(&facts, args.keep)?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Runs the demo on a database, in a stream of its own; nothing when interrupted.
async fn on(
    database: &Database,
    start_time: Duration,
    args: &DemoArgs,
    context: &Context,
    signals: &Signals,
    report: Report,
) -> anyhow::Result<Option<Facts>> {
    let url = database.url();
    let connect = Client::builder(&url).schema(context.schema()).connect();
    let Some(client) = signals.stop.run_until_cancelled(connect).await else { return Ok(None) };
    let client = client?;
    // From here to the guarded part nothing waits for signals, so that a stream which was made is dropped.
    let stream = own_stream::create::<Order>(&client, "demo-orders-").await?;
    let story = async {
        let tables = Tables::of_stream(&url, context.schema(), stream.id()).await?;
        let server = look_at(database, start_time, &tables).await?;
        report.server(&server, context.schema(), stream.name(), args.keep)?;
        let retry = RetryPolicy::attempts(ATTEMPTS).backoff(
            Duration::from_millis(50),
            2.0,
            Duration::from_millis(200),
        );
        let mut stage = Stage {
            receipts: stream.group(RECEIPTS).create().await?,
            payments: stream.group(PAYMENTS).retry(retry).create().await?,
            stream: stream.clone(),
            tables,
            bars: Bars { shown: context.shows_progress() },
            checks: Checks::default(),
            orders: args.messages,
        };
        story::tell(&mut stage, &report, server).await
    };
    let told = signals.stop.run_until_cancelled(story).await;
    if told.is_none() {
        context.say("Interrupted, cleaning up");
    }
    // A server that goes takes the stream along.
    let dropped = match database {
        Database::Given { .. } if !args.keep => own_stream::drop(stream).await,
        _ => Ok(()),
    };
    let facts = told.transpose()?;
    dropped?;
    Ok(facts)
}

async fn look_at(
    database: &Database,
    start_time: Duration,
    tables: &Tables,
) -> anyhow::Result<Server> {
    let throw_away = matches!(database, Database::ThrowAway { .. });
    let version = tables.setting("server_version").await?;
    Ok(Server {
        // What follows is the packager's: "15.18 (Debian 15.18-0+deb12u1)".
        version: version.split(' ').next().unwrap_or_default().to_owned(),
        throw_away,
        fsync: tables.setting("fsync").await?,
        synchronous_commit: tables.setting("synchronous_commit").await?,
        started_in_seconds: throw_away.then_some(start_time.as_secs_f64()),
    })
}

fn interrupted(signals: &Signals) -> ExitCode {
    ExitCode::from(signals.exit_code().unwrap_or(130))
}
