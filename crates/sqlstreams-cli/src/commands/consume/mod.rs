//! `sqlstreams consume`.

mod exec;
mod pauses;
mod print;

use std::ffi::OsString;
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use clap::Args;
use serde_json::json;
use sqlstreams::{Bytes, Consumed, ConsumerBuilder, ErrorKind, GroupBuilder, Start, Stream};

use crate::commands::open_stream;
use crate::context::Context;
use crate::failure::Failure;
use crate::output::{counted, thousands};
use crate::progress::Progress;
use crate::signals::Signals;
use crate::values;

const AFTER_HELP: &str = "\
Prints each payload on a line of its own, byte for byte; one that holds line feeds is printed as it
is, so use --json where that matters. A message counts as handled once it has been written. Messages
come in about the order of their ids; with --concurrency 1 exactly so, but for those tried again.
With --json each message is one line: {\"id\", \"key\", \"routing_key\", \"headers\", \"produced_at\",
\"attempt\", \"tombstone\", \"payload\"}; bytes of a bytea stream come as PostgreSQL writes them, \"\\\\x00ff\".

With --exec, which takes the rest of the command line, the command runs once for each message, with
the payload on its stdin; what it prints is passed on. Its exit code decides:
  0              handled
  65             a dead letter at once, for the reason it gave on stderr
  anything else  failed (also when killed by a signal): tried again after a while, at most
                 --max-attempts times, then a dead letter; the end of its stderr is kept as the error
It finds SQLSTREAMS_ID, SQLSTREAMS_ATTEMPT, SQLSTREAMS_STREAM and SQLSTREAMS_GROUP in its environment;
SQLSTREAMS_KEY, SQLSTREAMS_ROUTING_KEY and SQLSTREAMS_HEADERS, a JSON object, where the message has
them; and for a tombstone SQLSTREAMS_TOMBSTONE=1. Headers above 127 KiB make it a dead letter.

While the group is paused nothing comes, and --until-caught-up waits; stderr tells of it (with --json
as {\"paused\": …} and {\"resumed\": …}).

Every message reaches the group at least once; consumers of one group share its messages. The first
Ctrl-C or SIGTERM lets running commands finish and hands everything else back, so that nothing is
lost; the second ends them. The exit code is 0 then, but 130 (SIGTERM: 143) if --until-caught-up was
not reached.

Examples:
  sqlstreams consume orders --group receipts
  sqlstreams consume orders --group export --until-caught-up > orders.ndjson
  sqlstreams consume orders --group audit --from '2h ago' --json | jq .payload.total
  sqlstreams consume orders --group mail --concurrency 4 --timeout 30s --exec ./send-mail --quiet
  sqlstreams consume orders --group s3 --exec sh -c 'aws s3 cp - s3://orders/$SQLSTREAMS_ID'";

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct ConsumeArgs {
    /// The stream
    stream: String,
    /// The group, which is created if it is missing: see --from
    #[arg(long, short, value_name = "GROUP")]
    group: String,
    /// Where a new group starts: beginning, latest, an id, a time (UTC without an offset), or '2h ago' [default: beginning]
    #[arg(long, value_name = "WHERE", value_parser = values::start)]
    from: Option<Start>,
    /// How many messages are handled at once [default: 64 when printing, 1 with --exec]
    #[arg(long, short, value_name = "N", value_parser = values::at_least_one)]
    concurrency: Option<usize>,
    /// Stop once everything that was in the stream at the start is handled or dead, retries included
    #[arg(long)]
    until_caught_up: bool,
    /// Attempts before a message is dead; kept by the group [default for a new group: 5]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_attempts: Option<u32>,
    /// How long the messages of a consumer that died wait; kept by the group [default for a new group: 15s]
    #[arg(long, value_name = "DURATION", value_parser = values::duration)]
    lease: Option<Duration>,
    /// How long handling a message may take before it counts as failed
    #[arg(long, value_name = "DURATION", value_parser = values::duration)]
    timeout: Option<Duration>,
    /// Run this command for each message: everything after --exec belongs to it
    #[arg(long, value_name = "CMD", num_args = 1.., allow_hyphen_values = true)]
    exec: Option<Vec<OsString>>,
}

/// How long running handlers are given after the first signal: until the second, in practice.
const PATIENCE: Duration = Duration::from_secs(24 * 3600);
const PRINTERS: usize = 64;

/// What the handlers tell the command.
#[derive(Clone)]
struct Shared {
    signals: Signals,
    /// What ended the command, if neither it nor a signal did.
    fatal: Arc<OnceLock<Failure>>,
    handled: Arc<AtomicU64>,
}

impl Shared {
    /// Ends the command; what runs is handed back. For a handler that can't go on through no fault of its message.
    async fn give_up<T>(&self, failure: Option<Failure>) -> T {
        if let Some(failure) = failure {
            let _ = self.fatal.set(failure);
        }
        self.signals.stop.cancel();
        self.signals.abort.cancel();
        // Neither handled nor failed: dropped by the consumer, which hands the message back.
        std::future::pending().await
    }

    fn count(&self) {
        self.handled.fetch_add(1, Ordering::Relaxed);
    }
}

pub(crate) async fn run(args: ConsumeArgs, context: &Context) -> anyhow::Result<ExitCode> {
    if let Some(command) = &args.exec {
        exec::check(command)?;
    }
    let client = context.updated().await?;
    let stream = open_stream(&client, &args.stream).await?;
    let group = prepare(&stream, &args, context).await?;
    let shared = Shared {
        signals: Signals::catch_for_handlers()?,
        fatal: Arc::default(),
        handled: Arc::default(),
    };
    let default_concurrency = if args.exec.is_some() { 1 } else { PRINTERS };
    let mut consumer = group
        .consumer()
        .concurrency(args.concurrency.unwrap_or(default_concurrency))
        .stop_on(shared.signals.stop.clone())
        .abort_on(shared.signals.abort.clone())
        .shutdown_timeout(PATIENCE);
    if let Some(timeout) = args.timeout {
        consumer = consumer.timeout(timeout);
    }
    // Payloads and a line that redraws itself make no sense on one terminal.
    let progress = Progress::new(context, None, "messages").hidden_if(io::stdout().is_terminal());
    let ticker = tokio::spawn(tick(progress.clone(), shared.handled.clone()));
    let pauses = tokio::spawn(pauses::tell(
        consumer.health(),
        pauses::Names { stream: args.stream.clone(), group: args.group.clone() },
        progress.clone(),
        context.json(),
    ));
    let consumed = consume(consumer, &stream, &args, &shared, context).await;
    ticker.abort();
    pauses.abort();
    progress.clear();
    let consumed = consumed?;
    // A group that was dropped meanwhile has none.
    let dead = match stream.group(&args.group).open().await {
        Ok(group) => group.status().await.map_or(0, |status| status.dead),
        Err(_) => 0,
    };
    tell(context, &args, &progress, &consumed, dead);
    if let Some(failure) = shared.fatal.get() {
        return Err(failure.clone().into());
    }
    match shared.signals.exit_code() {
        Some(code) if args.until_caught_up => Ok(ExitCode::from(code)),
        _ => Ok(ExitCode::SUCCESS),
    }
}

/// The group with its settings; it is made here, so that what is wrong with them is told before anything runs.
async fn prepare(
    stream: &Stream<Vec<u8>, Bytes>,
    args: &ConsumeArgs,
    context: &Context,
) -> anyhow::Result<GroupBuilder<Vec<u8>, Bytes>> {
    let mut builder = stream.group(&args.group);
    if let Some(attempts) = args.max_attempts {
        builder = builder.max_attempts(attempts);
    }
    if let Some(lease) = args.lease {
        builder = builder.lease(lease);
    }
    match builder.clone().open().await {
        Ok(_) if args.from.is_some() => {
            context.say(&format!(
                "group {:?} exists and goes on where it stands: --from is for new groups",
                args.group
            ));
        }
        Err(error) if error.kind() == ErrorKind::UnknownGroup => {
            let start = args.from.unwrap_or_default();
            builder.clone().start(start).create_if_missing().await?;
        }
        opened => {
            opened?;
        }
    }
    Ok(stream.group(&args.group))
}

async fn consume(
    consumer: ConsumerBuilder<Vec<u8>, Bytes>,
    stream: &Stream<Vec<u8>, Bytes>,
    args: &ConsumeArgs,
    shared: &Shared,
    context: &Context,
) -> sqlstreams::Result<Consumed> {
    let caught_up = args.until_caught_up;
    if let Some(command) = &args.exec {
        let command = exec::Command::new(command, stream.name(), &args.group, shared.clone());
        let handler = move |message| command.clone().handle(message);
        return match caught_up {
            true => consumer.until_caught_up().run(handler).await,
            false => consumer.run(handler).await,
        };
    }
    let json = context.json().then(|| stream.payload_type());
    let printer = print::Printer::start(json, shared.clone());
    let handler = move |message| printer.clone().handle(message);
    match caught_up {
        true => consumer.until_caught_up().run(handler).await,
        false => consumer.run(handler).await,
    }
}

async fn tick(progress: Progress, handled: Arc<AtomicU64>) {
    let mut interval = tokio::time::interval(Duration::from_millis(250));
    loop {
        interval.tick().await;
        progress.update(0, handled.load(Ordering::Relaxed));
    }
}

/// The summary goes to stderr: stdout is for payloads.
///
/// `dead` are the group's dead letters, whoever made them.
fn tell(
    context: &Context,
    args: &ConsumeArgs,
    progress: &Progress,
    consumed: &Consumed,
    dead: i64,
) {
    let Consumed { handled, failed, dead_at_once, expired, superseded, .. } = *consumed;
    let failed = failed + dead_at_once;
    let mut stderr = anstream::stderr().lock();
    // Whether anybody reads it is not our concern.
    let _ = if context.json() {
        let summary = json!({
            "stream": args.stream,
            "group": args.group,
            "handled": handled,
            "failed_attempts": failed,
            "expired": expired,
            "superseded": superseded,
            "dead": dead,
            "seconds": progress.seconds(),
        });
        writeln!(stderr, "{}", json!({ "summary": summary }))
    } else {
        let passed_over = [(expired, "expired"), (superseded, "superseded")].into_iter();
        let passed_over: String = passed_over
            .filter(|(messages, _)| *messages > 0)
            .map(|(messages, why)| format!(", {} {why}", thousands(messages)))
            .collect();
        let more = match (failed, dead.unsigned_abs()) {
            (0, 0) => String::new(),
            (failed, 0) => format!(", {}", counted(failed, "failed attempt")),
            (failed, dead) => format!(
                ", {}; the group has {}",
                counted(failed, "failed attempt"),
                counted(dead, "dead letter")
            ),
        };
        writeln!(
            stderr,
            "group {:?}: {} handled{passed_over}{more}, in {:.1} s ({}/s)",
            args.group,
            thousands(handled),
            progress.seconds(),
            thousands(progress.rate(handled))
        )
    };
}
