//! How many ids to claim in a group with bindings, of which some are for it: so many that about as many messages are among
//! them as are wanted, and no more than are looked through in a moment.

use std::time::Duration;

/// The most ids claimed at once.
const MOST_IDS: usize = 50_000;
/// The most where the group has a limit: then the server looks through them under the cursor's lock.
const MOST_LOCKED: usize = 10_000;
/// The fewest, however long they take.
const FEWEST_IDS: usize = 1_000;
/// A claim that takes longer was too wide; one that takes less than half of it could have been wider.
const MOMENT: Duration = Duration::from_millis(200);
/// By how much the width grows at most from claim to claim.
pub(crate) const GROWTH: f64 = 8.0;

/// What was seen of a group's bindings so far.
#[derive(Debug)]
pub(crate) struct Sieve {
    /// The part of the ids that are for the group, as far as is known.
    share: Share,
    most: Most,
    bound: bool,
}

/// Which part of the ids are messages that are wanted.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Share(pub(crate) f64);

impl Share {
    /// Of so many ids these messages came.
    pub(crate) fn found(&mut self, messages: f64, ids: usize) {
        // Half a message more, or none would mean that there will never be any.
        let share = ((messages + 0.5) / ids as f64).min(1.0);
        // A dense part is believed at once: what is claimed there keeps others from it.
        self.0 = if share > self.0 { share } else { share.max(self.0 / GROWTH) };
    }
}

/// The most ids to claim at once: no more than are looked through in a moment.
#[derive(Debug)]
pub(crate) struct Most(pub(crate) usize);

impl Most {
    pub(crate) fn new() -> Self {
        Self(MOST_IDS)
    }

    /// To claim so many ids and to read them took so long.
    pub(crate) fn took(&mut self, ids: usize, elapsed: Duration) {
        if elapsed > MOMENT {
            self.0 = (ids / 2).clamp(FEWEST_IDS, self.0.max(FEWEST_IDS));
        } else if elapsed < MOMENT / 2 && ids * 2 > self.0 {
            self.0 = (self.0 * 2).min(MOST_IDS);
        }
    }
}

impl Sieve {
    pub(crate) fn new() -> Self {
        Self { share: Share(1.0), most: Most::new(), bound: false }
    }

    /// Whether the group has bindings, as it said last.
    pub(crate) fn is_bound(&self) -> bool {
        self.bound
    }

    /// How many ids to claim for so many messages.
    pub(crate) fn width(&self, messages: usize, limited: bool) -> usize {
        let most = if limited { self.most.0.min(MOST_LOCKED) } else { self.most.0 };
        // As floats do: what is too large for the type is its largest.
        let width = (messages as f64 / self.share.0) as usize;
        width.min(most).max(messages)
    }

    /// The most ids to look among.
    pub(crate) fn most(&self) -> usize {
        self.most.0
    }

    /// How many messages are expected among so many ids; none where there are no bindings.
    pub(crate) fn expected(&self, ids: usize) -> usize {
        if self.bound { (ids as f64 * self.share.0) as usize } else { 0 }
    }

    /// A claim was about these ids (`None`: the group has no bindings), and took so long.
    pub(crate) fn looked_at(&mut self, ids: Option<usize>, elapsed: Duration) {
        let Some(ids) = ids else {
            *self = Self::new();
            return;
        };
        self.bound = true;
        if ids > 0 {
            self.most.took(ids, elapsed);
        }
    }

    /// Of so many ids these messages came.
    pub(crate) fn found(&mut self, messages: usize, ids: usize) {
        if self.bound && ids > 0 {
            self.share.found(messages as f64, ids);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bound() -> Sieve {
        let mut sieve = Sieve::new();
        sieve.looked_at(Some(16), Duration::ZERO);
        sieve
    }

    #[test]
    fn without_bindings_as_many_ids_as_messages() {
        let mut sieve = Sieve::new();
        sieve.looked_at(None, Duration::from_secs(1));
        sieve.found(1, 10_000);
        assert_eq!((sieve.width(16, false), sieve.expected(1000)), (16, 0));
    }

    #[test]
    fn sparse_matches_soon_widen_it_to_the_most() {
        let mut sieve = bound();
        let mut claims = 0;
        while sieve.width(16, false) < MOST_IDS {
            let width = sieve.width(16, false);
            sieve.found(0, width);
            claims += 1;
        }
        assert!(claims <= 6, "{claims}");
        assert_eq!(sieve.width(16, true), MOST_LOCKED);
    }

    #[test]
    fn a_claim_that_brought_nothing_teaches_nothing() {
        let mut sieve = bound();
        for _ in 0..10 {
            sieve.found(0, 50_000);
        }
        sieve.looked_at(Some(0), Duration::from_secs(1));
        assert_eq!(sieve.width(16, false), MOST_IDS);
    }

    #[test]
    fn a_dense_part_narrows_it_at_once() {
        let mut sieve = bound();
        for _ in 0..10 {
            sieve.found(0, 50_000);
        }
        sieve.found(16, 20);
        assert!(sieve.width(16, false) < 20);
        // All of them: never fewer ids than messages.
        sieve.found(16, 16);
        assert_eq!(sieve.width(16, false), 16);
    }

    #[test]
    fn a_dear_condition_narrows_it_by_time() {
        let mut sieve = bound();
        for _ in 0..10 {
            sieve.found(0, 50_000);
        }
        for _ in 0..20 {
            let width = sieve.width(16, false);
            sieve.looked_at(Some(width), Duration::from_secs(1));
        }
        assert_eq!(sieve.width(16, false), FEWEST_IDS);
        for _ in 0..20 {
            let width = sieve.width(16, false);
            sieve.looked_at(Some(width), Duration::from_millis(1));
        }
        assert_eq!(sieve.width(16, false), MOST_IDS);
    }
}
