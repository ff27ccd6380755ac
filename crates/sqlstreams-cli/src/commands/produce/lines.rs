//! Reading lines in a thread of its own, so that the next batch is read and looked through while another commits, and so
//! that an input that is silent holds up nothing else.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::thread;

use sqlstreams::{Headers, MAX_PAYLOAD_BYTES};
use tokio::sync::mpsc;

use super::field;

/// What a batch may weigh.
pub(super) const BATCH_BYTES: usize = 8 * 1024 * 1024;
/// Chunks that wait for the sender: enough to keep it busy, little enough to keep memory flat.
const QUEUE: usize = 4;
const BUFFER: usize = 256 * 1024;

/// What to read, and how.
pub(super) struct Input {
    /// `None` is stdin.
    pub(super) file: Option<File>,
    /// Lines per batch.
    pub(super) batch: usize,
    pub(super) fields: Fields,
    /// Whether lines of blanks are no messages.
    pub(super) skip_blank: bool,
}

/// From which fields of its JSON is taken what goes with a message.
pub(super) struct Fields {
    pub(super) key: Option<String>,
    pub(super) routing_key: Option<String>,
    pub(super) headers: Option<String>,
    pub(super) idempotency_key: Option<String>,
    pub(super) expect_latest: Option<String>,
}

/// A line of the input.
#[derive(Debug)]
pub(super) struct Line {
    /// Counted from 1.
    pub(super) number: u64,
    pub(super) payload: Vec<u8>,
    pub(super) key: Option<String>,
    pub(super) routing_key: Option<String>,
    pub(super) headers: Option<Headers>,
    pub(super) idempotency_key: Option<String>,
    pub(super) expect_latest: Option<i64>,
    /// Why it cannot be sent, when that is known already.
    pub(super) invalid: Option<String>,
}

/// Some lines that were read without waiting in between.
#[derive(Debug, Default)]
pub(super) struct Chunk {
    pub(super) lines: Vec<Line>,
    /// Blank lines among them.
    pub(super) blank: u64,
    /// Where in the input they end, in bytes.
    pub(super) end: u64,
}

/// Starts to read. The channel closes at the end of the input, or after an error.
pub(super) fn read(input: Input) -> mpsc::Receiver<io::Result<Chunk>> {
    let (chunks, receiver) = mpsc::channel(QUEUE);
    thread::spawn(move || {
        let result = match &input.file {
            Some(file) => read_all(BufReader::with_capacity(BUFFER, file), &input, &chunks),
            None => read_all(BufReader::with_capacity(BUFFER, io::stdin().lock()), &input, &chunks),
        };
        if let Err(error) = result {
            // Nobody listens when the command has ended for another reason.
            let _ = chunks.blocking_send(Err(error));
        }
    });
    receiver
}

fn read_all<R: Read>(
    mut reader: BufReader<R>,
    input: &Input,
    chunks: &mpsc::Sender<io::Result<Chunk>>,
) -> io::Result<()> {
    let (mut number, mut end) = (0, 0);
    let (mut chunk, mut bytes) = (Chunk::default(), 0);
    let mut payload = Vec::new();
    loop {
        let length = read_line(&mut reader, &mut payload, MAX_PAYLOAD_BYTES)?;
        if length > 0 {
            number += 1;
            end += length;
            chunk.end = end;
            if input.skip_blank && payload.iter().all(u8::is_ascii_whitespace) {
                chunk.blank += 1;
            } else {
                bytes += payload.len();
                chunk.lines.push(line(number, std::mem::take(&mut payload), length, input));
            }
        }
        let full = chunk.lines.len() >= input.batch || bytes >= BATCH_BYTES;
        // Without another whole line in the buffer, the next read may wait: hand over what there is.
        if full || length == 0 || !reader.buffer().contains(&b'\n') {
            if chunks.blocking_send(Ok(std::mem::take(&mut chunk))).is_err() {
                return Ok(());
            }
            bytes = 0;
        }
        if length == 0 {
            return Ok(());
        }
    }
}

fn line(number: u64, payload: Vec<u8>, length: u64, input: &Input) -> Line {
    let too_long = length > MAX_PAYLOAD_BYTES as u64 + 1 || payload.len() > MAX_PAYLOAD_BYTES;
    let mut line = Line {
        number,
        payload,
        key: None,
        routing_key: None,
        headers: None,
        idempotency_key: None,
        expect_latest: None,
        invalid: None,
    };
    if too_long {
        line.invalid = Some(format!(
            "a payload of {} bytes is above the limit of {MAX_PAYLOAD_BYTES} bytes (64 MiB)",
            length.saturating_sub(1)
        ));
        return line;
    }
    if let Err(reason) = take_fields(&mut line, &input.fields) {
        line.invalid = Some(reason);
    }
    line
}

fn take_fields(line: &mut Line, fields: &Fields) -> Result<(), String> {
    let Fields { key, routing_key, headers, idempotency_key, expect_latest } = fields;
    let payload = &line.payload;
    line.key = found(payload, key, field::key)?;
    line.routing_key = found(payload, routing_key, field::key)?;
    line.headers = found(payload, headers, field::headers)?;
    line.idempotency_key = found(payload, idempotency_key, field::key)?;
    line.expect_latest = found(payload, expect_latest, field::id)?;
    Ok(())
}

fn found<V>(
    payload: &[u8],
    field: &Option<String>,
    find: impl Fn(&[u8], &str) -> Result<V, String>,
) -> Result<Option<V>, String> {
    field.as_ref().map(|field| find(payload, field)).transpose()
}

/// Reads a line without its line feed, at most `most` + 1 bytes of it: what is longer is read but not kept. Returns how
/// many bytes were read, 0 at the end.
fn read_line(reader: &mut impl BufRead, line: &mut Vec<u8>, most: usize) -> io::Result<u64> {
    line.clear();
    let mut length = 0;
    loop {
        let available = match reader.fill_buf() {
            Ok([]) => return Ok(length),
            Ok(available) => available,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        // No dependency for this: lines are short, and PostgreSQL is what takes the time.
        let (part, used, ends) = match available.iter().position(|&byte| byte == b'\n') {
            Some(at) => (&available[..at], at + 1, true),
            None => (available, available.len(), false),
        };
        let room = (most + 1).saturating_sub(line.len());
        line.extend_from_slice(&part[..part.len().min(room)]);
        length += used as u64;
        reader.consume(used);
        if ends {
            return Ok(length);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(mut text: &[u8], most: usize) -> Vec<(Vec<u8>, u64)> {
        let (mut line, mut found) = (Vec::new(), Vec::new());
        loop {
            match read_line(&mut text, &mut line, most).unwrap() {
                0 => return found,
                length => found.push((line.clone(), length)),
            }
        }
    }

    #[test]
    fn lines_keep_everything_but_their_line_feed() {
        let found = lines(b"a\r\n\n\xff b", 100);
        assert_eq!(found, [(b"a\r".to_vec(), 3), (b"".to_vec(), 1), (b"\xff b".to_vec(), 3)]);
    }

    #[test]
    fn long_lines_are_read_but_not_kept() {
        assert_eq!(lines(b"abcdefgh\nxy", 3), [(b"abcd".to_vec(), 9), (b"xy".to_vec(), 2)]);
    }
}
