//! What a consumer of a fair group has seen of the lanes, and so which of them it asks for: see `fair.sql`.

use super::sieve::GROWTH;
use super::turns::{LANES, lane_number};

/// A lane is heavy that has more than this part of the latest messages; no more than so many lanes can.
const HEAVY: f32 = 1.0 / 8.0;
/// About so many messages are the latest.
const LATEST: f32 = 256.0;
/// Fewer say nothing.
const ENOUGH: f32 = 8.0;

/// All lanes.
pub(crate) const ALL: i64 = -1;

/// What is asked of the lanes with a claim.
#[derive(Debug, Clone)]
pub(crate) struct Wish {
    /// Those of which there shall be messages.
    pub(crate) lanes: i64,
    /// Those of which there are very many.
    pub(crate) heavy: i64,
    /// The part of the ids that are messages of each; `None` where nothing is known.
    pub(crate) shares: Option<Vec<f64>>,
}

#[derive(Debug)]
pub(crate) struct Fairness {
    /// Whether the group is fair, as it said last.
    fair: bool,
    /// Lanes of which there may be something to read.
    unread: i64,
    latest: [f32; LANES],
    shares: Option<[f64; LANES]>,
}

impl Fairness {
    pub(crate) fn new() -> Self {
        Self { fair: false, unread: ALL, latest: [0.0; LANES], shares: None }
    }

    pub(crate) fn is_fair(&self) -> bool {
        self.fair
    }

    /// Messages were produced.
    pub(crate) fn news(&mut self) {
        self.unread = ALL;
    }

    /// The answer to a claim said so; `None`: the group is not fair.
    pub(crate) fn answered(&mut self, unread: Option<i64>) {
        match unread {
            Some(unread) => (self.fair, self.unread) = (true, unread),
            None if self.fair => *self = Self::new(),
            None => {}
        }
    }

    /// There was nothing for these.
    pub(crate) fn exhausted(&mut self, lanes: i64) {
        self.unread &= !lanes;
    }

    pub(crate) fn has_unread(&self, lanes: i64) -> bool {
        self.unread & lanes != 0
    }

    pub(crate) fn wish(&self, lanes: i64) -> Wish {
        let total: f32 = self.latest.iter().sum();
        let is_heavy = |lane: &usize| self.latest[*lane] > total * HEAVY;
        let heavy = match total >= ENOUGH {
            true => (0..LANES).filter(is_heavy).fold(0, |heavy, lane| heavy | 1 << lane),
            false => 0,
        };
        Wish { lanes, heavy, shares: self.shares.map(|shares| shares.to_vec()) }
    }

    /// Among so many ids that were looked at for these lanes came messages of these.
    pub(crate) fn found(&mut self, lanes: i64, ids: usize, messages: impl Iterator<Item = i16>) {
        if !self.fair || ids == 0 {
            return;
        }
        let mut counts = [0_u32; LANES];
        for lane in messages {
            if let Some(lane) = lane_number(Some(lane)) {
                counts[lane] += 1;
            }
        }
        let shares = self.shares.get_or_insert([1.0 / LANES as f64; LANES]);
        for lane in (0..LANES).filter(|lane| lanes >> lane & 1 == 1) {
            // A dense part is believed at once: what is claimed there keeps others from it.
            let share = f64::from(counts[lane]) / ids as f64;
            shares[lane] = share.max(shares[lane] / GROWTH);
        }
        let total: f32 = self.latest.iter().sum();
        let new: u32 = counts.iter().sum();
        // Those before fade, as if there had never been more than so many.
        let kept = (LATEST / (total + new as f32)).min(1.0);
        for (latest, count) in self.latest.iter_mut().zip(counts) {
            *latest = (*latest + count as f32) * kept;
        }
    }

    /// How many messages are expected among so many ids of these lanes.
    pub(crate) fn expected(&self, lanes: i64, ids: usize) -> usize {
        let Some(shares) = &self.shares else { return ids };
        let of = |lane: &usize| lanes >> lane & 1 == 1;
        let share: f64 = (0..LANES).filter(of).map(|lane| shares[lane]).sum();
        (share.min(1.0) * ids as f64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fair() -> Fairness {
        let mut fairness = Fairness::new();
        fairness.answered(Some(0));
        fairness
    }

    #[test]
    fn a_lane_with_a_burst_is_heavy_until_it_is_over() {
        let mut fairness = fair();
        assert_eq!(fairness.wish(ALL).heavy, 0);
        fairness.found(ALL, 1000, std::iter::repeat_n(5, 1000));
        assert_eq!(fairness.wish(ALL).heavy, 1 << 5);
        for _ in 0..20 {
            fairness.found(ALL, 64, 0..64);
        }
        assert_eq!(fairness.wish(ALL).heavy, 0);
    }

    #[test]
    fn several_lanes_may_be_heavy() {
        let mut fairness = fair();
        fairness.found(ALL, 1000, (0..1000).map(|n| if n % 10 == 0 { n % 64 } else { n % 4 }));
        assert_eq!(fairness.wish(ALL).heavy, 0b1111);
    }

    #[test]
    fn where_others_pass_over_a_burst_they_look_further_and_further() {
        let mut fairness = fair();
        let light = !(1 << 5);
        let (mut ids, mut claims) = (16, 0);
        while ids < 50_000 {
            fairness.found(light, ids, std::iter::empty());
            let shares = fairness.wish(ALL).shares.unwrap();
            ids = (16.0 / (shares.iter().sum::<f64>() - shares[5])) as usize;
            claims += 1;
        }
        assert!(claims <= 5, "{claims}");
        assert!(fairness.expected(light, 50_000) <= 16);
        // A dense part is believed at once.
        fairness.found(light, 16, (0..16).map(|n| n + 10));
        assert!(fairness.expected(light, 16) >= 15);
    }

    #[test]
    fn another_mode_forgets_it_all() {
        let mut fairness = fair();
        fairness.found(ALL, 1000, std::iter::repeat_n(5, 1000));
        fairness.answered(None);
        assert!(!fairness.is_fair() && fairness.has_unread(1));
        assert!(fairness.wish(ALL).shares.is_none() && fairness.wish(ALL).heavy == 0);
    }
}
