//! What the latency should be.

use serde::Serialize;

use crate::bench::spread::Percentiles;

/// How much later than the commit the median handler may begin, in milliseconds.
const AFTER_COMMIT: f64 = 3.0;
/// What 99 of 100 messages may take to their handler.
const P99: f64 = 25.0;
/// What the median message may take to its handler when consumers only poll.
const POLLING_P50: f64 = 30.0;

/// A limit and what was measured, in milliseconds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Target {
    pub(crate) name: &'static str,
    pub(crate) limit: f64,
    pub(crate) measured: f64,
    pub(crate) met: bool,
}

impl Target {
    fn new(name: &'static str, limit: f64, measured: f64) -> Self {
        Self { name, limit, measured, met: measured <= limit }
    }
}

/// The targets that apply.
pub(crate) fn targets(commit: Percentiles, handler: Percentiles, listener: bool) -> Vec<Target> {
    match listener {
        true => vec![
            Target::new("p50 ≤ commit p50 + 3 ms", commit.p50 + AFTER_COMMIT, handler.p50),
            Target::new("p99 ≤ 25 ms", P99, handler.p99),
        ],
        false => vec![Target::new("p50 ≤ 30 ms without listener", POLLING_P50, handler.p50)],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn percentiles(p50: f64, p99: f64) -> Percentiles {
        Percentiles { count: 1, p50, p90: p50, p99, p999: p99, max: p99 }
    }

    #[test]
    fn the_median_is_compared_with_the_commit() {
        let met = |handler| {
            let targets = targets(percentiles(2.0, 9.0), handler, true);
            targets.iter().map(|target| target.met).collect::<Vec<_>>()
        };
        assert_eq!(met(percentiles(5.0, 25.0)), [true, true]);
        assert_eq!(met(percentiles(5.1, 25.1)), [false, false]);
        let polling = targets(percentiles(2.0, 9.0), percentiles(29.0, 90.0), false);
        assert!(polling.iter().all(|target| target.met));
    }
}
