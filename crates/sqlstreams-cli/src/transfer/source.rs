//! Where an import reads from: lines of a file or of stdin, or a Parquet file, in batches, in a thread of its own.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Cursor, Read};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::thread;

use anyhow::Context as _;
use sqlstreams::{PayloadType, Record};
use tokio::sync::mpsc;

use super::line::{self, End, Line};
use super::parquet::{MAGIC, Reader, is_parquet};
use super::{About, FORMAT};
use crate::failure::Failure;
use crate::output::printable;

/// A batch has so many messages, and about so many bytes of lines, at most.
const MESSAGES: usize = 1_000;
const BYTES: usize = 8 * 1024 * 1024;
/// A line of the largest payload, every byte of it escaped.
const LONGEST_LINE: u64 = 512 * 1024 * 1024;
/// Batches that wait for the importer.
const QUEUE: usize = 2;
const BUFFER: usize = 256 * 1024;

/// Messages, and where they are from.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    pub(crate) messages: Vec<Record<Vec<u8>>>,
    /// The lines or rows that they are, counted from 1.
    pub(crate) places: Vec<u64>,
    /// How far it goes: in bytes of a file of lines, in rows of a Parquet file.
    pub(crate) position: u64,
    /// What the last line says, where this is the last batch.
    pub(crate) end: Option<End>,
}

/// What is to be imported.
pub(crate) struct Source {
    pub(crate) about: Option<About>,
    /// What [`Batch::position`] comes to, if that is known.
    pub(crate) total: Option<u64>,
    /// "line" or "row".
    pub(crate) unit: &'static str,
    input: Input,
}

enum Input {
    /// What was read of it already, and the rest.
    Lines(Box<dyn BufRead + Send>, First),
    Rows(Box<Reader>),
}

/// The first line that is not blank, and what comes before it.
struct First {
    line: Vec<u8>,
    blank_lines: u64,
    blank_bytes: u64,
}

impl Source {
    /// `-` is stdin. Reads as much as tells what stream the messages are from.
    pub(crate) fn open(path: &Path) -> anyhow::Result<Self> {
        if path.as_os_str() == "-" {
            return Self::of_lines(Box::new(io::stdin()), "stdin", None);
        }
        let unreadable = || format!("could not read {}", path.display());
        let file = File::open(path).with_context(unreadable)?;
        let about = file.metadata().with_context(unreadable)?;
        // What is read from a pipe is gone from it.
        if about.is_file() && is_parquet(path) {
            let odd = |e: ::parquet::errors::ParquetError| {
                let text = format!("{} cannot be read: {}", path.display(), said(&e));
                Failure::failed("invalid_file", text)
            };
            let reader = Reader::open(file).map_err(odd)?;
            return Ok(Self {
                about: reader.about().map_err(odd)?,
                total: Some(reader.rows()),
                unit: "row",
                input: Input::Rows(Box::new(reader)),
            });
        }
        let total = about.is_file().then_some(about.len());
        Self::of_lines(Box::new(file), &path.display().to_string(), total)
    }

    fn of_lines(
        mut input: Box<dyn Read + Send>,
        name: &str,
        total: Option<u64>,
    ) -> anyhow::Result<Self> {
        let unreadable = || format!("could not read the first line of {name}");
        let mut magic = Vec::new();
        let read = input.by_ref().take(MAGIC.len() as u64).read_to_end(&mut magic);
        read.with_context(unreadable)?;
        if magic == MAGIC {
            let text = format!(
                "{name} brings a Parquet file, which cannot be read from a pipe: what is in it stands at its end"
            );
            return Err(Failure::usage("parquet_from_pipe", text)
                .hint("Save it, and name the file: `sqlstreams stream import STREAM FILE`.")
                .into());
        }
        let input = Cursor::new(magic).chain(input);
        let mut lines: Box<dyn BufRead + Send> = Box::new(BufReader::with_capacity(BUFFER, input));
        let Some(first) = First::read(&mut lines).with_context(unreadable)? else {
            let text =
                format!("{name} is empty: it holds no message, and is no export of nothing either");
            return Err(Failure::failed("empty_input", text)
                .hint("An export has a first and a last line, with or without messages between them: look at what was to write this one.")
                .into());
        };
        // Whatever it is in other respects: the payloads' type is only known from there.
        let about = match line::parse(&first.line, PayloadType::Json) {
            Ok(Line::About(about)) if about.format > FORMAT => {
                let text = format!(
                    "the file has format {}, later than the {FORMAT} that this program reads",
                    about.format
                );
                return Err(Failure::failed("invalid_file", text)
                    .hint("Upgrade this program.")
                    .into());
            }
            Ok(Line::About(about)) => Some(about),
            _ => None,
        };
        Ok(Self { about, total, unit: "line", input: Input::Lines(lines, first) })
    }

    /// Starts to read, for a stream that stores payloads so. The channel closes at the end, or after an error.
    pub(crate) fn start(self, payload_type: PayloadType) -> mpsc::Receiver<Result<Batch, Failure>> {
        let (batches, receiver) = mpsc::channel(QUEUE);
        thread::spawn(move || {
            // A file that is damaged may make the Parquet reader panic, and that is not its end.
            let ended = catch_unwind(AssertUnwindSafe(|| match self.input {
                Input::Lines(lines, first) => {
                    send_lines(lines, first, self.about.is_some(), payload_type, &batches)
                }
                Input::Rows(reader) => send_rows(*reader, &batches),
            }));
            let damaged = |_| {
                let text = "the file cannot be read any further: it is damaged";
                Err(Failure::failed("invalid_file", text)
                    .hint("What came before is stored, and told of. Export it again."))
            };
            if let Err(failure) = ended.unwrap_or_else(damaged) {
                // Nobody listens when the command has ended for another reason.
                let _ = batches.blocking_send(Err(failure));
            }
        });
        receiver
    }
}

impl First {
    /// None where there is none.
    fn read(lines: &mut Box<dyn BufRead + Send>) -> io::Result<Option<Self>> {
        let (mut blank_lines, mut blank_bytes) = (0, 0);
        while let Some(line) = read_line(lines)? {
            if !is_blank(&line) {
                return Ok(Some(Self { line, blank_lines, blank_bytes }));
            }
            blank_lines += 1;
            blank_bytes += line.len() as u64;
        }
        Ok(None)
    }
}

type Batches = mpsc::Sender<Result<Batch, Failure>>;

fn send_lines(
    mut lines: Box<dyn BufRead + Send>,
    first: First,
    has_about: bool,
    payload_type: PayloadType,
    batches: &Batches,
) -> Result<(), Failure> {
    let (mut number, mut position) = (first.blank_lines, first.blank_bytes);
    let (mut bytes, mut messages, mut last) = (0, 0, 0);
    let first_number = number + 1;
    let mut next = Some(first.line);
    let mut batch = Batch::default();
    loop {
        let read = match next.take() {
            Some(first) => Some(first),
            None => read_line(&mut lines).map_err(|error| {
                let text = format!("could not read line {}: {error}", number + 1);
                // What came before it is stored, and told of.
                Failure::failed("input", text)
            })?,
        };
        let Some(text) = read else {
            if batch.end.is_none() && has_about {
                if send(&mut batch, batches).is_err() {
                    return Ok(());
                }
                return Err(Failure::failed("cut_off", "the file ends before its last line: it was cut off")
                    .hint("What it has is stored. Import the whole file: what is there already is passed over with --keep-ids or --resume."));
            }
            let _ = send(&mut batch, batches);
            return Ok(());
        };
        number += 1;
        position += text.len() as u64;
        let text_bytes = text.len();
        let invalid = |reason: &str| {
            Failure::failed("invalid_line", format!("line {number}: {}", printable(reason, 300)))
                .detail("line", number)
        };
        if is_blank(&text) {
            continue;
        }
        let parsed = line::parse(&text, payload_type);
        let is_after_end = batch.end.is_some();
        match parsed {
            _ if is_after_end => {
                let _ = send(&mut batch, batches);
                return Err(invalid("it comes after the last line of the export"));
            }
            Ok(Line::Message(message)) if message.id > last => {
                last = message.id;
                batch.messages.push(*message);
                batch.places.push(number);
                messages += 1;
                bytes += text_bytes;
            }
            Ok(Line::About(_)) if number == first_number => {}
            // A file without its first line may lack others. Of one that has nothing else, all messages are missing.
            Ok(Line::End(end))
                if end.messages == messages || !has_about && number > first_number =>
            {
                batch.end = Some(end);
            }
            wrong => {
                // What came before it is stored first.
                if send(&mut batch, batches).is_err() {
                    return Ok(());
                }
                return Err(match wrong {
                    Ok(Line::End(end)) => invalid(&format!(
                        "the export has {} messages, and {messages} came before this line",
                        end.messages
                    )),
                    Ok(Line::Message(message)) => invalid(&out_of_order(message.id, last)),
                    Ok(_) => invalid("another export begins here: import one file at a time"),
                    Err(reason) => invalid(&reason),
                });
            }
        }
        batch.position = position;
        if batch.messages.len() >= MESSAGES || bytes >= BYTES {
            bytes = 0;
            if send(&mut batch, batches).is_err() {
                return Ok(());
            }
        }
    }
}

fn send_rows(mut reader: Reader, batches: &Batches) -> Result<(), Failure> {
    let (mut number, mut last) = (0, 0);
    let total = reader.rows();
    loop {
        let messages = reader.next(MESSAGES).map_err(|error| {
            let text = format!("after row {number}: {}", said(&error));
            Failure::failed("invalid_row", text).detail("row", number)
        })?;
        if messages.is_empty() && number < total {
            let text = format!("the file has {total} rows, and ends after row {number}");
            return Err(Failure::failed("cut_off", text));
        }
        if messages.is_empty() {
            return Ok(());
        }
        for (row, message) in (number + 1..).zip(&messages) {
            if message.id <= last {
                let text = format!("row {row}: {}", out_of_order(message.id, last));
                return Err(Failure::failed("invalid_row", text).detail("row", row));
            }
            last = message.id;
        }
        let places = (number + 1..).take(messages.len()).collect();
        number += messages.len() as u64;
        let mut batch = Batch { messages, places, position: number, end: None };
        if send(&mut batch, batches).is_err() {
            return Ok(());
        }
    }
}

/// Where ids do not ascend, an import could not go on where it ended.
fn out_of_order(id: i64, last: i64) -> String {
    match last {
        0 => format!("ids begin at 1, and this one is {id}"),
        _ => format!("ids ascend, and id {id} comes after {last}"),
    }
}

/// What is in the batch, which is empty then; an error where nobody listens any more.
fn send(batch: &mut Batch, batches: &Batches) -> Result<(), ()> {
    let batch = std::mem::take(batch);
    match batch.messages.is_empty() && batch.end.is_none() {
        true => Ok(()),
        false => batches.blocking_send(Ok(batch)).map_err(drop),
    }
}

fn is_blank(line: &[u8]) -> bool {
    line.iter().all(u8::is_ascii_whitespace)
}

/// With its line feed, but that of the last may be missing. None at the end.
fn read_line(lines: &mut Box<dyn BufRead + Send>) -> io::Result<Option<Vec<u8>>> {
    let mut line = Vec::new();
    lines.take(LONGEST_LINE).read_until(b'\n', &mut line)?;
    if line.len() as u64 == LONGEST_LINE && line.last() != Some(&b'\n') {
        return Err(io::Error::other("it is longer than 512 MiB"));
    }
    Ok(Some(line).filter(|line| !line.is_empty()))
}

/// Without the crate's words before it.
fn said(error: &::parquet::errors::ParquetError) -> String {
    let text = error.to_string();
    text.strip_prefix("Parquet error: ").unwrap_or(&text).to_owned()
}
