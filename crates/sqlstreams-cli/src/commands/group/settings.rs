//! What can be set of a group.

use std::time::Duration;

use clap::Args;
use sqlstreams::{Bytes, GroupBuilder, GroupStatus, Mode, RetryPolicy};

use crate::values;

/// What they mean, for the help of those that set them.
macro_rules! settings {
    () => {
        "\
A message that failed is tried again after a delay drawn from nothing to a bound: the base, then
the factor times as much with every attempt, at most the cap. The limits hold over all consumers of
the group together; what a consumer that died had in hand does not count. Retries count like
everything else. Consumers that run take changes over with their next call.

An ordered group handles the messages of one key one at a time, in their order, whatever fails or dies;
other keys do not wait for that. The mode of a group that is being consumed can be changed while nothing
of it is in flight or waits for another attempt.

A group of a compacted stream may receive only the newest message of each key: what is superseded when it
would be handed out or tried again is done.

In a fair group the key is the tenant: where very many messages of one wait, those of the others are
handled before it has worked them off.
"
    };
}
pub(super) use settings;

#[derive(Debug, Args)]
#[command(next_help_heading = "Settings")]
pub(super) struct Settings {
    /// How long the messages of a consumer that died wait, 100ms to 24h
    #[arg(long, value_name = "DURATION", value_parser = values::duration)]
    lease: Option<Duration>,
    /// Attempts before a message is dead
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_attempts: Option<u32>,
    /// The bound of the delay after the first failure
    #[arg(long, value_name = "DURATION", value_parser = values::duration_or_none)]
    backoff_base: Option<Duration>,
    /// By how much the bound grows, 1 to 1000
    #[arg(long, value_name = "FACTOR")]
    backoff_factor: Option<f64>,
    /// What the bound never exceeds
    #[arg(long, value_name = "DURATION", value_parser = values::duration_or_none)]
    backoff_cap: Option<Duration>,
    /// At most so many messages handed out and not finished; 0 for no limit
    #[arg(long, value_name = "N")]
    max_in_flight: Option<u32>,
    /// At most so many messages per second; 0 for no limit
    #[arg(long, value_name = "N")]
    rate_limit: Option<f64>,
    /// How messages are handed out: parallel, ordered or fair
    #[arg(long, value_name = "MODE", value_parser = values::mode)]
    mode: Option<Mode>,
    /// Of each key only the newest message, in a compacted stream
    #[arg(long, value_name = "true|false", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    newest_only: Option<bool>,
}

impl Settings {
    pub(super) fn is_empty(&self) -> bool {
        let Self {
            lease,
            max_attempts,
            backoff_base,
            backoff_factor,
            backoff_cap,
            max_in_flight,
            rate_limit,
            mode,
            newest_only,
        } = self;
        lease.is_none()
            && max_attempts.is_none()
            && backoff_base.or(*backoff_cap).is_none()
            && backoff_factor.or(*rate_limit).is_none()
            && max_in_flight.is_none()
            && mode.is_none()
            && newest_only.is_none()
    }

    /// Puts them on a group, whose policy is this one so far.
    pub(super) fn on(
        &self,
        mut group: GroupBuilder<Vec<u8>, Bytes>,
        mut policy: RetryPolicy,
    ) -> GroupBuilder<Vec<u8>, Bytes> {
        policy.max_attempts = self.max_attempts.unwrap_or(policy.max_attempts);
        policy.backoff_base = self.backoff_base.unwrap_or(policy.backoff_base);
        policy.backoff_factor = self.backoff_factor.unwrap_or(policy.backoff_factor);
        policy.backoff_cap = self.backoff_cap.unwrap_or(policy.backoff_cap);
        group = group.retry(policy);
        if let Some(lease) = self.lease {
            group = group.lease(lease);
        }
        if let Some(messages) = self.max_in_flight {
            group = group.max_in_flight(messages);
        }
        if let Some(rate) = self.rate_limit {
            group = group.rate_limit(rate);
        }
        if let Some(mode) = self.mode {
            group = group.mode(mode);
        }
        if let Some(newest_only) = self.newest_only {
            group = group.newest_only(newest_only);
        }
        group
    }
}

/// Leases and retries in two lines; limits are told with where the group stands.
pub(super) fn lines(group: &GroupStatus) -> String {
    let RetryPolicy { max_attempts, backoff_base, backoff_factor, backoff_cap, .. } = group.retry;
    let newest = if group.newest_only { ", of each key the newest message only" } else { "" };
    format!(
        "mode     {}{newest}\nlease    {:?}\nretries  {max_attempts} attempts, delays up to {backoff_base:?} × {backoff_factor}, at most {backoff_cap:?}",
        group.mode, group.lease
    )
}
