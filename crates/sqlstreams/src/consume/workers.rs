//! The workers: as many tasks as handlers may run at once, fed from one queue.

use std::collections::VecDeque;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::FutureExt;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;

use super::held::Source;
use crate::message::{Message, RawMessage};
use crate::outcome::{IntoOutcome, Outcome, Verdict};
use crate::payload::Codec;

/// A message to be run.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) source: Source,
    pub(crate) message: RawMessage,
}

/// How it ended.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) source: Source,
    pub(crate) id: i64,
    pub(crate) verdict: Verdict,
}

/// The queue and the tasks behind it. Dropped, the tasks are aborted.
pub(crate) struct Workers {
    queue: Arc<Queue>,
    tasks: JoinSet<()>,
}

struct Queue {
    jobs: Mutex<VecDeque<Job>>,
    /// One permit for each job in the queue.
    ready: Semaphore,
}

impl Workers {
    /// Starts the workers; what they finish comes out of the receiver.
    pub(crate) fn start<T, C, H, F>(
        count: usize,
        timeout: Option<Duration>,
        handler: H,
    ) -> (Self, mpsc::UnboundedReceiver<Finished>)
    where
        T: Send + 'static,
        C: Codec<T>,
        H: Fn(Message<T>) -> F + Send + Sync + 'static,
        F: Future<Output: IntoOutcome> + Send + 'static,
    {
        // Unbounded, yet never longer than what the consumer holds.
        let (finished, results) = mpsc::unbounded_channel();
        let queue = Arc::new(Queue { jobs: Mutex::new(VecDeque::new()), ready: Semaphore::new(0) });
        let handler = Arc::new(handler);
        let mut tasks = JoinSet::new();
        for _ in 0..count {
            let (queue, handler, finished) = (queue.clone(), handler.clone(), finished.clone());
            tasks.spawn(async move {
                while let Some(Job { source, message }) = queue.next().await {
                    let id = message.id;
                    let verdict = handle::<T, C, H, F>(message, timeout, &handler).await.into();
                    // Nobody listens any more when the consumer is gone.
                    let _ = finished.send(Finished { source, id, verdict });
                }
            });
        }
        (Self { queue, tasks }, results)
    }

    pub(crate) fn push(&self, jobs: impl IntoIterator<Item = Job>) {
        let mut queue = self.queue.lock();
        let before = queue.len();
        queue.extend(jobs);
        let added = queue.len() - before;
        drop(queue);
        self.queue.ready.add_permits(added);
    }

    /// How many jobs no worker has taken yet.
    pub(crate) fn waiting(&self) -> usize {
        self.queue.lock().len()
    }

    /// Takes back jobs that no worker has taken yet and that `keep` does not want; returns how many.
    pub(crate) fn retain(&self, keep: impl FnMut(&Job) -> bool) -> usize {
        // A permit whose job is gone lets a worker find an empty queue and wait again.
        let mut queue = self.queue.lock();
        let before = queue.len();
        queue.retain(keep);
        before - queue.len()
    }

    /// Drops the handlers that still run. One that never awaits cannot be dropped: it is left behind.
    pub(crate) async fn abort(&mut self) {
        self.tasks.abort_all();
        let _ = tokio::time::timeout(Duration::from_secs(1), async {
            while self.tasks.join_next().await.is_some() {}
        })
        .await;
    }

    /// Whether a worker has ended, which only a defect of ours can make it do.
    pub(crate) fn has_dead(&mut self) -> bool {
        self.tasks.try_join_next().is_some()
    }
}

impl Queue {
    async fn next(&self) -> Option<Job> {
        loop {
            self.ready.acquire().await.ok()?.forget();
            if let Some(job) = self.lock().pop_front() {
                return Some(job);
            }
        }
    }

    /// Nothing panics while it holds the lock, and a queue of jobs is whole between any two calls.
    fn lock(&self) -> MutexGuard<'_, VecDeque<Job>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn handle<T, C, H, F>(raw: RawMessage, timeout: Option<Duration>, handler: &Arc<H>) -> Outcome
where
    C: Codec<T>,
    H: Fn(Message<T>) -> F,
    F: Future<Output: IntoOutcome>,
{
    let message = match decode::<T, C>(raw) {
        Ok(message) => message,
        Err(reason) => return Outcome::Dead(reason),
    };
    // The call itself may panic as well as the future it makes.
    let run = AssertUnwindSafe(async { handler(message).await.into_outcome() }).catch_unwind();
    let ended = match timeout {
        None => run.await,
        Some(limit) => match tokio::time::timeout(limit, run).await {
            Ok(ended) => ended,
            Err(_) => return Outcome::Retry(format!("the handler took longer than {limit:?}")),
        },
    };
    ended.unwrap_or_else(|panic| {
        Outcome::Retry(format!("the handler panicked: {}", panic_text(&*panic)))
    })
}

/// A codec is the user's code, too, and may panic.
fn decode<T, C: Codec<T>>(raw: RawMessage) -> Result<Message<T>, String> {
    match std::panic::catch_unwind(AssertUnwindSafe(|| raw.decode::<T, C>())) {
        Ok(decoded) => decoded,
        Err(panic) => Err(format!("decoding the payload panicked: {}", panic_text(&*panic))),
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    match (panic.downcast_ref::<&str>(), panic.downcast_ref::<String>()) {
        (Some(text), _) => text,
        (_, Some(text)) => text,
        _ => "no text",
    }
}
