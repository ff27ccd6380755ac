//! Printing payloads on stdout.
//!
//! One thread does all the writing: it takes what waits, writes it at once and only then answers, so that a message counts
//! as handled after it was written, many share a system call, and a reader that is slow or stopped holds up neither the
//! consumer's heartbeats nor its shutdown.

use std::io::{self, Write};
use std::sync::mpsc;
use std::thread;

use serde_json::json;
use sqlstreams::{Delivery, Outcome, PayloadType};
use tokio::sync::oneshot;

use super::Shared;
use crate::failure::Failure;
use crate::output::time;
use crate::payload;

/// What one write takes at most, but for a single payload that is larger.
const WRITE: usize = 256 * 1024;

#[derive(Clone)]
pub(super) struct Printer {
    lines: mpsc::Sender<Line>,
    /// The payloads' type, when messages are printed as JSON.
    json: Option<PayloadType>,
    shared: Shared,
}

struct Line {
    text: Vec<u8>,
    written: oneshot::Sender<io::Result<()>>,
}

impl Printer {
    pub(super) fn start(json: Option<PayloadType>, shared: Shared) -> Self {
        // Holds no more than one line for each handler.
        let (lines, waiting) = mpsc::channel();
        thread::spawn(move || write_all(io::stdout(), &waiting));
        Self { lines, json, shared }
    }

    pub(super) async fn handle(self, message: Delivery<Vec<u8>>) -> Outcome {
        let text = match self.json {
            Some(payload_type) => as_json(&message, payload_type),
            None => {
                let mut text = message.into_payload();
                text.push(b'\n');
                text
            }
        };
        let (written, answer) = oneshot::channel();
        // The thread ends after an error only, which those that waited have reported.
        let sent = self.lines.send(Line { text, written }).is_ok();
        match answer.await {
            Ok(Ok(())) => {
                self.shared.count();
                Outcome::Done
            }
            // Whoever closed our output, `head` for one, has seen enough: that is no failure.
            Ok(Err(error)) if error.kind() == io::ErrorKind::BrokenPipe => {
                self.shared.give_up(None).await
            }
            Ok(Err(error)) => {
                let failure =
                    Failure::failed("output", format!("could not write to stdout: {error}"));
                self.shared.give_up(Some(failure)).await
            }
            Err(_) => {
                debug_assert!(!sent || self.shared.signals.abort.is_cancelled());
                self.shared.give_up(None).await
            }
        }
    }
}

fn write_all(mut out: impl Write, waiting: &mpsc::Receiver<Line>) {
    let mut text = Vec::with_capacity(WRITE);
    let mut answers = Vec::new();
    while let Ok(first) = waiting.recv() {
        let mut next = Some(first);
        while let Some(line) = next {
            text.extend_from_slice(&line.text);
            answers.push(line.written);
            next = if text.len() < WRITE { waiting.try_recv().ok() } else { None };
        }
        let result = out.write_all(&text).and_then(|()| out.flush());
        let failed = result.is_err();
        for answer in answers.drain(..) {
            let copy = match &result {
                Ok(()) => Ok(()),
                Err(error) => Err(io::Error::new(error.kind(), error.to_string())),
            };
            // A handler that was dropped meanwhile has its message handed back: it comes again.
            let _ = answer.send(copy);
        }
        if failed {
            return;
        }
        text.clear();
    }
}

fn as_json(message: &Delivery<Vec<u8>>, payload_type: PayloadType) -> Vec<u8> {
    let about = json!({
        "id": message.id,
        "key": message.key,
        "routing_key": message.routing_key,
        "headers": message.headers,
        "produced_at": time(message.produced_at),
        "attempt": message.attempt(),
        "tombstone": message.tombstone,
    });
    let mut line = about.to_string().into_bytes();
    // The payload goes in as it is; a value in between would respell its numbers.
    line.pop();
    line.extend_from_slice(b",\"payload\":");
    match message.tombstone {
        true => line.extend_from_slice(b"null"),
        false => payload::write_json(&mut line, &message.payload, payload_type),
    }
    line.extend_from_slice(b"}\n");
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes so many bytes, then nobody reads any more.
    struct Pipe(usize);

    impl Write for Pipe {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            if self.0 == 0 {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            let taken = bytes.len().min(self.0);
            self.0 -= taken;
            Ok(taken)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn nothing_is_confirmed_that_was_not_written_whole() {
        let (lines, waiting) = mpsc::channel();
        let answers: Vec<_> = (0..3)
            .map(|_| {
                let (written, answer) = oneshot::channel();
                lines.send(Line { text: vec![b'x'; WRITE], written }).unwrap();
                answer
            })
            .collect();
        write_all(Pipe(WRITE + 1), &waiting);
        drop(waiting);
        let confirmed: Vec<bool> =
            answers.into_iter().map(|a| matches!(a.blocking_recv(), Ok(Ok(())))).collect();
        assert_eq!(confirmed, [true, false, false]);
    }
}
