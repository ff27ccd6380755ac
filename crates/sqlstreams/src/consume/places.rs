//! How many connections handlers' transactions may hold.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Places for handlers' transactions, first come, first served.
#[derive(Debug)]
pub(crate) struct Places {
    free: Arc<Semaphore>,
    waiting: AtomicUsize,
}

/// One of them, until it is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    _permit: Option<OwnedSemaphorePermit>,
}

impl Places {
    pub(crate) fn new(count: usize) -> Self {
        Self { free: Arc::new(Semaphore::new(count)), waiting: AtomicUsize::new(0) }
    }

    /// The next that comes free. Cancelled, it takes none.
    pub(crate) async fn take(&self) -> Place {
        let waiting = Waiting::new(&self.waiting);
        // It is never closed.
        let permit = self.free.clone().acquire_owned().await.ok();
        drop(waiting);
        Place { _permit: permit }
    }

    /// Whether somebody waits for one.
    pub(crate) fn are_wanted(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0
    }
}

struct Waiting<'a>(&'a AtomicUsize);

impl<'a> Waiting<'a> {
    fn new(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[tokio::test]
    async fn it_knows_whether_somebody_waits() {
        let places = Places::new(1);
        let place = places.take().await;
        assert!(!places.are_wanted());
        {
            let mut next = std::pin::pin!(places.take());
            assert!(next.as_mut().now_or_never().is_none());
            assert!(places.are_wanted());
        }
        assert!(!places.are_wanted(), "whoever was waiting has gone");
        drop(place);
        assert!(places.take().now_or_never().is_some());
    }
}
