//! How long what was claimed together is certainly ours.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

/// Handlers are told to stop this part of a lease before it runs out, but at most so long before.
const MARGIN: (u32, Duration) = (8, Duration::from_secs(2));

/// How long before a lease of this duration runs out handlers are told.
pub(crate) fn margin(lease_duration: Duration) -> Duration {
    (lease_duration / MARGIN.0).min(MARGIN.1)
}

/// By our own clock: the server counts from later, so nobody else has a message before its term is over here.
///
/// Invariant: no handler starts when it is over. So whoever starts one asks the clock, too: a process that was frozen awakes with
/// a token that nobody could cancel yet.
#[derive(Debug)]
pub(crate) struct Term {
    until: Mutex<Instant>,
    /// Cancelled when it is over, or is about to be.
    over: CancellationToken,
}

impl Term {
    pub(crate) fn new(until: Instant) -> Self {
        Self { until: Mutex::new(until), over: CancellationToken::new() }
    }

    pub(crate) fn until(&self) -> Instant {
        *self.lock()
    }

    /// It lasts until then.
    pub(crate) fn extend(&self, until: Instant) {
        *self.lock() = until;
    }

    /// Ends it; it cannot be extended after that.
    pub(crate) fn end(&self) {
        self.over.cancel();
    }

    /// Whether it was ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.over.is_cancelled()
    }

    /// Whether it was ended, or should have been.
    pub(crate) fn is_over(&self) -> bool {
        self.has_ended() || Instant::now() >= self.until()
    }

    /// Cancelled when it ends.
    pub(crate) fn over(&self) -> &CancellationToken {
        &self.over
    }

    fn lock(&self) -> MutexGuard<'_, Instant> {
        self.until.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_over_by_the_clock_though_nobody_has_ended_it() {
        let now = Instant::now();
        let term = Term::new(now + Duration::from_secs(60));
        assert!(!term.is_over());
        term.extend(now);
        assert!(term.is_over() && !term.has_ended());
        term.extend(now + Duration::from_secs(60));
        assert!(!term.is_over());
        term.end();
        assert!(term.is_over() && term.over().is_cancelled());
    }
}
