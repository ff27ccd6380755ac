//! How many ids to claim for the lanes of which messages are wanted: lanes that pass over the backlog of a busy key, or over what is not
//! for the group, look among many.

use std::time::Duration;

use super::calls::Read;
use super::crowd::of;
use crate::consume::sieve::{Most, Share};
use crate::consume::turns::LANES;

/// What was seen of each lane.
#[derive(Debug)]
pub(super) struct Shares {
    /// Which part of the ids are messages of the lane, for the group.
    shares: [Share; LANES],
    /// Up to where it was read; `None`: not by us.
    reached: [Option<i64>; LANES],
    most: Most,
}

impl Shares {
    pub(super) fn new() -> Self {
        Self {
            shares: [Share(1.0 / LANES as f64); LANES],
            reached: [None; LANES],
            most: Most::new(),
        }
    }

    /// How many ids to claim for so many messages of these lanes: the server reads those furthest behind on.
    pub(super) fn width(&self, messages: usize, lanes: u64) -> usize {
        let known = || of(lanes).filter_map(|lane| Some((self.reached[lane]?, lane)));
        let share: f64 = match known().map(|(at, _)| at).min() {
            Some(first) => {
                known().filter(|(at, _)| *at == first).map(|(_, lane)| self.shares[lane].0).sum()
            }
            None => of(lanes).map(|lane| self.shares[lane].0).sum(),
        };
        // As floats do: what is too large for the type is its largest.
        ((messages as f64 / share) as usize).min(self.most.0).max(messages)
    }

    /// A claim for some of the lanes `asked` for was about so many ids, which took so long.
    pub(super) fn claimed(&mut self, asked: u64, read: &Read, elapsed: Duration) {
        let Some(reached) = read.reached else { return };
        // Those furthest behind come first: what we thought to be behind these is not ours any more.
        let behind = |lane: &usize| self.reached[*lane].is_some_and(|at| at < reached);
        let gone: Vec<usize> = of(asked & !read.lanes).filter(behind).collect();
        gone.into_iter().for_each(|lane| self.reached[lane] = None);
        of(read.lanes).for_each(|lane| self.reached[lane] = Some(reached));
        if read.ids > 0 {
            self.most.took(read.ids, elapsed);
        }
    }

    /// Of so many ids these messages came.
    pub(super) fn found(&mut self, lanes: u64, messages: usize, ids: usize) {
        if ids == 0 || lanes == 0 {
            return;
        }
        let count = f64::from(lanes.count_ones());
        let mut together = Share(of(lanes).map(|lane| self.shares[lane].0).sum());
        together.found(messages as f64, ids);
        of(lanes).for_each(|lane| self.shares[lane] = Share(together.0 / count));
    }

    /// Others may have read on.
    pub(super) fn forget(&mut self) {
        self.reached = [None; LANES];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_that_pass_over_a_backlog_look_among_ever_more_ids() {
        let (mut shares, hot) = (Shares::new(), 1_u64 << 5);
        assert_eq!(shares.width(16, u64::MAX), 16);
        let read = |lanes, ids, reached| Read { lanes, ids, reached: Some(reached) };
        shares.claimed(u64::MAX, &read(u64::MAX, 16, 16), Duration::ZERO);
        shares.found(u64::MAX, 16, 16);
        let (mut reached, mut claims) = (16, 0);
        while shares.width(16, !hot) < 50_000 {
            let width = shares.width(16, !hot);
            reached += width as i64;
            shares.claimed(!hot, &read(!hot, width, reached), Duration::ZERO);
            shares.found(!hot, 0, width);
            claims += 1;
        }
        assert!(claims <= 6, "{claims}");
        // What is left of the backlog is the one lane's.
        shares.claimed(u64::MAX, &read(hot, 16, 32), Duration::ZERO);
        shares.found(hot, 16, 16);
        assert_eq!(shares.width(16, u64::MAX), 16);
        // Lanes that went to others do not count.
        shares.claimed(u64::MAX, &read(1, 16, reached + 16), Duration::ZERO);
        assert_eq!(shares.width(16, u64::MAX), 50_000);
        // One message in one id again, one in 63 for one of the lanes.
        shares.found(!hot, 16, 16);
        assert_eq!(shares.width(16, u64::MAX), 16 * 63);
    }
}
