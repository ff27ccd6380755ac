//! One message of a key at a time, for ordered groups.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::workers::Job;

/// Which keys are being handled, and what waits for them.
///
/// Invariant: of the messages of a key at most one has been let through and has not ended. What failed keeps its key shut until
/// somebody takes away what waits for it.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    keys: Mutex<HashMap<String, Key>>,
}

#[derive(Debug, Default)]
struct Key {
    waiting: VecDeque<Job>,
    /// One of its messages is let through and has not ended.
    busy: bool,
    shut: bool,
    /// The message whose turn it is. It is in the queue again, perhaps behind later ones of its key.
    next: Option<i64>,
}

impl Gate {
    /// Lets a message through, or keeps it until those of its key before it have ended.
    pub(crate) fn admit(&self, job: Job) -> Option<Job> {
        let Some(key) = &job.message.key else { return Some(job) };
        let mut keys = self.lock();
        let found = keys.entry(key.clone()).or_default();
        let its_turn = found.next.is_none_or(|next| next == job.message.id);
        if found.busy || found.shut || !its_turn {
            found.waiting.push_back(job);
            return None;
        }
        (found.busy, found.next) = (true, None);
        Some(job)
    }

    /// A message of the key is to be tried again: nothing of it may be run.
    pub(crate) fn shut(&self, key: &str) {
        if let Some(found) = self.lock().get_mut(key) {
            (found.busy, found.shut) = (false, true);
        }
    }

    /// A message of the key has ended, for good. Returns the next, to be put into the queue.
    pub(crate) fn ended(&self, key: &str) -> Option<Job> {
        let mut keys = self.lock();
        let found = keys.get_mut(key)?;
        found.busy = false;
        let next = found.waiting.pop_front();
        found.next = next.as_ref().map(|job| job.message.id);
        if next.is_none() {
            keys.remove(key);
        }
        next
    }

    /// Takes away what waits for a key that is shut, and opens it.
    pub(crate) fn clear(&self, key: &str) -> Vec<Job> {
        let mut keys = self.lock();
        match keys.get(key) {
            Some(found) if found.shut => {
                keys.remove(key).map_or_else(Vec::new, |found| found.waiting.into())
            }
            _ => Vec::new(),
        }
    }

    /// Takes away all that waits; the queue is empty. What is being handled keeps its key.
    pub(crate) fn clear_all(&self) -> Vec<Job> {
        let mut keys = self.lock();
        let waiting = keys.values_mut().flat_map(|key| std::mem::take(&mut key.waiting)).collect();
        keys.retain(|_, key| {
            key.next = None;
            key.busy || key.shut
        });
        waiting
    }

    /// Nothing panics while it holds the lock, and the keys are whole between any two calls.
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Key>> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
