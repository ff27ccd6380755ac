//! What becomes of a message that a handler had.

use std::error::Error as StdError;
use std::time::Duration;

use crate::reason::describe;

/// The longest error text that is kept, in bytes of UTF-8; what is longer is cut between characters.
pub const MAX_ERROR_BYTES: usize = 8 * 1024;

/// How a handler ended with a message.
///
/// Handlers may return it, or anything that [`IntoOutcome`] covers: `()`, `Result<(), E>` or `Result<Outcome, E>`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// Handled.
    Done,
    /// Failed: try again after the group's backoff, unless its attempts are spent.
    Retry(String),
    /// Failed: try again after this long, unless the group's attempts are spent.
    RetryAfter(String, Duration),
    /// Failed for good: a dead letter at once, for this reason.
    Dead(String),
    /// Not now: hand it out again after this long. Not a failure, no attempt is counted.
    Delay(Duration),
}

/// What handlers may return.
#[diagnostic::on_unimplemented(
    message = "a handler cannot return `{Self}`",
    note = "it returns `()`, an `Outcome`, or a `Result` of either: end with `Ok(())` what returns something else"
)]
pub trait IntoOutcome {
    /// The outcome that is meant.
    fn into_outcome(self) -> Outcome;
}

impl IntoOutcome for Outcome {
    fn into_outcome(self) -> Outcome {
        self
    }
}

impl IntoOutcome for () {
    fn into_outcome(self) -> Outcome {
        Outcome::Done
    }
}

/// `Err` means retry. The error may be any error, also one of `anyhow` or a boxed one, or a text; what it says is kept, with
/// its sources, and with what PostgreSQL said in detail.
impl<E: Into<AnyError>> IntoOutcome for Result<(), E> {
    fn into_outcome(self) -> Outcome {
        self.map(|()| Outcome::Done).into_outcome()
    }
}

/// `Err` means retry, as above.
impl<E: Into<AnyError>> IntoOutcome for Result<Outcome, E> {
    fn into_outcome(self) -> Outcome {
        self.unwrap_or_else(|e| Outcome::Retry(describe(&*e.into())))
    }
}

type AnyError = Box<dyn StdError + Send + Sync>;

/// What handlers of batches may return.
pub trait IntoOutcomes {
    /// The outcomes that are meant, one for each of the batch's `messages`, in their order.
    fn into_outcomes(self, messages: usize) -> Vec<Outcome>;
}

/// Everything was handled.
impl IntoOutcomes for () {
    fn into_outcomes(self, messages: usize) -> Vec<Outcome> {
        vec![Outcome::Done; messages]
    }
}

/// One outcome for each message. Any other number is a failure of the whole batch: nobody can say which is whose.
impl IntoOutcomes for Vec<Outcome> {
    fn into_outcomes(self, messages: usize) -> Vec<Outcome> {
        if self.len() == messages {
            return self;
        }
        let error = format!("the handler returned {} outcomes for {messages} messages", self.len());
        vec![Outcome::Retry(error); messages]
    }
}

/// `Err` means that everything is tried again.
impl<T: IntoOutcomes, E: Into<AnyError>> IntoOutcomes for Result<T, E> {
    fn into_outcomes(self, messages: usize) -> Vec<Outcome> {
        match self {
            Ok(outcomes) => outcomes.into_outcomes(messages),
            Err(e) => vec![Outcome::Retry(describe(&*e.into())); messages],
        }
    }
}

/// An outcome in the words of the protocol.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Verdict {
    pub(crate) outcome: &'static str,
    pub(crate) error: Option<String>,
    pub(crate) delay: Option<f64>,
    /// It was settled together with the handler's writes.
    pub(crate) settled: bool,
    /// As what it is counted.
    pub(crate) counts: Option<&'static str>,
}

impl Verdict {
    /// The outcome of a handler that was not run, or not to its end.
    pub(crate) const CANCELLED: &'static str = "cancelled";

    /// As what messages are counted that are settled without having been handled.
    pub(crate) const EXPIRED: &'static str = "expired";
    pub(crate) const SUPERSEDED: &'static str = "superseded";

    /// No handler gets it, and why: finished, for the server.
    pub(crate) fn passed_over(reason: &'static str) -> Self {
        Self { counts: Some(reason), ..Outcome::Done.into() }
    }

    /// Handled, and settled in the handler's transaction.
    pub(crate) fn settled() -> Self {
        Self { settled: true, ..Outcome::Done.into() }
    }

    /// Handled, and rolled back, as an earlier handler had settled it, which was counted then.
    pub(crate) fn settled_before() -> Self {
        Self { counts: None, ..Self::settled() }
    }

    pub(crate) fn cancelled() -> Self {
        Self { outcome: Self::CANCELLED, ..Outcome::Done.into() }
    }
}

impl From<Outcome> for Verdict {
    fn from(outcome: Outcome) -> Self {
        let (outcome, error, delay) = match outcome {
            Outcome::Done => ("ok", None, None),
            Outcome::Retry(error) => ("retry", Some(error), None),
            Outcome::RetryAfter(error, delay) => ("retry", Some(error), Some(delay)),
            Outcome::Dead(error) => ("dead", Some(error), None),
            Outcome::Delay(delay) => ("delay", None, Some(delay)),
        };
        Self {
            outcome,
            error: error.map(|e| storable(&e)),
            delay: delay.map(|d| d.as_secs_f64()),
            settled: false,
            counts: Some(outcome),
        }
    }
}

/// Error text as PostgreSQL can store it: NUL replaced, at most [`MAX_ERROR_BYTES`].
pub(crate) fn storable(text: &str) -> String {
    let mut end = text.len().min(MAX_ERROR_BYTES);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    let mut cut = text[..end].replace('\0', "\u{FFFD}");
    // The replacement is longer than what it replaces.
    while cut.len() > MAX_ERROR_BYTES {
        cut.pop();
    }
    cut
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_texts_become_storable() {
        assert_eq!(storable("a\0b"), "a\u{FFFD}b");
        assert_eq!(storable(&"é".repeat(10_000)).len(), MAX_ERROR_BYTES);
        assert!(storable(&"\0".repeat(10_000)).len() <= MAX_ERROR_BYTES);
        assert_eq!(storable("fine"), "fine");
    }

    #[test]
    fn results_are_outcomes() {
        assert_eq!(Ok::<(), String>(()).into_outcome(), Outcome::Done);
        assert_eq!(Err::<(), _>("no").into_outcome(), Outcome::Retry("no".into()));
        assert_eq!(Err::<(), _>("no".to_owned()).into_outcome(), Outcome::Retry("no".into()));
        let error = std::io::Error::other("no");
        assert_eq!(Err::<Outcome, _>(error).into_outcome(), Outcome::Retry("no".into()));
        let error: AnyError = "no".into();
        assert_eq!(Err::<(), _>(error).into_outcomes(1), [Outcome::Retry("no".into())]);
        assert_eq!(
            Ok::<_, String>(Outcome::Dead("x".into())).into_outcome(),
            Outcome::Dead("x".into())
        );
    }
}
