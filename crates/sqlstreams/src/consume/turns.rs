//! Jobs that wait for workers: in a fair group taken from the lanes in turn, elsewhere in the order in which they came.

use std::cmp::Reverse;
use std::collections::VecDeque;

/// The lanes of a group's messages.
pub(crate) const LANES: usize = 64;

/// What waits, by lane. Invariant: `turn` names each lane that has something, once.
#[derive(Debug)]
pub(crate) struct Turns<T> {
    /// The last is for what has no lane.
    lanes: Vec<VecDeque<T>>,
    turn: VecDeque<usize>,
    len: usize,
}

impl<T> Default for Turns<T> {
    fn default() -> Self {
        let lanes = (0..=LANES).map(|_| VecDeque::new()).collect();
        Self { lanes, turn: VecDeque::new(), len: 0 }
    }
}

impl<T> Turns<T> {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// How many wait in each lane.
    pub(crate) fn by_lane(&self) -> [usize; LANES] {
        std::array::from_fn(|lane| self.lanes[lane].len())
    }

    pub(crate) fn push_back(&mut self, lane: Option<i16>, job: T) {
        let lane = place(lane);
        if self.lanes[lane].is_empty() {
            self.turn.push_back(lane);
        }
        self.lanes[lane].push_back(job);
        self.len += 1;
    }

    /// Before all others.
    pub(crate) fn push_front(&mut self, lane: Option<i16>, job: T) {
        let lane = place(lane);
        self.turn.retain(|other| *other != lane);
        self.turn.push_front(lane);
        self.lanes[lane].push_front(job);
        self.len += 1;
    }

    /// The next ones, at most so many.
    pub(crate) fn take(&mut self, most: usize) -> Vec<T> {
        let mut taken = Vec::with_capacity(most.min(self.len));
        while taken.len() < most
            && let Some(lane) = self.turn.pop_front()
        {
            taken.extend(self.lanes[lane].pop_front());
            if !self.lanes[lane].is_empty() {
                self.turn.push_back(lane);
            }
        }
        self.len -= taken.len();
        taken
    }

    pub(crate) fn retain(&mut self, mut keep: impl FnMut(&T) -> bool) {
        self.lanes.iter_mut().for_each(|lane| lane.retain(&mut keep));
        self.turn.retain(|lane| !self.lanes[*lane].is_empty());
        self.len = self.lanes.iter().map(VecDeque::len).sum();
    }

    /// Takes the last ones, at most so many: from lanes with more than a quarter of all, then those that `number` says are the
    /// last, so that what is taken lies together.
    pub(crate) fn take_last(&mut self, most: usize, number: impl Fn(&T) -> i64) -> Vec<T> {
        let mut taken = Vec::new();
        while taken.len() < most
            && self.turn.len() > 1
            && let Some(longest) = self.lanes.iter_mut().max_by_key(|lane| lane.len())
            && longest.len() * 4 > self.len
        {
            taken.extend(longest.pop_back());
            self.len -= 1;
        }
        let rest = most - taken.len();
        if rest > 0 && self.turn.len() > 1 {
            let mut numbers: Vec<i64> = self.lanes.iter().flatten().map(&number).collect();
            numbers.sort_unstable_by_key(|number| Reverse(*number));
            let last = numbers.get(rest.saturating_sub(1)).or(numbers.last()).copied();
            for lane in &mut self.lanes {
                let (kept, last): (VecDeque<T>, VecDeque<T>) =
                    lane.drain(..).partition(|job| last.is_none_or(|last| number(job) < last));
                *lane = kept;
                taken.extend(last);
            }
        } else if let Some(only) = self.turn.front() {
            let lane = &mut self.lanes[*only];
            taken.extend(lane.split_off(lane.len().saturating_sub(rest)));
        }
        self.retain(|_| true);
        taken
    }
}

fn place(lane: Option<i16>) -> usize {
    lane_number(lane).unwrap_or(LANES)
}

/// A lane as an index.
pub(crate) fn lane_number(lane: Option<i16>) -> Option<usize> {
    lane.and_then(|lane| usize::try_from(lane).ok()).filter(|lane| *lane < LANES)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turns(jobs: &[(i16, i64)]) -> Turns<i64> {
        let mut turns = Turns::default();
        jobs.iter().for_each(|(lane, id)| turns.push_back(Some(*lane), *id));
        turns
    }

    #[test]
    fn lanes_take_turns_and_keep_their_order() {
        let mut turns = turns(&[(3, 1), (3, 2), (3, 3), (7, 4), (9, 5), (7, 6)]);
        assert_eq!((turns.len(), turns.by_lane()[3]), (6, 3));
        assert_eq!(turns.take(4), [1, 4, 5, 2]);
        turns.push_back(Some(9), 7);
        turns.push_front(Some(3), 0);
        assert_eq!(turns.take(9), [0, 6, 7, 3]);
        assert_eq!((turns.len(), turns.take(1)), (0, vec![]));
    }

    #[test]
    fn without_lanes_first_come_first_served() {
        let mut turns = Turns::default();
        (0..10).for_each(|id| turns.push_back(None, id));
        assert_eq!(turns.take_last(3, |id| *id), [7, 8, 9]);
        turns.retain(|id| id % 2 == 0);
        assert_eq!(turns.take(9), [0, 2, 4, 6]);
    }

    #[test]
    fn what_is_taken_back_is_of_the_longest_lane_first() {
        let burst: Vec<(i16, i64)> = (0..100).map(|id| (1, id)).collect();
        let mut turns = turns(&burst);
        turns.push_back(Some(2), 100);
        turns.push_back(Some(3), 101);
        let taken = turns.take_last(90, |id| *id);
        assert_eq!(
            (taken.len(), taken.iter().min(), taken.iter().max()),
            (90, Some(&10), Some(&99))
        );
        assert_eq!(turns.take(3), [0, 100, 101]);
    }

    #[test]
    fn where_none_is_long_what_is_taken_back_lies_together() {
        let jobs: Vec<(i16, i64)> = (0..640).map(|id| ((id % 64) as i16, id)).collect();
        let mut turns = turns(&jobs);
        let mut taken = turns.take_last(100, |id| *id);
        taken.sort_unstable();
        assert_eq!(taken, (540..640).collect::<Vec<_>>());
        assert_eq!(turns.len(), 540);
        assert_eq!(turns.take(540).len(), 540);
    }
}
