//! Who was handled, how often and when.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::bench::spread::Spread;

/// A message.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Job {
    /// It does not fail, and came later than those that do.
    pub(super) fresh: bool,
    pub(super) n: u64,
    /// When it was sent, in nanoseconds since the beginning.
    pub(super) sent: u64,
    pub(super) pad: String,
}

/// The accounts of the handlers.
#[derive(Debug)]
pub(super) struct Ledger {
    begun: Instant,
    /// Whether what failed at first is done from now on.
    mended: AtomicBool,
    failed: AtomicU64,
    /// Of those that fail at first.
    pub(super) done: Counted,
    pub(super) fresh: Counted,
    /// How long fresh ones took: while others failed, and while those were done.
    times: Mutex<[Spread; 2]>,
}

/// Messages by their numbers.
#[derive(Debug)]
pub(super) struct Counted {
    /// How often each was done; those that are too many are not looked at.
    each: Vec<AtomicU8>,
    /// How many were, once or more.
    once: AtomicU64,
    again: AtomicU64,
}

impl Counted {
    fn new(most: usize) -> Self {
        let each = std::iter::repeat_with(AtomicU8::default).take(most).collect();
        Self { each, once: AtomicU64::new(0), again: AtomicU64::new(0) }
    }

    fn add(&self, n: u64) {
        let cell = usize::try_from(n).ok().and_then(|n| self.each.get(n));
        match cell.map(|cell| cell.swap(1, Ordering::Relaxed)) {
            Some(0) => self.once.fetch_add(1, Ordering::Relaxed),
            _ => self.again.fetch_add(1, Ordering::Relaxed),
        };
    }

    pub(super) fn once(&self) -> u64 {
        self.once.load(Ordering::Relaxed)
    }
}

impl Ledger {
    /// For so many that fail, and at most so many fresh ones.
    pub(super) fn new(failing: usize, fresh: usize) -> anyhow::Result<Self> {
        Ok(Self {
            begun: Instant::now(),
            mended: AtomicBool::new(false),
            failed: AtomicU64::new(0),
            done: Counted::new(failing),
            fresh: Counted::new(fresh),
            times: Mutex::new([Spread::new()?, Spread::new()?]),
        })
    }

    /// Nanoseconds since the beginning.
    pub(super) fn now(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// From now on nothing fails.
    pub(super) fn mend(&self) {
        self.mended.store(true, Ordering::Relaxed);
    }

    /// What a handler makes of a message.
    pub(super) fn handle(&self, job: &Job) -> Result<(), &'static str> {
        let mended = self.mended.load(Ordering::Relaxed);
        if job.fresh {
            self.fresh.add(job.n);
            let took = i128::from(self.now()) - i128::from(job.sent);
            let mut times = self.times.lock().unwrap_or_else(PoisonError::into_inner);
            times[usize::from(mended)].record(took);
        } else if mended {
            self.done.add(job.n);
        } else {
            self.failed.fetch_add(1, Ordering::Relaxed);
            return Err("it fails at first");
        }
        Ok(())
    }

    pub(super) fn failed(&self) -> u64 {
        self.failed.load(Ordering::Relaxed)
    }

    /// How often a message was done once more.
    pub(super) fn repeated(&self) -> u64 {
        [&self.done, &self.fresh].map(|it| it.again.load(Ordering::Relaxed)).iter().sum()
    }

    pub(super) fn times(&self) -> [Spread; 2] {
        self.times.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(fresh: bool, n: u64) -> Job {
        Job { fresh, n, sent: 0, pad: String::new() }
    }

    #[test]
    fn everything_is_counted_once_and_what_comes_again_apart() {
        let ledger = Ledger::new(2, 2).unwrap();
        assert!(ledger.handle(&job(false, 0)).is_err());
        assert!(ledger.handle(&job(true, 0)).is_ok());
        ledger.mend();
        for n in [0, 1, 1] {
            assert!(ledger.handle(&job(false, n)).is_ok());
        }
        assert!(ledger.handle(&job(true, 1)).is_ok());
        assert_eq!((ledger.failed(), ledger.done.once(), ledger.fresh.once()), (1, 2, 2));
        assert_eq!(ledger.repeated(), 1);
        assert_eq!(ledger.times().map(|times| times.percentiles().count), [1, 1]);
        // One that was never sent does not make up for one that is missing.
        assert!(ledger.handle(&job(false, 7)).is_ok());
        assert_eq!((ledger.done.once(), ledger.repeated()), (2, 2));
    }
}
