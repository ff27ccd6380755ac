//! `sqlstreams produce`.

mod field;
mod lines;
mod send;

use std::fs::File;
use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use clap::Args;
use serde_json::json;
use sqlstreams::{Bytes, Client, ErrorKind, Headers, PayloadType, Stream};

use crate::context::Context;
use crate::failure::Failure;
use crate::output::{counted, print_json, thousands};
use crate::progress::Progress;
use crate::signals::Signals;
use crate::values;

use self::lines::{Fields, Input};
use self::send::{Options, Sender, Sent};

const AFTER_HELP: &str = "\
Each line is the payload of one message, byte for byte without its line feed. Lines of blanks are
passed over for json and jsonb. Messages get their ids in the order of the lines.

Lines are sent in batches, each in one transaction: a batch is stored as a whole or not at all.
A batch ends after --batch lines or 8 MiB, or when no line has come for 0.1 s.
  - Without --skip-invalid, a line that the stream cannot store (malformed JSON, NUL in text, above
    64 MiB, no key where a --…-key-field wants one) is an error that names it: its batch is refused,
    earlier batches stay, later lines are not sent.
  - With --skip-invalid, such lines are reported on stderr and left out, and everything else is stored.

With --idempotency-key-field a line whose key was sent before, within the stream's window (see
`stream alter`), is a duplicate: it is not stored again, and counted. So the same file may be sent
again and again until all of it is stored. A duplicate with another payload is told on stderr.

With --expect-latest or --expect-latest-field, in a compacted stream, a message is stored only if nobody
has sent another for its key since its current value was read (`message latest --json` has the id);
else its batch is refused, whatever --skip-invalid says, and the error (code conflict) names the key and
with --json has latest_id. Every writer of such keys has to ask so. A batch asks once of a key: where
lines of one follow each other, --batch 1 sends each by itself.

With --delay or --deliver-at the messages wait (`delayed list`) and get their ids when they are due,
by the database's clock.

With --expires-in, counted from when they are due, or --expires-at, consumers pass over the messages
after that, and count them as expired.

After Ctrl-C or an error, the number of lines stored and the line to go on from are told.

Examples:
  sqlstreams produce orders orders.ndjson
  jq -c '.[]' orders.json | sqlstreams produce orders --key-field customer
  sqlstreams produce orders orders.ndjson --idempotency-key-field order_id
  echo '{\"event\": \"orders.eu.paid\"}' | sqlstreams produce orders --routing-key-field event
  sqlstreams produce orders orders.ndjson --headers '{\"region\": \"eu\"}'
  echo '{\"of\": \"pears\", \"is\": 2}' | sqlstreams produce prices --key-field of --expect-latest 17
  echo '{\"remind\": 42}' | sqlstreams produce reminders --delay 1h
  tail -F app.log | sqlstreams produce logs --create --payload-type text
  sqlstreams produce orders dump.ndjson --skip-invalid 2> bad-lines.txt";

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct ProduceArgs {
    /// The stream
    stream: String,
    /// The file to read, `-` for stdin
    #[arg(default_value = "-")]
    file: PathBuf,
    /// Lines per transaction, at most
    #[arg(long, value_name = "N", default_value = "1000", value_parser = values::at_least_one)]
    batch: usize,
    /// Take each message's key from this field of its JSON object: a string or a number
    #[arg(long, value_name = "FIELD")]
    key_field: Option<String>,
    /// Take each message's routing key from this field: `orders.eu.created`. See `group bindings`
    #[arg(long, value_name = "FIELD")]
    routing_key_field: Option<String>,
    /// Headers of every message: a JSON object
    #[arg(long, value_name = "JSON", value_parser = values::headers)]
    headers: Option<Headers>,
    /// Take each message's headers from this field, a JSON object; they come before those of --headers
    #[arg(long, value_name = "FIELD")]
    headers_field: Option<String>,
    /// Take each message's idempotency key from this field: the stream stores each key once
    #[arg(long, value_name = "FIELD")]
    idempotency_key_field: Option<String>,
    /// Store a message only if the current value of its key is the message of this id, or with 0 if it has none
    #[arg(long, value_name = "ID", conflicts_with = "expect_latest_field",
          value_parser = clap::value_parser!(i64).range(0..))]
    expect_latest: Option<i64>,
    /// Take that id from this field: a number, or null for none
    #[arg(long, value_name = "FIELD")]
    expect_latest_field: Option<String>,
    /// Keep the messages back for so long
    #[arg(long, value_name = "DURATION", conflicts_with = "deliver_at",
          value_parser = values::duration_or_none)]
    delay: Option<Duration>,
    /// Keep the messages back until this time: 2026-03-01T12:00:00Z
    #[arg(long, value_name = "TIME", value_parser = values::time)]
    deliver_at: Option<SystemTime>,
    /// After so long nobody gets the messages any more
    #[arg(long, value_name = "DURATION", conflicts_with = "expires_at",
          value_parser = values::duration)]
    expires_in: Option<Duration>,
    /// From this time on nobody gets the messages any more
    #[arg(long, value_name = "TIME", value_parser = values::time)]
    expires_at: Option<SystemTime>,
    /// Report lines that cannot be stored on stderr and go on
    #[arg(long)]
    skip_invalid: bool,
    /// Create the stream if there is none of that name
    #[arg(long)]
    create: bool,
    /// How a stream made by --create stores payloads: json (default), jsonb, text or bytea
    #[arg(long, value_name = "TYPE", requires = "create", value_parser = values::payload_type)]
    payload_type: Option<PayloadType>,
}

pub(crate) async fn run(args: ProduceArgs, context: &Context) -> anyhow::Result<ExitCode> {
    // Before anything is created for it.
    let (file, size) = open(&args.file)?;
    let stream = open_or_create(&context.updated_or(args.create).await?, &args).await?;
    let signals = Signals::catch()?;
    let is_typed = file.is_none() && io::stdin().is_terminal();
    let input = Input {
        file,
        batch: args.batch,
        fields: Fields {
            key: args.key_field,
            routing_key: args.routing_key_field,
            headers: args.headers_field,
            idempotency_key: args.idempotency_key_field,
            expect_latest: args.expect_latest_field,
        },
        skip_blank: matches!(stream.payload_type(), PayloadType::Json | PayloadType::Jsonb),
    };
    // Not between lines that are being typed.
    let progress = Progress::new(context, size, "lines").hidden_if(is_typed);
    let options = Options {
        headers: args.headers,
        expect_latest: args.expect_latest,
        delay: args.delay,
        deliver_at: args.deliver_at,
        expires_in: args.expires_in,
        expires_at: args.expires_at,
        skip_invalid: args.skip_invalid,
        json: context.json(),
    };
    let mut sender = Sender::new(&stream, &progress, options);
    let result = sender.send(input, &signals.stop).await;
    progress.clear();
    let sent = sender.sent;
    if let Err(error) = result {
        return Err(with_progress(error, &sent).into());
    }
    let cut_short = signals.exit_code().filter(|_| sent.cut_short);
    tell(context, &stream, &progress, &sent)?;
    if let Some(code) = cut_short {
        context.say(&format!("stopped by a signal; go on from line {}", sent.next_line));
        return Ok(ExitCode::from(code));
    }
    Ok(ExitCode::SUCCESS)
}

/// What to read, and how much there is of it if that is known.
fn open(path: &Path) -> Result<(Option<File>, Option<u64>), Failure> {
    if path == Path::new("-") {
        return Ok((None, None));
    }
    let refuse = |error: std::io::Error| {
        Failure::usage("unreadable_file", format!("cannot read {}: {error}", path.display()))
    };
    let file = File::open(path).map_err(refuse)?;
    let about = file.metadata().map_err(refuse)?;
    if about.is_dir() {
        return Err(Failure::usage(
            "unreadable_file",
            format!("cannot read {}: it is a folder", path.display()),
        ));
    }
    let size = about.is_file().then_some(about.len());
    Ok((Some(file), size))
}

async fn open_or_create(
    client: &Client,
    args: &ProduceArgs,
) -> anyhow::Result<Stream<Vec<u8>, Bytes>> {
    let builder = || client.stream::<Vec<u8>>(&args.stream).codec::<Bytes>();
    if args.create {
        let builder = match args.payload_type {
            // Refused should the stream be there with another type.
            Some(payload_type) => builder().payload_type(payload_type),
            None => match builder().open().await {
                Err(error) if error.kind() == ErrorKind::UnknownStream => {
                    builder().payload_type(PayloadType::Json)
                }
                opened => return Ok(opened?),
            },
        };
        return Ok(builder.create_if_missing().await?);
    }
    builder().open().await.map_err(|error| match error.kind() {
        ErrorKind::UnknownStream => Failure::from(&error)
            .also_hint("Create it with `sqlstreams stream create NAME`, or pass --create.")
            .into(),
        _ => error.into(),
    })
}

/// The error, with what a person needs to go on after it.
fn with_progress(error: anyhow::Error, sent: &Sent) -> Failure {
    let stored = match sent.stored + sent.delayed {
        0 => "Nothing was stored.".to_owned(),
        stored => format!(
            "{} stored before; go on from line {}.",
            if stored == 1 {
                "1 line was".to_owned()
            } else {
                format!("{} lines were", thousands(stored))
            },
            sent.next_line
        ),
    };
    Failure::from(&error)
        .also_hint(&stored)
        .detail("stored", sent.stored)
        .detail("next_line", sent.next_line)
}

fn tell(
    context: &Context,
    stream: &Stream<Vec<u8>, Bytes>,
    progress: &Progress,
    sent: &Sent,
) -> anyhow::Result<()> {
    if context.json() {
        return print_json(&json!({
            "stream": stream.name(),
            "stored": sent.stored,
            "delayed": sent.delayed,
            "duplicates": sent.duplicates,
            "conflicts": sent.conflicts,
            "skipped": sent.skipped,
            "blank": sent.blank,
            "first_id": sent.ids.map(|ids| ids.0),
            "last_id": sent.ids.map(|ids| ids.1),
            "next_line": sent.next_line,
            "seconds": progress.seconds(),
        }));
    }
    let mut line = format!("{} stored in stream {:?}", counted(sent.stored, "line"), stream.name());
    if let Some((first, last)) = sent.ids {
        line += &format!(
            ", ids {first} to {last}, in {:.1} s ({}/s)",
            progress.seconds(),
            thousands(progress.rate(sent.stored))
        );
    }
    if sent.delayed > 0 {
        line += &format!("; {} delayed", counted(sent.delayed, "line"));
    }
    if sent.duplicates > 0 {
        line += &format!("; {}", counted(sent.duplicates, "duplicate"));
    }
    if sent.conflicts > 0 {
        line += &format!(", {} of them with another payload", thousands(sent.conflicts));
    }
    if sent.skipped > 0 {
        line += &format!("; {} skipped", thousands(sent.skipped));
    }
    if sent.blank > 0 {
        line += &format!("; {} passed over", counted(sent.blank, "blank line"));
    }
    anstream::eprintln!("{line}");
    Ok(())
}
