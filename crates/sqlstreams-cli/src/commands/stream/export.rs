//! `sqlstreams stream export`.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, ValueEnum};
use serde_json::{Value, json};
use sqlstreams::{Bytes, ErrorKind, Group, Mode, PayloadType, Record, Start, Stream};

use crate::commands::open_stream;
use crate::context::Context;
use crate::failure::Failure;
use crate::output::{counted, print_json, thousands, time};
use crate::progress::Progress;
use crate::signals::Signals;
use crate::transfer::line::{self, End};
use crate::transfer::parquet::Writer;
use crate::transfer::target::{NewFile, Target};
use crate::transfer::{About, FORMAT};
use crate::values;

const AFTER_HELP: &str = "\
Writes messages with everything they have, whatever the groups have done with them, in the order of their ids; expired ones
too. `stream import` reads the file. Delayed messages, idempotency keys and groups are not in it: pg_dump takes those along.

Each message is a line: {\"id\", \"key\", \"routing_key\", \"headers\", \"produced_at\", \"expires_at\", \"tombstone\", \"payload\"},
as `consume --json` has them. Bytes of a bytea stream are \"payload_base64\"; JSON that is spelled over several
lines is \"payload_text\", a string. The first line tells of the stream, {\"export\": …}, the last how many messages
there were, {\"end\": …}. Parquet files have columns of the same names, and a row for each message.

A file appears under its name when it is whole. Only what is final is exported: where a transaction is under way that may
still bring a message, it waits for that to end. The range ends where the stream ends when the command begins, if --to
does not say otherwise.

With --group an export goes on where the last one under this name ended. The group is made for it and remembers how far the
files have come; what it has not come to is unread, and kept. Nobody may consume it.

Examples:
  sqlstreams stream export orders > orders.jsonl
  sqlstreams stream export orders --from '7d ago' --output week.jsonl
  sqlstreams stream export orders --from 1 --to 1000000 --output orders-1.parquet
  sqlstreams stream export orders --group archive --output \"orders-$(date +%F).parquet\"";

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct ExportArgs {
    /// The stream
    stream: String,
    /// Where to begin: beginning, an id, a time (UTC without an offset), or '2h ago' [default: beginning]
    #[arg(long, value_name = "WHERE", value_parser = values::start)]
    from: Option<Start>,
    /// Where to end: with this id, or before this time [default: latest]
    #[arg(long, value_name = "WHERE", value_parser = values::start)]
    to: Option<Start>,
    /// The file to write [default: stdout]
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
    /// How to write it [default: parquet for names that end in .parquet, else jsonl]
    #[arg(long, value_name = "FORMAT")]
    format: Option<Format>,
    /// Go on where the last export under this name ended
    #[arg(long, short, value_name = "GROUP")]
    group: Option<String>,
    /// Replace the file if there is one
    #[arg(long, requires = "output")]
    overwrite: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// Lines of JSON
    Jsonl,
    /// Apache Parquet, compressed with Snappy
    Parquet,
}

/// Messages per page.
const PAGE: u32 = 1_000;
/// How often it is asked whether a transaction has ended that may still bring a message.
const PAUSE: Duration = Duration::from_millis(100);

/// What was exported so far.
#[derive(Default)]
struct Exported {
    messages: u64,
    first: Option<i64>,
    last: Option<i64>,
}

enum Sink {
    Lines(Target, PayloadType),
    Rows(Box<Writer<Target>>),
}

pub(crate) async fn run(args: ExportArgs, context: &Context) -> anyhow::Result<ExitCode> {
    check_range(args.from, args.to)?;
    // Groups are made, and their functions have to be this program's.
    let client = match args.group {
        Some(_) => context.updated().await?,
        None => context.reader().await?,
    };
    let stream = open_stream(&client, &args.stream).await?;
    let group = match &args.group {
        Some(name) => Some(open_group(&stream, name, args.from).await?),
        None => None,
    };
    let after = match &group {
        Some((_, claimed)) => *claimed,
        None => before(&stream, args.from.unwrap_or_default()).await?,
    };
    let info = stream.info().await?;
    let upto = match args.to.unwrap_or(Start::Latest) {
        Start::Id(id) => id,
        to => before(&stream, to).await?,
    };
    // An id and a time. What was not drawn yet may lie before any time that has been; a group may have come further than it is asked to.
    if upto < after && after < info.head && args.from.is_some() && args.to.is_some() {
        return Err(backwards(&format!(
            "it would begin after id {} and end with id {}",
            thousands(after),
            thousands(upto)
        ))
        .into());
    }
    let upto = upto.min(info.head).max(after);

    let signals = Signals::catch()?;
    let about = About {
        format: FORMAT,
        stream: args.stream.clone(),
        payload_type: stream.payload_type().as_str().to_owned(),
        compacted: info.compacted,
        partition_size: info.partition_size,
        after,
        upto,
    };
    let is_stdout = args.output.is_none();
    let mut sink = Sink::open(&args, &about, stream.payload_type())?;
    let total = u64::try_from(upto - after).unwrap_or_default();
    let progress = Progress::new(context, Some(total), "messages");
    let mut done = Exported::default();
    let (mut position, mut waits) = (after, false);
    while position < upto {
        if let Some(code) = signals.exit_code() {
            return Ok(stopped(context, &progress, &done, is_stdout, code));
        }
        let page = stream.read_log(position, upto, PAGE).await?;
        for record in page.records {
            done.messages += 1;
            done.first.get_or_insert(record.id);
            done.last = Some(record.id);
            // A pipe may be full for long.
            tokio::task::block_in_place(|| sink.write(record))
                .map_err(|error| Target::failed(is_stdout, error))?;
        }
        if page.upto == position {
            if !waits {
                waits = true;
                let text = format!(
                    "waits for a transaction that may still bring message {}: `sqlstreams doctor` names those that stay open",
                    thousands(position + 1)
                );
                if !context.json() {
                    progress.say(&text);
                }
            }
            tokio::select! {
                () = signals.stop.cancelled() => {}
                () = tokio::time::sleep(PAUSE) => {}
            }
        }
        position = page.upto;
        progress.update(u64::try_from(position - after).unwrap_or_default(), done.messages);
    }
    if let Some(code) = signals.exit_code() {
        return Ok(stopped(context, &progress, &done, is_stdout, code));
    }
    let end = End { messages: done.messages, upto };
    tokio::task::block_in_place(|| sink.finish(end, is_stdout))?;
    progress.clear();
    if let Some((group, claimed)) = &group {
        move_group(group, *claimed, upto, args.output.as_ref()).await?;
    }
    tell(&args, context, &about, &done)?;
    Ok(ExitCode::SUCCESS)
}

/// Refuses a range that ends before it begins, as far as that can be told without the stream.
fn check_range(from: Option<Start>, to: Option<Start>) -> Result<(), Failure> {
    match (from, to) {
        (_, Some(Start::Beginning)) => Err(backwards("nothing lies before the beginning")),
        (Some(Start::Latest), Some(Start::Id(_) | Start::Time(_))) => {
            Err(backwards("it would begin at the end of the stream"))
        }
        (Some(Start::Id(from)), Some(Start::Id(to))) if from > to => {
            let text = format!("id {} is greater than {}", thousands(from), thousands(to));
            Err(backwards(&text))
        }
        (Some(Start::Time(from)), Some(Start::Time(to))) if from >= to => {
            let (from, to) = (time(from), time(to));
            Err(backwards(&format!("{from} is not before {to}, which does not belong to it")))
        }
        _ => Ok(()),
    }
}

fn backwards(how: &str) -> Failure {
    Failure::usage("empty_range", format!("the range ends before it begins: {how}"))
        .hint("Give its beginning with --from, and its end with --to.")
}

/// The id before the first message of the range.
async fn before(stream: &Stream<Vec<u8>, Bytes>, start: Start) -> anyhow::Result<i64> {
    Ok(match start {
        Start::Beginning => 0,
        Start::Id(id) => id - 1,
        Start::Time(at) => stream.position_at(at).await?,
        _ => stream.info().await?.head,
    })
}

/// The group that remembers, and where it stands.
async fn open_group(
    stream: &Stream<Vec<u8>, Bytes>,
    name: &str,
    from: Option<Start>,
) -> anyhow::Result<(Group<Vec<u8>, Bytes>, i64)> {
    let builder = stream.group(name);
    let group = match builder.clone().open().await {
        Err(error) if error.kind() == ErrorKind::UnknownGroup => {
            builder.start(from.unwrap_or_default()).create_if_missing().await?
        }
        Ok(_) if from.is_some() => {
            let text = format!("group {name:?} exists and goes on where it stands");
            return Err(Failure::usage("usage", text)
                .hint("Leave --from out, or --group for an export that nothing remembers.")
                .into());
        }
        opened => opened?,
    };
    let status = group.status().await?;
    if status.mode != Mode::Parallel {
        let text = format!(
            "group {name:?} is {}, and only a parallel one remembers how far an export has come",
            status.mode
        );
        return Err(Failure::usage("group_mode", text)
            .hint("Take a group for the exports alone: it is made when there is none of that name.")
            .into());
    }
    if status.open_leases > 0 || status.ready > 0 || status.inflight > 0 {
        let text = format!("group {name:?} is consumed: messages of it are handed out or wait");
        return Err(Failure::failed("group_busy", text)
            .hint("Take a group for the exports alone.")
            .into());
    }
    // Whatever else would be in the way when all is written: privileges, for one.
    group.move_cursor(status.claimed, status.claimed).await?;
    Ok((group, status.claimed))
}

/// The file is whole by now, whatever becomes of this.
async fn move_group(
    group: &Group<Vec<u8>, Bytes>,
    from: i64,
    upto: i64,
    output: Option<&PathBuf>,
) -> Result<(), Failure> {
    group.move_cursor(from, upto).await.map_err(|error| {
        let what =
            output.map_or_else(|| "the output".to_owned(), |file| file.display().to_string());
        Failure::from(&error)
            .within(&format!("{what} is whole, but group {:?} did not move", group.name()))
            .also_hint("The next export has these messages again.")
    })
}

fn stopped(
    context: &Context,
    progress: &Progress,
    done: &Exported,
    is_stdout: bool,
    code: u8,
) -> ExitCode {
    progress.clear();
    let rest = if is_stdout { "the last line is missing" } else { "no file was written" };
    context.say(&format!("stopped after {}: {rest}", counted(done.messages, "message")));
    ExitCode::from(code)
}

fn tell(
    args: &ExportArgs,
    context: &Context,
    about: &About,
    done: &Exported,
) -> anyhow::Result<()> {
    if context.json() {
        let summary = json!({
            "stream": args.stream,
            "messages": done.messages,
            "first_id": done.first,
            "last_id": done.last,
            "after": about.after,
            "upto": about.upto,
            "file": args.output.as_ref().map(|file| file.display().to_string()),
            "group": args.group,
        });
        return tell_json(&summary, args.output.is_some());
    }
    let range = match (done.first, done.last) {
        (Some(first), Some(last)) => format!(", ids {} to {}", thousands(first), thousands(last)),
        _ => String::new(),
    };
    let file = args.output.as_ref().map_or_else(String::new, |f| format!(" to {}", f.display()));
    context.say(&format!(
        "exported {} of stream {:?}{file}{range}",
        counted(done.messages, "message"),
        args.stream
    ));
    Ok(())
}

/// On stdout, or on stderr where the messages are there.
fn tell_json(summary: &Value, on_stdout: bool) -> anyhow::Result<()> {
    match on_stdout {
        true => print_json(summary),
        false => {
            eprintln!("{summary}");
            Ok(())
        }
    }
}

impl Sink {
    fn open(args: &ExportArgs, about: &About, payload_type: PayloadType) -> anyhow::Result<Self> {
        let extension = args.output.as_ref().and_then(|file| file.extension());
        let format = args.format.unwrap_or(match extension == Some(OsStr::new("parquet")) {
            true => Format::Parquet,
            false => Format::Jsonl,
        });
        let target = match &args.output {
            Some(file) => Target::File(NewFile::create(file, args.overwrite)?),
            None => Target::stdout(),
        };
        match format {
            Format::Jsonl => {
                let mut sink = Self::Lines(target, payload_type);
                let mut first = Vec::new();
                line::write_about(&mut first, about);
                sink.write_bytes(&first)
                    .map_err(|error| Target::failed(args.output.is_none(), error))?;
                Ok(sink)
            }
            Format::Parquet => Ok(Self::Rows(Box::new(Writer::new(target, about, payload_type)?))),
        }
    }

    fn write_bytes(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        use std::io::Write;
        match self {
            Self::Lines(target, _) => target.write_all(bytes),
            Self::Rows(_) => Ok(()),
        }
    }

    fn write(&mut self, record: Record<Vec<u8>>) -> std::io::Result<()> {
        match self {
            Self::Lines(_, payload_type) => {
                let mut text = Vec::new();
                line::write(&mut text, &record, *payload_type);
                self.write_bytes(&text)
            }
            Self::Rows(writer) => writer.write(record).map_err(std::io::Error::other),
        }
    }

    fn finish(mut self, end: End, is_stdout: bool) -> anyhow::Result<()> {
        if let Self::Lines(..) = self {
            let mut last = Vec::new();
            line::write_end(&mut last, end);
            self.write_bytes(&last).map_err(|error| Target::failed(is_stdout, error))?;
        }
        match self {
            Self::Lines(target, _) => target.finish(),
            Self::Rows(writer) => writer.finish()?.finish(),
        }
    }
}
