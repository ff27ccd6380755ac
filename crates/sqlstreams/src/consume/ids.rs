//! Sets of ids as ranges: the client's side of PostgreSQL's `int8multirange`.

use std::collections::BTreeSet;
use std::fmt::{self, Write as _};
use std::str::FromStr;

/// Ids as disjoint half-open ranges, lowest first, never adjacent.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct IdSet(Vec<(i64, i64)>);

impl IdSet {
    /// The set of `lower..upper`.
    pub(crate) fn range(lower: i64, upper: i64) -> Self {
        Self(if lower < upper { vec![(lower, upper)] } else { Vec::new() })
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// How many ids are in it.
    pub(crate) fn len(&self) -> usize {
        let ids: i64 = self.0.iter().map(|(lower, upper)| upper - lower).sum();
        usize::try_from(ids).unwrap_or(usize::MAX)
    }

    /// The lowest id.
    pub(crate) fn first(&self) -> Option<i64> {
        self.0.first().map(|r| r.0)
    }

    /// The highest id.
    pub(crate) fn last(&self) -> Option<i64> {
        self.0.last().map(|r| r.1 - 1)
    }

    pub(crate) fn minus(&self, other: &Self) -> Self {
        let mut rest = Vec::with_capacity(self.0.len() + other.0.len());
        let mut cuts = other.0.iter().copied().peekable();
        for &(mut lower, upper) in &self.0 {
            while let Some(&(cut_lower, cut_upper)) = cuts.peek() {
                if cut_upper <= lower {
                    cuts.next();
                    continue;
                }
                if cut_lower >= upper {
                    break;
                }
                if cut_lower > lower {
                    rest.push((lower, cut_lower));
                }
                lower = cut_upper;
                if cut_upper >= upper {
                    break;
                }
                cuts.next();
            }
            if lower < upper {
                rest.push((lower, upper));
            }
        }
        Self(rest)
    }

    /// What of the set lies below `upper` and is not in `open`.
    pub(crate) fn below_without(&self, upper: i64, open: &BTreeSet<i64>) -> Self {
        let below = self.minus(&Self::range(upper, i64::MAX));
        below.minus(&open.iter().copied().collect())
    }

    /// The set with other ids, which are not in it.
    pub(crate) fn plus(&self, other: &Self) -> Self {
        let mut ranges: Vec<(i64, i64)> = self.0.iter().chain(&other.0).copied().collect();
        ranges.sort_unstable();
        ranges.dedup_by(|next, last| {
            let adjacent = last.1 == next.0;
            if adjacent {
                last.1 = next.1;
            }
            adjacent
        });
        Self(ranges)
    }

    /// What of the set lies at or above `lower`.
    pub(crate) fn from(&self, lower: i64) -> Self {
        self.minus(&Self::range(i64::MIN, lower))
    }

    /// The largest ranges only, at most `most` of them.
    pub(crate) fn largest(mut self, most: usize) -> Self {
        if self.0.len() > most {
            self.0.sort_unstable_by_key(|&(lower, upper)| std::cmp::Reverse(upper - lower));
            self.0.truncate(most);
            self.0.sort_unstable();
        }
        self
    }
}

impl FromIterator<i64> for IdSet {
    /// From ids in ascending order.
    fn from_iter<I: IntoIterator<Item = i64>>(ids: I) -> Self {
        let mut ranges: Vec<(i64, i64)> = Vec::new();
        for id in ids {
            match ranges.last_mut() {
                Some(last) if last.1 == id => last.1 = id + 1,
                _ => ranges.push((id, id + 1)),
            }
        }
        Self(ranges)
    }
}

impl fmt::Display for IdSet {
    /// As PostgreSQL reads it: `{[1,5),[7,9)}`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_char('{')?;
        for (i, (lower, upper)) in self.0.iter().enumerate() {
            let comma = if i > 0 { "," } else { "" };
            write!(f, "{comma}[{lower},{upper})")?;
        }
        f.write_char('}')
    }
}

impl FromStr for IdSet {
    type Err = String;

    /// From PostgreSQL's canonical text of an `int8multirange` of finite ranges.
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("not a multirange of ids: {text:?}");
        let inner = text.strip_prefix('{').and_then(|t| t.strip_suffix('}')).ok_or_else(wrong)?;
        let mut ranges = Vec::new();
        for part in inner.split_inclusive(')').filter(|p| !p.is_empty()) {
            let part = part
                .trim_start_matches(',')
                .strip_prefix('[')
                .and_then(|p| p.strip_suffix(')'))
                .ok_or_else(wrong)?;
            let (lower, upper) = part.split_once(',').ok_or_else(wrong)?;
            ranges.push((lower.parse().map_err(|_| wrong())?, upper.parse().map_err(|_| wrong())?));
        }
        Ok(Self(ranges))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ids(set: &IdSet) -> BTreeSet<i64> {
        set.0.iter().flat_map(|&(lower, upper)| lower..upper).collect()
    }

    #[test]
    fn text_is_postgresqls() {
        let set: IdSet = "{[1,5),[7,9)}".parse().unwrap();
        assert_eq!((set.first(), set.last()), (Some(1), Some(8)));
        assert_eq!(set.to_string(), "{[1,5),[7,9)}");
        assert!("{}".parse::<IdSet>().unwrap().is_empty());
        for wrong in ["", "{", "{[1,5]}", "{[1)}", "{[a,b)}", "[1,2)"] {
            assert!(wrong.parse::<IdSet>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_largest_ranges_stay_in_order() {
        let set: IdSet = [1, 2, 3, 5, 8, 9].into_iter().collect();
        assert_eq!(set.largest(2).to_string(), "{[1,4),[8,10)}");
    }

    proptest! {
        #[test]
        fn minus_is_set_difference(a in prop::collection::btree_set(0_i64..60, 0..40), b in prop::collection::btree_set(0_i64..60, 0..40)) {
            let (x, y): (IdSet, IdSet) = (a.iter().copied().collect(), b.iter().copied().collect());
            let rest = x.minus(&y);
            prop_assert_eq!(ids(&rest), a.difference(&b).copied().collect::<BTreeSet<_>>());
            prop_assert_eq!(rest.to_string().parse::<IdSet>().unwrap(), rest);
        }

        #[test]
        fn below_without_takes_both_away(a in prop::collection::btree_set(0_i64..60, 0..40), open in prop::collection::btree_set(0_i64..60, 0..10), upper in 0_i64..70) {
            let set: IdSet = a.iter().copied().collect();
            let expected: BTreeSet<i64> = a.iter().copied().filter(|id| *id < upper && !open.contains(id)).collect();
            prop_assert_eq!(ids(&set.below_without(upper, &open)), expected);
        }
    }
}
