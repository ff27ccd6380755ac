//! The workers: as many tasks as handlers may run at once, fed from one queue. They live on the caller's runtime.

use std::collections::VecDeque;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::FutureExt;
use tokio::runtime::Handle;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinSet;

use super::delivery::History;
use super::gate::Gate;
use super::handler::Runner;
use super::held::Source;
use super::term::Term;
use super::transaction::Open;
use super::turns::{LANES, Turns};
use crate::message::RawMessage;
use crate::outcome::Verdict;

/// A message to be run.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) source: Source,
    pub(crate) message: RawMessage,
    pub(crate) history: History,
    pub(crate) term: Arc<Term>,
}

/// How it ended.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) source: Source,
    pub(crate) id: i64,
    pub(crate) verdict: Verdict,
    /// The message's key, in an ordered group.
    pub(crate) key: Option<String>,
}

/// The tasks behind the queue. Dropped, they are aborted.
pub(crate) struct Workers {
    tasks: JoinSet<()>,
}

/// How workers run.
pub(crate) struct Work {
    pub(crate) runner: Runner,
    /// The most messages for one call of the handler.
    pub(crate) batch: usize,
    /// Shared with other consumers.
    pub(crate) budget: Option<Arc<Semaphore>>,
    pub(crate) finished: mpsc::UnboundedSender<Vec<Finished>>,
}

/// The messages that wait for a worker.
#[derive(Debug)]
pub(crate) struct Queue {
    jobs: Mutex<Jobs>,
    /// One permit for each job in the queue.
    ready: Semaphore,
    paused: AtomicBool,
    resumed: Notify,
    /// In the queue or with a worker.
    unfinished: AtomicUsize,
    /// How long before the end of a lease handlers are told; in milliseconds.
    margin: AtomicUsize,
    /// In an ordered group, what keeps the messages of a key apart.
    gate: Option<Gate>,
}

/// Two rows that take turns: messages as they came, and those that waited for one of their key to end. So a key of which many
/// wait leaves every second place to the others.
#[derive(Debug, Default)]
struct Jobs {
    /// In a fair group they take turns themselves.
    came: Turns<Job>,
    waited: VecDeque<Job>,
    waited_next: bool,
}

impl Jobs {
    fn len(&self) -> usize {
        self.came.len() + self.waited.len()
    }

    fn take(&mut self) -> Option<Job> {
        self.waited_next = !self.waited_next;
        match self.waited_next {
            true => self.waited.pop_front().or_else(|| self.came.pop_front()),
            false => self.came.pop_front().or_else(|| self.waited.pop_front()),
        }
    }

    fn retain(&mut self, mut keep: impl FnMut(&Job) -> bool) {
        self.came.retain(&mut keep);
        self.waited.retain(keep);
    }
}

impl Workers {
    pub(crate) fn start(count: usize, runtime: &Handle, queue: &Arc<Queue>, work: Work) -> Self {
        let work = Arc::new(work);
        let mut tasks = JoinSet::new();
        for _ in 0..count {
            tasks.spawn_on(work_on(queue.clone(), work.clone()), runtime);
        }
        Self { tasks }
    }

    /// Drops the handlers that still run. One that never awaits cannot be dropped: it is left behind.
    pub(crate) async fn abort(&mut self) {
        self.tasks.abort_all();
        let _ = tokio::time::timeout(Duration::from_secs(1), async {
            while self.tasks.join_next().await.is_some() {}
        })
        .await;
    }

    /// Whether a worker has ended, which only a defect of ours, or the end of the caller's runtime, can make it do.
    pub(crate) fn has_dead(&mut self) -> bool {
        self.tasks.try_join_next().is_some()
    }
}

async fn work_on(queue: Arc<Queue>, work: Arc<Work>) {
    // A transaction for the next jobs, where one was begun in the same write as the last one's commit.
    let mut open: Option<Open> = None;
    loop {
        let mut next = pin!(queue.next(work.batch, work.budget.as_ref()));
        let next = match next.as_mut().now_or_never() {
            Some(next) => next,
            None => {
                // Nothing to do at once: a transaction must not wait for it.
                if let Some(open) = open.take() {
                    open.give_back().await;
                }
                next.await
            }
        };
        let Some((jobs, _permit)) = next else { return };
        let keys = queue.keys(&jobs);
        let (mut finished, left) = run(&queue, &work, jobs, open.take()).await;
        open = left;
        queue.ended(&mut finished, keys);
        // Nobody listens any more when the consumer is gone.
        let _ = work.finished.send(finished);
    }
}

/// Runs jobs together. A handler whose messages are lost is dropped.
async fn run(
    queue: &Queue,
    work: &Work,
    jobs: Vec<Job>,
    open: Option<Open>,
) -> (Vec<Finished>, Option<Open>) {
    let (over, jobs): (Vec<Job>, Vec<Job>) = jobs.into_iter().partition(|job| job.term.is_over());
    let mut finished: Vec<Finished> = over.iter().map(Job::place).map(cancelled).collect();
    let Some(over) = jobs.first().map(|job| job.term.over().clone()) else {
        return (finished, open);
    };
    let places: Vec<(Source, i64)> = jobs.iter().map(Job::place).collect();
    let lost = || places.iter().copied().map(cancelled);
    let more = queue.waiting() > 0;
    let mut left = None;
    tokio::select! {
        biased;
        (ended, open) = (work.runner)(jobs, open, more) => {
            finished.extend(ended);
            left = open;
        }
        () = async {
            over.cancelled().await;
            // The time it was promised for clearing up.
            tokio::time::sleep(queue.margin()).await;
        } => finished.extend(lost()),
    }
    (finished, left)
}

fn cancelled((source, id): (Source, i64)) -> Finished {
    Finished { source, id, verdict: Verdict::cancelled(), key: None }
}

impl Job {
    fn place(&self) -> (Source, i64) {
        (self.source, self.message.id)
    }
}

impl Queue {
    pub(crate) fn new(gate: Option<Gate>) -> Self {
        Self {
            gate,
            jobs: Mutex::default(),
            ready: Semaphore::new(0),
            paused: AtomicBool::new(false),
            resumed: Notify::new(),
            unfinished: AtomicUsize::new(0),
            margin: AtomicUsize::new(0),
        }
    }

    pub(crate) fn push(&self, jobs: impl IntoIterator<Item = Job>) {
        let mut queue = self.lock();
        let before = queue.len();
        jobs.into_iter().for_each(|job| queue.came.push_back(self.lane(&job), job));
        let added = queue.len() - before;
        drop(queue);
        self.unfinished.fetch_add(added, Ordering::Relaxed);
        self.ready.add_permits(added);
    }

    /// How many jobs no worker has taken yet.
    pub(crate) fn waiting(&self) -> usize {
        self.lock().len()
    }

    /// How many of them are in each lane.
    pub(crate) fn waiting_by_lane(&self) -> [usize; LANES] {
        self.lock().came.by_lane()
    }

    /// The lane in which a job waits: order by key is more than fairness.
    fn lane(&self, job: &Job) -> Option<i16> {
        job.message.lane.filter(|_| self.gate.is_none())
    }

    /// How many jobs are in the queue or with a worker.
    pub(crate) fn unfinished(&self) -> usize {
        self.unfinished.load(Ordering::Relaxed)
    }

    /// So many results were taken in.
    pub(crate) fn finished(&self, count: usize) {
        self.unfinished.fetch_sub(count, Ordering::Relaxed);
    }

    /// Takes jobs back that no worker has taken yet and that `keep` does not want.
    pub(crate) fn take_back(&self, mut keep: impl FnMut(&Job) -> bool) -> Vec<(Source, i64)> {
        // A permit whose job is gone lets a worker find an empty queue and wait again.
        let mut taken = Vec::new();
        let mut jobs = self.lock();
        jobs.retain(|job| {
            let kept = keep(job);
            if !kept {
                taken.push(job.place());
            }
            kept
        });
        if let Some(gate) = &self.gate {
            taken.extend(gate.clear_all().iter().map(Job::place));
        }
        drop(jobs);
        self.unfinished.fetch_sub(taken.len(), Ordering::Relaxed);
        taken
    }

    /// Which keys these jobs have, where that matters.
    fn keys(&self, jobs: &[Job]) -> Vec<(i64, String)> {
        let keyed = |job: &Job| Some((job.message.id, job.message.key.clone()?));
        self.gate.as_ref().map_or_else(Vec::new, |_| jobs.iter().filter_map(keyed).collect())
    }

    /// Jobs were run: the next ones of their keys may be, unless one is to be tried again.
    fn ended(&self, finished: &mut [Finished], keys: Vec<(i64, String)>) {
        let Some(gate) = &self.gate else { return };
        // Locked throughout: nobody may take a later message of a key in between.
        let mut queue = self.lock();
        let mut added = 0;
        for (id, key) in keys {
            let Some(finished) = finished.iter_mut().find(|f| f.id == id) else { continue };
            let again = !matches!(finished.verdict.outcome, "ok" | "dead");
            if let Some(next) = gate.ended(&key, again) {
                queue.waited.push_back(next);
                added += 1;
            }
            finished.key = Some(key);
        }
        drop(queue);
        self.ready.add_permits(added);
    }

    /// Takes away what waits of a key, in the queue or at the gate, and opens the gate for it.
    pub(crate) fn forget_key(&self, key: &str) {
        let Some(gate) = &self.gate else { return };
        let mut jobs = self.lock();
        let before = jobs.len();
        jobs.retain(|job| job.message.key.as_deref() != Some(key));
        let taken = before - jobs.len() + gate.clear(key).len();
        drop(jobs);
        self.unfinished.fetch_sub(taken, Ordering::Relaxed);
    }

    /// Opens the gate for a key whose last message was lost: what waits at it belongs to another holder.
    pub(crate) fn reopen(&self, key: &str) {
        let Some(gate) = &self.gate else { return };
        let mut queue = self.lock();
        let waiting = gate.clear(key);
        let added = waiting.len();
        waiting.into_iter().rev().for_each(|job| queue.came.push_front(None, job));
        drop(queue);
        self.ready.add_permits(added);
    }

    /// Takes the last jobs back, at most so many, that no worker has taken yet.
    pub(crate) fn take_last(&self, most: usize) -> Vec<(Source, i64)> {
        let mut jobs = self.lock();
        let taken = jobs.came.take_last(most, |job| job.message.id);
        let taken: Vec<_> = taken.iter().map(Job::place).collect();
        drop(jobs);
        self.unfinished.fetch_sub(taken.len(), Ordering::Relaxed);
        taken
    }

    /// While paused, nothing is taken from the queue; what runs goes on.
    pub(crate) fn pause(&self, paused: bool) {
        if self.paused.swap(paused, Ordering::AcqRel) && !paused {
            self.resumed.notify_waiters();
        }
    }

    pub(crate) fn set_margin(&self, margin: Duration) {
        self.margin
            .store(usize::try_from(margin.as_millis()).unwrap_or(usize::MAX), Ordering::Relaxed);
    }

    fn margin(&self) -> Duration {
        Duration::from_millis(self.margin.load(Ordering::Relaxed) as u64)
    }

    /// The next jobs, at least one and at most `most`, with a place in the budget. What waits for one does so in the queue,
    /// from where it can be taken back.
    async fn next(
        &self,
        most: usize,
        budget: Option<&Arc<Semaphore>>,
    ) -> Option<(Vec<Job>, Option<OwnedSemaphorePermit>)> {
        loop {
            self.ready.acquire().await.ok()?.forget();
            let permit = self.until_allowed(budget).await?;
            let mut queue = self.lock();
            let count = queue.len().min(most);
            if count == 0 {
                continue;
            }
            let mut jobs: Vec<Job> = std::iter::from_fn(|| queue.take()).take(count).collect();
            if self.gate.is_none() && count > 1 {
                // Of several lanes, but in order.
                jobs.sort_by_key(|job| job.message.lane.map(|_| job.message.id));
            }
            // Under the lock, or a key could be forgotten between the two.
            if let Some(gate) = &self.gate {
                jobs = jobs.into_iter().filter_map(|job| gate.admit(job)).collect();
            }
            drop(queue);
            if let Ok(more) = self.ready.try_acquire_many(count as u32 - 1) {
                more.forget();
            }
            if !jobs.is_empty() {
                return Some((jobs, permit));
            }
        }
    }

    /// Until the group is not paused and the budget has a place, which nobody keeps during a pause.
    async fn until_allowed(
        &self,
        budget: Option<&Arc<Semaphore>>,
    ) -> Option<Option<OwnedSemaphorePermit>> {
        loop {
            self.until_resumed().await;
            let Some(budget) = budget else { return Some(None) };
            let permit = budget.clone().acquire_owned().await.ok()?;
            if !self.paused.load(Ordering::Acquire) {
                return Some(Some(permit));
            }
        }
    }

    async fn until_resumed(&self) {
        loop {
            let resumed = self.resumed.notified();
            if !self.paused.load(Ordering::Acquire) {
                return;
            }
            resumed.await;
        }
    }

    /// Nothing panics while it holds the lock, and a queue of jobs is whole between any two calls.
    fn lock(&self) -> MutexGuard<'_, Jobs> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
