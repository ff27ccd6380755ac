//! How times are spread: percentiles and a histogram.

use hdrhistogram::Histogram;
use serde::Serialize;

/// What is longer counts as this long: an hour, in nanoseconds.
const LONGEST: u64 = 3_600 * 1_000_000_000;
/// Digits that are kept of each time.
const DIGITS: u8 = 3;
const NANOS_PER_MS: f64 = 1e6;

/// Upper bounds of the bars, in milliseconds; the last bar has none.
const BOUNDS: [f64; 17] = [
    0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0, 10.0, 15.0, 20.0, 25.0, 30.0, 50.0, 100.0, 250.0,
    1000.0,
];

/// Times, of which some may be negative.
#[derive(Debug, Clone)]
pub(crate) struct Spread {
    /// Those of 0 and more.
    above: Histogram<u64>,
    /// The negative ones, without their sign: a histogram holds no others.
    below: Histogram<u64>,
}

/// Percentiles, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Percentiles {
    pub(crate) count: u64,
    pub(crate) p50: f64,
    pub(crate) p90: f64,
    pub(crate) p99: f64,
    pub(crate) p999: f64,
    pub(crate) max: f64,
}

/// How many times lie between the bound of the bar before and this one.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Bar {
    /// In milliseconds; none for whatever is longer.
    pub(crate) up_to: Option<f64>,
    pub(crate) count: u64,
}

impl Spread {
    pub(crate) fn new() -> anyhow::Result<Self> {
        let empty = Histogram::new_with_max(LONGEST, DIGITS)?;
        Ok(Self { above: empty.clone(), below: empty })
    }

    /// Adds a time in nanoseconds.
    pub(crate) fn record(&mut self, nanos: i128) {
        let size = u64::try_from(nanos.unsigned_abs()).unwrap_or(u64::MAX);
        match nanos {
            ..0 => self.below.saturating_record(size),
            0.. => self.above.saturating_record(size),
        }
    }

    /// Adds the times of another.
    pub(crate) fn merge(&mut self, other: &Self) {
        // Both have the same bounds.
        let _ = self.above.add(&other.above);
        let _ = self.below.add(&other.below);
    }

    pub(crate) fn percentiles(&self) -> Percentiles {
        Percentiles {
            count: self.count(),
            p50: self.at(0.5),
            p90: self.at(0.9),
            p99: self.at(0.99),
            p999: self.at(0.999),
            max: self.at(1.0),
        }
    }

    /// The bars from the first to the last that is not empty.
    pub(crate) fn bars(&self) -> Vec<Bar> {
        let mut counts = [0; BOUNDS.len() + 1];
        counts[0] = self.below.len();
        for step in self.above.iter_recorded() {
            let ms = step.value_iterated_to() as f64 / NANOS_PER_MS;
            counts[BOUNDS.partition_point(|bound| *bound < ms)] +=
                step.count_since_last_iteration();
        }
        let first = counts.iter().position(|count| *count > 0).unwrap_or(counts.len());
        let last = counts.iter().rposition(|count| *count > 0).map_or(0, |last| last + 1);
        (first..last).map(|i| Bar { up_to: BOUNDS.get(i).copied(), count: counts[i] }).collect()
    }

    fn count(&self) -> u64 {
        self.below.len() + self.above.len()
    }

    /// The time in milliseconds, to the microsecond, that this share of them does not exceed.
    fn at(&self, share: f64) -> f64 {
        let rank = ((share * self.count() as f64).ceil() as u64).max(1);
        let nanos = match self.below.len() {
            // The lowest are those that are furthest below.
            below if rank <= below => -(nth(&self.below, below + 1 - rank) as f64),
            below => nth(&self.above, rank - below) as f64,
        };
        (nanos / NANOS_PER_MS * 1000.0).round() / 1000.0
    }
}

/// The n-th lowest value, counted from 1; 0 of none.
fn nth(histogram: &Histogram<u64>, n: u64) -> u64 {
    match histogram.len() {
        0 => 0,
        all => histogram.value_at_quantile(n as f64 / all as f64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(ms: impl IntoIterator<Item = i64>) -> Spread {
        let mut spread = Spread::new().unwrap();
        for ms in ms {
            spread.record(i128::from(ms) * 1_000_000);
        }
        spread
    }

    #[track_caller]
    fn assert_near(found: f64, expected: f64) {
        assert!((found - expected).abs() <= expected.abs() / 500.0, "{found} is not {expected}");
    }

    #[test]
    fn percentiles_are_those_of_the_times() {
        let percentiles = of(1..=1000).percentiles();
        assert_eq!(percentiles.count, 1000);
        assert_near(percentiles.p50, 500.0);
        assert_near(percentiles.p99, 990.0);
        assert_near(percentiles.p999, 999.0);
        assert_near(percentiles.max, 1000.0);
    }

    #[test]
    fn times_of_several_are_put_together() {
        let mut both = of(-5..=500);
        both.merge(&of(501..=994));
        let percentiles = both.percentiles();
        assert_eq!((percentiles.count, percentiles.max), (1000, of([994]).percentiles().max));
        assert_near(percentiles.p50, 494.0);
    }

    #[test]
    fn times_may_be_negative() {
        let percentiles = of(-59..=40).percentiles();
        assert_eq!(percentiles.count, 100);
        assert_near(percentiles.p50, -10.0);
        assert_near(percentiles.p90, 30.0);
        assert_near(percentiles.max, 40.0);
        assert_near(of(-10..=-1).percentiles().max, -1.0);
    }

    #[test]
    fn bars_cover_all_times_and_nothing_else() {
        let bars = of([2, 2, 6, 2000]).bars();
        assert_eq!(bars.first(), Some(&Bar { up_to: Some(3.0), count: 2 }));
        assert_eq!(bars.last(), Some(&Bar { up_to: None, count: 1 }));
        assert_eq!(bars.iter().map(|bar| bar.count).sum::<u64>(), 4);
        assert_eq!(of([]).bars(), []);
        assert_eq!(of([]).percentiles().p50, 0.0);
    }
}
