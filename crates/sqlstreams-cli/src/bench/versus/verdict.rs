//! What is asked of a benchmark, and whether it holds.

use serde::Serialize;

/// What kind of number a target is about, which says how it is compared and whether a miss is one whatever the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Kind {
    /// Of two rates of the same run: at least.
    Ratio,
    /// Of two times of the same run: at most.
    Cost,
    /// Of things that do not depend on how fast the machine is: at most.
    Count,
    /// So many a second: at least.
    Rate,
    /// How long something takes, or how much of a processor: at most.
    Time,
}

/// A target and what was measured.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Verdict {
    pub(crate) what: String,
    pub(crate) kind: Kind,
    pub(crate) measured: f64,
    pub(crate) target: f64,
    pub(crate) met: bool,
}

impl Verdict {
    pub(crate) fn new(what: impl Into<String>, kind: Kind, measured: f64, target: f64) -> Self {
        let met = match kind {
            Kind::Ratio | Kind::Rate => measured >= target,
            Kind::Cost | Kind::Count | Kind::Time => measured <= target,
        };
        Self { what: what.into(), kind, measured, target, met }
    }

    /// Whether it is missed by so much that no machine is to blame: a ratio below half of its target, a cost or a count beyond twice
    /// its limit. Rates and times are the machine's.
    pub(crate) fn is_gross(&self) -> bool {
        let Self { measured, target, .. } = *self;
        match self.kind {
            Kind::Ratio => measured < target / 2.0 || measured.is_nan(),
            Kind::Cost | Kind::Count => measured > target * 2.0 || measured.is_nan(),
            Kind::Rate | Kind::Time => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(kind: Kind, measured: f64, target: f64) -> (bool, bool) {
        let verdict = Verdict::new("it", kind, measured, target);
        (verdict.met, verdict.is_gross())
    }

    #[test]
    fn ratios_are_to_be_reached() {
        assert_eq!(verdict(Kind::Ratio, 0.9, 0.9), (true, false));
        assert_eq!(verdict(Kind::Ratio, 0.89, 0.9), (false, false));
        assert_eq!(verdict(Kind::Ratio, 0.45, 0.9), (false, false));
        assert_eq!(verdict(Kind::Ratio, 0.44, 0.9), (false, true));
        assert_eq!(verdict(Kind::Ratio, f64::NAN, 0.9), (false, true));
    }

    #[test]
    fn counts_are_not_to_be_exceeded() {
        for kind in [Kind::Count, Kind::Cost] {
            assert_eq!(verdict(kind, 1.0, 1.0), (true, false));
            assert_eq!(verdict(kind, 2.0, 1.0), (false, false));
            assert_eq!(verdict(kind, 2.1, 1.0), (false, true));
            assert_eq!(verdict(kind, f64::NAN, 1.0), (false, true));
        }
        // Of what may not be at all, one is too many.
        assert_eq!(verdict(Kind::Count, 0.0, 0.0), (true, false));
        assert_eq!(verdict(Kind::Count, 1.0, 0.0), (false, true));
    }

    #[test]
    fn rates_and_times_are_never_gross() {
        assert_eq!(verdict(Kind::Rate, 0.0, 20_000.0), (false, false));
        assert_eq!(verdict(Kind::Rate, 20_000.0, 20_000.0), (true, false));
        assert_eq!(verdict(Kind::Time, 1_000.0, 25.0), (false, false));
        assert_eq!(verdict(Kind::Time, 25.0, 25.0), (true, false));
    }
}
