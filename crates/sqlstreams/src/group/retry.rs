//! How often and when a group tries again what failed.

use std::time::Duration;

/// How often and when a group tries again what failed.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct RetryPolicy {
    /// After so many failed attempts a message is dead. At least 1. Default: 5.
    pub max_attempts: u32,
    /// The bound of the delay before the second attempt. Default: 1 s.
    pub backoff_base: Duration,
    /// By how much the bound grows from attempt to attempt, 1 to 1000. Default: 2.
    pub backoff_factor: f64,
    /// What the bound never exceeds. Default: 5 min.
    pub backoff_cap: Duration,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self {
            max_attempts: 5,
            backoff_base: Duration::from_secs(1),
            backoff_factor: 2.0,
            backoff_cap: Duration::from_secs(300),
        }
    }
}

impl RetryPolicy {
    /// The default policy with other attempts.
    pub fn attempts(max_attempts: u32) -> Self {
        Self { max_attempts, ..Self::default() }
    }

    /// The delay before the next attempt is drawn evenly from 0 to a bound: `base`, then `factor` times as much with every
    /// attempt, at most `cap`.
    #[must_use]
    pub fn backoff(mut self, base: Duration, factor: f64, cap: Duration) -> Self {
        (self.backoff_base, self.backoff_factor, self.backoff_cap) = (base, factor, cap);
        self
    }
}
