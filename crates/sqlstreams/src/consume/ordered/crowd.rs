//! Lanes of which a consumer holds so many messages that wait for others of their keys that it had better take no more: they
//! would take the room of messages that could be handled.

use std::collections::HashMap;

use crate::consume::turns::LANES;

/// A lane may use this part of the room, or so much less that all that are crowded use half of it.
const PART: usize = 8;

/// What of each lane waits for a message of the same key.
#[derive(Debug)]
pub(super) struct Crowd {
    /// How many messages of each key are held.
    keys: HashMap<String, usize>,
    lanes: [Lane; LANES],
}

#[derive(Debug, Clone, Copy, Default)]
struct Lane {
    /// Messages that have a key.
    held: usize,
    /// Those of them for which another of their key comes first.
    waiting: usize,
}

/// Lanes that are to be read no further for now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Crowded {
    pub(super) lanes: u64,
    /// How many messages of theirs wait beyond their share.
    pub(super) excess: usize,
}

impl Crowd {
    pub(super) fn new() -> Self {
        Self { keys: HashMap::new(), lanes: [Lane::default(); LANES] }
    }

    pub(super) fn came(&mut self, key: &str, lane: usize) {
        let count = match self.keys.get_mut(key) {
            Some(count) => count,
            None => self.keys.entry(key.to_owned()).or_default(),
        };
        *count += 1;
        self.lanes[lane].held += 1;
        self.lanes[lane].waiting += usize::from(*count > 1);
    }

    pub(super) fn went(&mut self, key: &str, lane: usize) {
        let Some(count) = self.keys.get_mut(key) else { return };
        *count -= 1;
        self.lanes[lane].held -= 1;
        if *count > 0 {
            self.lanes[lane].waiting -= 1;
        } else {
            self.keys.remove(key);
        }
    }

    /// Which lanes are crowded where so many messages are to be held.
    pub(super) fn crowded(&self, target: usize) -> Crowded {
        let mut count = PART / 2;
        loop {
            let share = target / (count * 2);
            let lanes = self.where_lane(|lane| lane.waiting > share);
            if lanes.count_ones() as usize <= count {
                let excess = of(lanes).map(|lane| self.lanes[lane].waiting - share).sum();
                return Crowded { lanes, excess };
            }
            count = lanes.count_ones() as usize;
        }
    }

    /// Lanes of which a message with a key is held: in a group that has a limit a second one would take the place of another's.
    pub(super) fn busy(&self) -> u64 {
        self.where_lane(|lane| lane.held > 0)
    }

    fn where_lane(&self, is: impl Fn(&Lane) -> bool) -> u64 {
        self.lanes.iter().enumerate().fold(0, |lanes, (n, lane)| lanes | u64::from(is(lane)) << n)
    }
}

/// The numbers of these lanes.
pub(super) fn of(lanes: u64) -> impl Iterator<Item = usize> + Clone {
    (0..LANES).filter(move |lane| lanes >> lane & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn crowd(keys: &[(&str, usize, usize)]) -> Crowd {
        let mut crowd = Crowd::new();
        for (key, lane, count) in keys {
            (0..*count).for_each(|_| crowd.came(key, *lane));
        }
        crowd
    }

    #[test]
    fn many_keys_are_no_crowd() {
        let mut crowd = Crowd::new();
        for n in 0..20_000 {
            crowd.came(&(n % 1_000).to_string(), n % 1_000 % LANES);
        }
        assert_eq!(crowd.crowded(20_000), Crowded { lanes: 0, excess: 0 });
    }

    #[test]
    fn a_key_with_many_messages_crowds_its_lane_until_they_are_done() {
        let mut crowd = crowd(&[("hot", 7, 100), ("a", 7, 1), ("b", 8, 1)]);
        assert_eq!(crowd.crowded(80), Crowded { lanes: 1 << 7, excess: 99 - 10 });
        for _ in 0..89 {
            crowd.went("hot", 7);
        }
        assert_eq!(crowd.crowded(80), Crowded { lanes: 0, excess: 0 });
        assert_eq!(crowd.busy(), 1 << 7 | 1 << 8);
        for _ in 0..11 {
            crowd.went("hot", 7);
        }
        crowd.went("a", 7);
        crowd.went("b", 8);
        assert_eq!(crowd.busy(), 0);
    }

    #[test]
    fn crowded_lanes_leave_half_of_the_room_to_the_others() {
        for hot in 1..LANES {
            let names: Vec<String> = (0..hot).map(|n| n.to_string()).collect();
            let keys: Vec<_> =
                names.iter().enumerate().map(|(n, k)| (k.as_str(), n, 1_000)).collect();
            let Crowded { lanes, excess } = crowd(&keys).crowded(1_600);
            assert_eq!(lanes.count_ones() as usize, hot);
            assert!(hot * 999 - excess <= 800, "{hot}: {excess}");
        }
    }
}
