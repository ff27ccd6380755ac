//! The messages: numbered, of a given size, and the count of those that came.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::Notify;

/// What comes before and after the padding. Digits come first in the number: [`number`] looks for them.
const FRAME: usize = r#"{"n":"0000000000","pad":""}"#.len();
/// Where the padding is cut from: letters that do not repeat, so that nobody's compression finds much.
const LETTERS: usize = 8_192;

/// A run of numbered messages of one size. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Messages {
    pub(crate) numbers: Range<u64>,
    bytes: usize,
    letters: Arc<str>,
}

impl Messages {
    /// None yet; payloads of so many bytes, but at least what a number takes.
    pub(crate) fn of_size(bytes: usize) -> Self {
        let mut state = 0x9E37_79B9_7F4A_7C15_u64;
        let mut letter = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            char::from(b'a' + (state % 26) as u8)
        };
        let letters = (0..LETTERS + bytes).map(|_| letter()).collect::<String>();
        Self { numbers: 0..0, bytes, letters: letters.into() }
    }

    /// The same with other numbers.
    pub(crate) fn numbered(&self, numbers: Range<u64>) -> Self {
        Self { numbers, ..self.clone() }
    }

    pub(crate) fn count(&self) -> u64 {
        self.numbers.end - self.numbers.start
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// JSON, which every peer can store.
    pub(crate) fn payload(&self, number: u64) -> String {
        format!(r#"{{"n":"{number:010}","pad":"{}"}}"#, self.padding(number))
    }

    /// What a message is padded with.
    pub(crate) fn padding(&self, number: u64) -> &str {
        let from = (number % LETTERS as u64) as usize;
        &self.letters[from..from + self.bytes.saturating_sub(FRAME)]
    }

    /// In so many runs of about the same length, for tasks that work at once.
    pub(crate) fn split(&self, parts: u64) -> Vec<Self> {
        let Range { start, end } = self.numbers;
        let at = |part| start + (end - start) * part / parts;
        (0..parts).map(|part| self.numbered(at(part)..at(part + 1))).collect()
    }

    /// The payloads in batches.
    pub(crate) fn batches(&self, size: usize) -> impl Iterator<Item = Vec<String>> {
        let Range { start, end } = self.numbers;
        let batch = move |from: u64| {
            (from..(from + size as u64).min(end)).map(|n| self.payload(n)).collect()
        };
        (start..end).step_by(size).map(batch)
    }
}

/// The number in a payload, however the peer has put it: the first digits.
pub(crate) fn number(payload: &[u8]) -> Option<u64> {
    let digits = payload.iter().skip_while(|byte| !byte.is_ascii_digit());
    let mut digits = digits.take_while(|byte| byte.is_ascii_digit()).peekable();
    digits.peek()?;
    Some(digits.fold(0, |number: u64, digit| {
        number.wrapping_mul(10).wrapping_add(u64::from(digit - b'0'))
    }))
}

/// Which of a run of messages were received: each must be, at least once.
#[derive(Debug)]
pub(crate) struct Seen {
    numbers: Range<u64>,
    bits: Vec<AtomicU64>,
    left: AtomicU64,
    repeated: AtomicU64,
    complete: Notify,
}

impl Seen {
    pub(crate) fn of(messages: &Messages) -> Arc<Self> {
        let words = messages.count().div_ceil(64);
        Arc::new(Self {
            numbers: messages.numbers.clone(),
            bits: (0..words).map(|_| AtomicU64::new(0)).collect(),
            left: AtomicU64::new(messages.count()),
            repeated: AtomicU64::new(0),
            complete: Notify::new(),
        })
    }

    /// Counts a received payload; one of another run does not count.
    pub(crate) fn payload(&self, payload: &[u8]) {
        if let Some(number) = number(payload) {
            self.number(number);
        }
    }

    pub(crate) fn number(&self, number: u64) {
        if !self.numbers.contains(&number) {
            return;
        }
        let place = number - self.numbers.start;
        let bit = 1 << (place % 64);
        if self.bits[(place / 64) as usize].fetch_or(bit, Ordering::Relaxed) & bit != 0 {
            self.repeated.fetch_add(1, Ordering::Relaxed);
        } else if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.complete.notify_waiters();
        }
    }

    pub(crate) fn numbers(&self) -> Range<u64> {
        self.numbers.clone()
    }

    pub(crate) fn left(&self) -> u64 {
        self.left.load(Ordering::Acquire)
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.left() == 0
    }

    /// How many came more than once.
    pub(crate) fn repeated(&self) -> u64 {
        self.repeated.load(Ordering::Relaxed)
    }

    /// Adds what another process counted.
    pub(crate) fn add_repeated(&self, count: u64) {
        self.repeated.fetch_add(count, Ordering::Relaxed);
    }

    /// Returns when all have come.
    pub(crate) async fn complete(&self) {
        let told = self.complete.notified();
        tokio::pin!(told);
        // From here on it is told, so that the last message is not missed in between.
        told.as_mut().enable();
        if !self.is_complete() {
            told.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payloads_have_their_size_and_number() {
        for bytes in [100, 1_000] {
            let messages = Messages::of_size(bytes).numbered(7..9);
            for n in [0, 7, 123_456_789] {
                let payload = messages.payload(n);
                assert_eq!(payload.len(), bytes);
                assert_eq!(number(payload.as_bytes()), Some(n));
                assert!(serde_json::from_str::<serde_json::Value>(&payload).is_ok());
            }
        }
        // As a `jsonb` column writes it.
        assert_eq!(number(br#"{"n": "0000000042", "pad": "x"}"#), Some(42));
        assert_eq!(number(b"none"), None);
    }

    #[test]
    fn splitting_and_batching_keep_every_message() {
        let messages = Messages::of_size(100).numbered(10..33);
        let parts = messages.split(4);
        let numbers = parts.iter().flat_map(|part| part.numbers.clone()).collect::<Vec<_>>();
        assert_eq!(numbers, (10..33).collect::<Vec<_>>());
        let batches = messages.batches(5).collect::<Vec<_>>();
        assert_eq!(batches.iter().map(Vec::len).collect::<Vec<_>>(), [5, 5, 5, 5, 3]);
        assert_eq!(number(batches[4][2].as_bytes()), Some(32));
    }

    #[tokio::test]
    async fn each_message_counts_once_and_none_is_overlooked() {
        let seen = Seen::of(&Messages::of_size(100).numbered(5..8));
        seen.number(5);
        seen.number(5);
        seen.number(99);
        seen.number(7);
        assert_eq!((seen.left(), seen.repeated(), seen.is_complete()), (1, 1, false));
        seen.number(6);
        seen.complete().await;
        assert_eq!(seen.left(), 0);
    }
}
