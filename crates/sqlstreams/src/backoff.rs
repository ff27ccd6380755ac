//! How long to wait before trying again.

use std::time::Duration;

/// Pauses that double, from the first to the longest, each shortened at random so that those who failed together do not come
/// back together.
#[derive(Debug)]
pub(crate) struct Backoff {
    first: Duration,
    longest: Duration,
    next: Duration,
}

impl Backoff {
    pub(crate) const fn new((first, longest): (Duration, Duration)) -> Self {
        Self { first, longest, next: first }
    }

    /// The next pause.
    pub(crate) fn pause(&mut self) -> Duration {
        let pause = jittered(self.next);
        self.next = (self.next * 2).min(self.longest);
        pause
    }

    /// Whether there was a pause since it was last reset.
    pub(crate) fn has_begun(&self) -> bool {
        self.next > self.first
    }

    /// It worked: the next pause is the first again.
    pub(crate) fn reset(&mut self) {
        self.next = self.first;
    }
}

/// Between half and all of it, so that many processes do not march in step.
pub(crate) fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(jitter())
}

/// Between a half and one.
pub(crate) fn jitter() -> f64 {
    0.5 + fastrand::f64() / 2.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest_and_begin_anew() {
        let mut backoff = Backoff::new((Duration::from_millis(10), Duration::from_millis(35)));
        assert!(!backoff.has_begun());
        for longest in [10, 20, 35, 35] {
            let pause = backoff.pause();
            let longest = Duration::from_millis(longest);
            assert!(longest / 2 <= pause && pause <= longest, "{pause:?} of {longest:?}");
        }
        assert!(backoff.has_begun());
        backoff.reset();
        assert!(!backoff.has_begun() && backoff.pause() <= Duration::from_millis(10));
    }
}
