//! `sqlstreams stream import`.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use serde_json::json;
use sqlstreams::{Bytes, Client, ErrorKind, Import, PayloadType, Stream};

use crate::context::Context;
use crate::failure::Failure;
use crate::output::{counted, print, print_json, printable, shell_word, thousands};
use crate::progress::Progress;
use crate::signals::Signals;
use crate::transfer::About;
use crate::transfer::source::{Batch, Source};
use crate::values;

const AFTER_HELP: &str = "\
Reads what `stream export` writes, and lines that `consume --json` prints; Parquet files are told by their first bytes. Messages
keep their times, keys and headers. They get new ids, behind what the stream has, or with --keep-ids their own, which have to lie
above everything that the stream has ever had: for a new stream, as a rule. Producers wait while a batch keeps its ids.

Messages are stored in transactions of at most 1,000. What is wrong with a line is told with its number, and ends the import; what
comes before it is stored. To go on, repeat the command: with --keep-ids what is there already is passed over, if it is the same,
and with --resume the stream remembers by that name how far the import has come. Without either, --after leaves out what was stored:
the command says what the last one was.

Ctrl-C ends the import after the transaction that is under way; the exit code is 130 then.

Examples:
  sqlstreams stream import orders orders.jsonl
  sqlstreams stream import orders orders.jsonl --create --keep-ids
  sqlstreams stream import orders 2026.parquet --resume 2026
  sqlstreams stream export orders | sqlstreams stream import orders --create --database-url postgres://other/shop";

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct ImportArgs {
    /// The stream
    stream: String,
    /// The file to read, `-` for stdin
    #[arg(default_value = "-")]
    file: PathBuf,
    /// Keep the messages' ids
    #[arg(long)]
    keep_ids: bool,
    /// Remember under this name how far the import has come, and go on from there
    #[arg(long, value_name = "NAME")]
    resume: Option<String>,
    /// Leave out messages up to this id, as the file has them
    #[arg(long, value_name = "ID", default_value_t = 0, value_parser = clap::value_parser!(i64).range(0..))]
    after: i64,
    /// Create the stream if there is none of that name, as the export says it was
    #[arg(long)]
    create: bool,
    /// How a stream made by --create stores payloads, if the file does not say: json (default), jsonb, text or bytea
    #[arg(long, value_name = "TYPE", requires = "create", value_parser = values::payload_type)]
    payload_type: Option<PayloadType>,
}

/// What was imported so far.
#[derive(Default)]
struct Done {
    stored: u64,
    skipped: u64,
    first: Option<i64>,
    last: Option<i64>,
    /// The last message that needs not be imported again, as the file has it: its line or row, and its id.
    upto: Option<(u64, i64)>,
}

pub(crate) async fn run(args: ImportArgs, context: &Context) -> anyhow::Result<ExitCode> {
    // Before anything is created for it. Whoever types it may take long.
    let path = args.file.clone();
    let source = tokio::task::spawn_blocking(move || Source::open(&path)).await??;
    let client = context.updated_or(args.create).await?;
    let stream = open_or_create(&client, &args, source.about.as_ref()).await?;
    let signals = Signals::catch()?;
    let (unit, total) = (source.unit, source.total);
    let progress = Progress::new(context, total, "messages");
    let mut how = Import::new().keep_ids(args.keep_ids);
    if let Some(name) = &args.resume {
        how = how.name(name);
    }
    let mut batches = source.start(stream.payload_type());
    let mut done = Done::default();
    let ended: Result<(), Failure> = loop {
        let batch = tokio::select! {
            biased;
            () = signals.stop.cancelled() => break Ok(()),
            batch = batches.recv() => batch,
        };
        match batch {
            None => break Ok(()),
            Some(Err(failure)) => break Err(failure),
            Some(Ok(batch)) => {
                if let Err(failure) =
                    import(&stream, batch, &how, &args, unit, &mut done, &progress).await
                {
                    break Err(failure);
                }
            }
        }
    };
    progress.clear();
    match (ended, signals.exit_code()) {
        (Ok(()), None) => {
            tell(context, &args, &done)?;
            Ok(ExitCode::SUCCESS)
        }
        (Ok(()), Some(code)) => {
            context.say(&format!("stopped: {}", progressed(&args, unit, &done)));
            if context.json() {
                tell(context, &args, &done)?;
            }
            Ok(ExitCode::from(code))
        }
        (Err(failure), _) => {
            let told = progressed(&args, unit, &done);
            let upto = done.upto.map(|(_, id)| id);
            Err(failure.also_hint(&told).detail("stored", done.stored).detail("upto", upto).into())
        }
    }
}

/// One batch, and what became of it.
async fn import(
    stream: &Stream<Vec<u8>, Bytes>,
    batch: Batch,
    how: &Import,
    args: &ImportArgs,
    unit: &str,
    done: &mut Done,
    progress: &Progress,
) -> Result<(), Failure> {
    let start = batch.messages.partition_point(|message| message.id <= args.after);
    done.skipped += start as u64;
    let (messages, places) = (&batch.messages[start..], &batch.places[start..]);
    let imported = stream.import(messages, how).await.map_err(|error| {
        let failure = Failure::from(&error);
        match (error.place().and_then(|at| places.get(at)), places.first(), places.last()) {
            (Some(place), ..) => failure.within(&format!("{unit} {place}")).detail(unit, *place),
            (None, Some(first), Some(last)) => {
                failure.within(&format!("{unit}s {first} to {last}"))
            }
            _ => failure,
        }
    })?;
    done.stored += imported.stored;
    done.skipped += imported.skipped;
    done.first = done.first.or(imported.first_id);
    done.last = imported.last_id.or(done.last);
    if let (Some(place), Some(message)) = (batch.places.last(), batch.messages.last()) {
        done.upto = Some((*place, message.id));
    }
    progress.update(batch.position, done.stored + done.skipped);
    Ok(())
}

async fn open_or_create(
    client: &Client,
    args: &ImportArgs,
    about: Option<&About>,
) -> anyhow::Result<Stream<Vec<u8>, Bytes>> {
    let builder = || client.stream::<Vec<u8>>(&args.stream).codec::<Bytes>();
    let exported = about.map(|about| about.payload_type.parse::<PayloadType>()).transpose()?;
    let stream = match builder().open().await {
        Err(error) if args.create && error.kind() == ErrorKind::UnknownStream => {
            let mut builder =
                builder().payload_type(args.payload_type.or(exported).unwrap_or_default());
            if let Some(about) = about {
                builder = builder.partition_size(about.partition_size).compacted(about.compacted);
            }
            builder.create_if_missing().await?
        }
        Err(error) if error.kind() == ErrorKind::UnknownStream => {
            return Err(Failure::from(&error).also_hint("Or pass --create.").into());
        }
        opened => opened?,
    };
    let stores = stream.payload_type();
    let is_json = |t: PayloadType| matches!(t, PayloadType::Json | PayloadType::Jsonb);
    if let Some(exported) = exported
        && exported != stores
        && !(is_json(exported) && is_json(stores))
    {
        let text = format!(
            "stream {:?} stores {stores}, and the messages are of one that stores {exported}",
            args.stream
        );
        return Err(Failure::usage("payload_type", text)
            .hint("Import them into another stream; --create makes it.")
            .into());
    }
    Ok(stream)
}

/// How far it came, and how to go on.
fn progressed(args: &ImportArgs, unit: &str, done: &Done) -> String {
    let stored = match done.stored {
        1 => "1 message is stored".to_owned(),
        stored => format!("{} are stored", counted(stored, "message")),
    };
    let Some((place, id)) = done.upto else {
        return format!("{}{stored}.", if done.stored == 0 { "So far " } else { "" });
    };
    let go_on = match (&args.resume, args.keep_ids) {
        (Some(name), _) => format!("repeat it with --resume {} to go on", shell_word(name)),
        (None, true) => "repeat it to go on: what is there already is passed over".to_owned(),
        (None, false) => format!("repeat it with --after {id} to go on"),
    };
    let place = thousands(place);
    printable(&format!("So far {stored}, up to {unit} {place}, id {id} of the file; {go_on}."), 500)
}

fn tell(context: &Context, args: &ImportArgs, done: &Done) -> anyhow::Result<()> {
    if context.json() {
        return print_json(&json!({
            "stream": args.stream,
            "stored": done.stored,
            "skipped": done.skipped,
            "first_id": done.first,
            "last_id": done.last,
            "upto": done.upto.map(|(_, id)| id),
        }));
    }
    let ids = match (done.first, done.last) {
        (Some(first), Some(last)) => format!(", ids {} to {}", thousands(first), thousands(last)),
        _ => String::new(),
    };
    let skipped = match done.skipped {
        0 => String::new(),
        skipped => format!("; {} were there already", thousands(skipped)),
    };
    print(format_args!(
        "imported {} into stream {:?}{ids}{skipped}",
        counted(done.stored, "message"),
        args.stream
    ))
}
