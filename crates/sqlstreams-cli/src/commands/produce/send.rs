//! Sending lines in batches, one after the other, so that ids follow the order of the lines and a refusal has a clear
//! "before".

use std::collections::VecDeque;
use std::time::{Duration, SystemTime};

use sqlstreams::{
    Bytes, CancellationToken, Duplicate, ErrorKind, Headers, Outgoing, Producer, Receipt, Stream,
};
use tokio::time::{Instant, timeout_at};

use crate::failure::Failure;
use crate::output::printable;
use crate::progress::Progress;

use super::lines::{self, BATCH_BYTES, Input, Line};

/// How long a batch that is not full waits for more lines.
const LINGER: Duration = Duration::from_millis(100);

/// What has become of the lines.
#[derive(Debug, Clone)]
pub(super) struct Sent {
    pub(super) stored: u64,
    /// Lines that were put off.
    pub(super) delayed: u64,
    /// Lines whose idempotency key was sent before, and those of them whose payload differs.
    pub(super) duplicates: u64,
    pub(super) conflicts: u64,
    /// Invalid lines that were left out.
    pub(super) skipped: u64,
    pub(super) blank: u64,
    /// The first id and the last.
    pub(super) ids: Option<(i64, i64)>,
    /// The first line that was neither stored nor skipped.
    pub(super) next_line: u64,
    /// Whether a signal came before the end of the input.
    pub(super) cut_short: bool,
}

impl Default for Sent {
    fn default() -> Self {
        Self {
            stored: 0,
            delayed: 0,
            duplicates: 0,
            conflicts: 0,
            skipped: 0,
            blank: 0,
            ids: None,
            next_line: 1,
            cut_short: false,
        }
    }
}

/// How to send.
pub(super) struct Options {
    pub(super) headers: Option<Headers>,
    pub(super) expect_latest: Option<i64>,
    pub(super) delay: Option<Duration>,
    pub(super) deliver_at: Option<SystemTime>,
    pub(super) expires_in: Option<Duration>,
    pub(super) expires_at: Option<SystemTime>,
    pub(super) skip_invalid: bool,
    pub(super) json: bool,
}

pub(super) struct Sender<'a> {
    producer: Producer<Vec<u8>, Bytes>,
    progress: &'a Progress,
    options: Options,
    /// Lines that were read and not sent, and what they weigh.
    waiting: VecDeque<Line>,
    waiting_bytes: usize,
    read_bytes: u64,
    pub(super) sent: Sent,
}

impl<'a> Sender<'a> {
    pub(super) fn new(
        stream: &Stream<Vec<u8>, Bytes>,
        progress: &'a Progress,
        options: Options,
    ) -> Self {
        Self {
            producer: stream.producer(),
            progress,
            options,
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            read_bytes: 0,
            sent: Sent::default(),
        }
    }

    /// Sends everything, or up to the signal. A batch that is being sent is finished in any case.
    pub(super) async fn send(
        &mut self,
        input: Input,
        stop: &CancellationToken,
    ) -> anyhow::Result<()> {
        let size = input.batch;
        let mut chunks = lines::read(input);
        let mut deadline = None;
        loop {
            let due = deadline.unwrap_or_else(|| Instant::now() + Duration::from_secs(3600));
            let chunk = tokio::select! {
                biased;
                () = stop.cancelled() => {
                    self.sent.cut_short = true;
                    return Ok(());
                }
                chunk = timeout_at(due, chunks.recv()) => chunk,
            };
            let (flush, end) = match chunk {
                Err(_) => (true, false),
                Ok(None) => (true, true),
                Ok(Some(chunk)) => {
                    let chunk = chunk.map_err(|error| {
                        Failure::failed("unreadable_file", format!("cannot read on: {error}"))
                    })?;
                    self.sent.blank += chunk.blank;
                    self.read_bytes = chunk.end.max(self.read_bytes);
                    self.waiting_bytes +=
                        chunk.lines.iter().map(|line| line.payload.len()).sum::<usize>();
                    self.waiting.extend(chunk.lines);
                    (false, false)
                }
            };
            while self.waiting.len() >= size
                || self.waiting_bytes >= BATCH_BYTES
                || (flush && !self.waiting.is_empty())
            {
                if stop.is_cancelled() {
                    break;
                }
                let batch = self.take_batch(size);
                self.send_batch(batch).await?;
            }
            if end && !stop.is_cancelled() {
                return Ok(());
            }
            deadline = match self.waiting.is_empty() {
                true => None,
                // Counted from the first line that waits.
                false if flush || deadline.is_none() => Some(Instant::now() + LINGER),
                false => deadline,
            };
        }
    }

    fn take_batch(&mut self, size: usize) -> Vec<Line> {
        let mut batch = Vec::with_capacity(size.min(self.waiting.len()));
        let mut bytes = 0;
        while batch.len() < size && bytes < BATCH_BYTES {
            let Some(line) = self.waiting.pop_front() else { break };
            bytes += line.payload.len();
            batch.push(line);
        }
        self.waiting_bytes = self.waiting_bytes.saturating_sub(bytes);
        batch
    }

    async fn send_batch(&mut self, mut batch: Vec<Line>) -> anyhow::Result<()> {
        let last = batch.last().map_or(self.sent.next_line, |line| line.number);
        if let Some(line) = batch.iter().find(|line| line.invalid.is_some())
            && !self.options.skip_invalid
        {
            let reason = line.invalid.clone().unwrap_or_default();
            return Err(refused(line.number, &reason).into());
        }
        self.skip(&mut batch);
        let receipts = match self
            .producer
            .send_all(batch.iter().map(|line| self.options.outgoing(line)))
            .await
        {
            Err(error) if is_refusal(error.kind()) => match self.options.skip_invalid {
                true => self.send_valid(&mut batch).await?,
                false => return Err(self.name_line(error, &batch).into()),
            },
            Err(error) if error.kind() == ErrorKind::Conflict => {
                return Err(conflict(&error, &batch).into());
            }
            sent => sent?,
        };
        for (line, receipt) in batch.iter().zip(receipts) {
            self.count(line, receipt);
        }
        self.sent.next_line = last + 1;
        self.progress.update(self.read_bytes, self.sent.stored);
        Ok(())
    }

    /// Sends a batch that was refused without its invalid lines.
    async fn send_valid(&mut self, batch: &mut Vec<Line>) -> anyhow::Result<Vec<Receipt>> {
        for invalid in
            self.producer.find_invalid(batch.iter().map(|line| self.options.outgoing(line))).await?
        {
            batch[invalid.place].invalid = Some(invalid.reason);
        }
        self.skip(batch);
        Ok(self.producer.send_all(batch.iter().map(|line| self.options.outgoing(line))).await?)
    }

    fn count(&mut self, line: &Line, receipt: Receipt) {
        let Some(duplicate) = receipt.duplicate else {
            if receipt.delayed {
                self.sent.delayed += 1;
            } else {
                let first = self.sent.ids.map_or(receipt.id, |ids| ids.0);
                self.sent.ids = Some((first, receipt.id));
                self.sent.stored += 1;
            }
            return;
        };
        self.sent.duplicates += 1;
        if duplicate == Duplicate::OtherPayload {
            self.sent.conflicts += 1;
            let (number, id) = (line.number, receipt.id);
            if self.options.json {
                let conflict = serde_json::json!({"line": number, "id": id});
                self.progress.say(&serde_json::json!({ "conflict": conflict }).to_string());
            } else {
                self.progress.say(&format!(
                    "line {number} is not stored: message {id} has its idempotency key and another payload"
                ));
            }
        }
    }

    /// Reports the invalid lines of a batch and takes them out.
    fn skip(&mut self, batch: &mut Vec<Line>) {
        batch.retain(|line| {
            let Some(reason) = &line.invalid else { return true };
            let reason = printable(reason, 300);
            if self.options.json {
                let skipped = serde_json::json!({"line": line.number, "reason": reason});
                self.progress.say(&serde_json::json!({ "skipped": skipped }).to_string());
            } else {
                self.progress.say(&format!("line {} skipped: {reason}", line.number));
            }
            self.sent.skipped += 1;
            false
        });
    }

    /// The error of a refused batch, in terms of lines.
    fn name_line(&self, error: sqlstreams::Error, batch: &[Line]) -> Failure {
        let Some(line) = error.place().and_then(|place| batch.get(place)) else {
            return Failure::from(&error);
        };
        // "message 3 of 10: why" speaks of the batch.
        let text = error.to_string();
        let reason = match text.split_once(": ") {
            Some((place, reason)) if place.starts_with("message ") => reason,
            _ => &text,
        };
        refused(line.number, reason)
    }
}

impl Options {
    fn outgoing<'l>(&self, line: &'l Line) -> Outgoing<'l, Vec<u8>> {
        let mut message = Outgoing::new(&line.payload);
        if let Some(key) = &line.key {
            message = message.key(key);
        }
        if let Some(key) = &line.routing_key {
            message = message.routing_key(key);
        }
        let headers = [&self.headers, &line.headers].into_iter().flatten();
        // The line's own replace those of all.
        let headers = headers.cloned().reduce(|all, own| all.into_iter().chain(own).collect());
        if let Some(headers) = headers {
            message = message.headers(headers);
        }
        if let Some(id) = line.expect_latest.or(self.expect_latest) {
            message = message.expect_latest((id > 0).then_some(id));
        }
        if let Some(key) = &line.idempotency_key {
            message = message.idempotency_key(key);
        }
        if let Some(delay) = self.delay {
            message = message.delay(delay);
        }
        if let Some(at) = self.deliver_at {
            message = message.deliver_at(at);
        }
        if let Some(time) = self.expires_in {
            message = message.expires_in(time);
        }
        if let Some(at) = self.expires_at {
            message = message.expires_at(at);
        }
        message
    }
}

/// Whether the error is about a message, not about the database.
fn is_refusal(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::InvalidMessage | ErrorKind::TooLarge)
}

/// A key whose current value is not the expected one: the error names it, and the batch says about where it is.
fn conflict(error: &sqlstreams::Error, batch: &[Line]) -> Failure {
    let failure = Failure::from(error);
    let failure = match batch {
        [line] => failure.within(&format!("line {}", line.number)).detail("line", line.number),
        [first, .., last] => failure.within(&format!("lines {} to {}", first.number, last.number)),
        [] => failure,
    };
    failure.detail("latest_id", error.latest_id())
}

fn refused(line: u64, reason: &str) -> Failure {
    Failure::failed("invalid_message", format!("line {line}: {}", printable(reason, 300)))
        .hint("Mend the line, or pass --skip-invalid to leave such lines out.")
        .detail("line", line)
}
