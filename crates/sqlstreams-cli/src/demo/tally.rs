//! What a group's handler did, order by order.
//!
//! Delivery is at least once, so orders are counted, not calls: on a machine that was asleep for longer than a lease lasts
//! an order is handled twice, and the demo holds all the same.

use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::Notify;

/// A set of order numbers that grows under many hands.
#[derive(Debug)]
pub(crate) struct OrderSet {
    bits: Box<[AtomicU64]>,
    count: AtomicU64,
}

/// The counts of one group.
#[derive(Debug)]
pub(crate) struct Tally {
    handled: OrderSet,
    given_up: OrderSet,
    /// Calls for an order that was handled before.
    repeated: AtomicU64,
    /// Attempts that failed, the last ones included.
    failed_attempts: AtomicU64,
    /// Orders whose first handled attempt was not the first: at the second, at a later one.
    recovered: [AtomicU64; 2],
    /// Orders handled or given up, for the progress bar.
    finished: AtomicU64,
    /// How many orders there are to finish.
    goal: u64,
    complete: Notify,
}

impl OrderSet {
    /// A set with room for the numbers up to `last`.
    fn up_to(last: u64) -> Self {
        let words = usize::try_from(last / 64 + 1).unwrap_or(usize::MAX);
        Self { bits: (0..words).map(|_| AtomicU64::new(0)).collect(), count: AtomicU64::new(0) }
    }

    /// Adds a number; says whether it is new. Numbers beyond the room never are.
    fn insert(&self, number: u64) -> bool {
        let word = usize::try_from(number / 64).ok().and_then(|at| self.bits.get(at));
        let bit = 1 << (number % 64);
        let new = word.is_some_and(|word| word.fetch_or(bit, Ordering::Relaxed) & bit == 0);
        if new {
            self.count.fetch_add(1, Ordering::Relaxed);
        }
        new
    }

    fn contains(&self, number: u64) -> bool {
        let word = usize::try_from(number / 64).ok().and_then(|at| self.bits.get(at));
        word.is_some_and(|word| word.load(Ordering::Relaxed) & (1 << (number % 64)) != 0)
    }
}

impl Tally {
    /// A tally of the orders 1 to `goal`; a few beyond may follow.
    pub(crate) fn of(goal: u64) -> Self {
        Self {
            handled: OrderSet::up_to(goal + 64),
            given_up: OrderSet::up_to(goal + 64),
            repeated: AtomicU64::new(0),
            failed_attempts: AtomicU64::new(0),
            recovered: Default::default(),
            finished: AtomicU64::new(0),
            goal,
            complete: Notify::new(),
        }
    }

    /// An order was handled; says whether for the first time.
    pub(crate) fn handled_one(&self, number: u64, attempt: u32) -> bool {
        if !self.handled.insert(number) {
            self.repeated.fetch_add(1, Ordering::Relaxed);
            return false;
        }
        if attempt > 1 {
            self.recovered[usize::from(attempt > 2)].fetch_add(1, Ordering::Relaxed);
        }
        self.finished_one();
        true
    }

    /// An attempt failed; `last`: there will be no other.
    pub(crate) fn failed_one(&self, number: u64, last: bool) {
        self.failed_attempts.fetch_add(1, Ordering::Relaxed);
        if last && self.given_up.insert(number) {
            self.finished_one();
        }
    }

    fn finished_one(&self) {
        if self.finished.fetch_add(1, Ordering::Relaxed) + 1 == self.goal {
            // Kept for whoever asks later.
            self.complete.notify_one();
        }
    }

    /// Waits until all orders are handled or given up. For one waiter.
    pub(crate) async fn complete(&self) {
        self.complete.notified().await;
    }

    pub(crate) fn finished(&self) -> &AtomicU64 {
        &self.finished
    }

    pub(crate) fn handled(&self) -> u64 {
        self.handled.count.load(Ordering::Relaxed)
    }

    pub(crate) fn has_handled(&self, number: u64) -> bool {
        self.handled.contains(number)
    }

    pub(crate) fn given_up(&self) -> u64 {
        self.given_up.count.load(Ordering::Relaxed)
    }

    pub(crate) fn repeated(&self) -> u64 {
        self.repeated.load(Ordering::Relaxed)
    }

    pub(crate) fn failed_attempts(&self) -> u64 {
        self.failed_attempts.load(Ordering::Relaxed)
    }

    /// Orders handled at the second attempt, and at a later one.
    pub(crate) fn recovered(&self) -> [u64; 2] {
        [0, 1].map(|at: usize| self.recovered[at].load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn orders_are_counted_once() {
        let tally = Tally::of(3);
        assert!(tally.handled_one(1, 1));
        assert!(!tally.handled_one(1, 1));
        tally.failed_one(2, false);
        assert!(tally.handled_one(2, 2));
        tally.failed_one(3, true);
        tally.failed_one(3, true);
        tally.complete().await;
        assert_eq!((tally.handled(), tally.given_up(), tally.repeated()), (2, 1, 1));
        assert_eq!((tally.failed_attempts(), tally.recovered()), (3, [1, 0]));
    }
}
