//! The workers: as many tasks as handlers may run at once, fed from one queue. They live on the caller's runtime.

use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

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
    jobs: Mutex<Turns<Job>>,
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

/// In an ordered group, where a message stands that waited for one of its key to end: beside those that stand as they came, so
/// that a key of which many wait leaves every second place to the others.
const WAITED: i16 = 0;

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
    let mut results = Results::new(&work.finished);
    loop {
        let mut next = pin!(queue.next(work.batch, work.budget.as_ref()));
        let next = match next.as_mut().now_or_never() {
            Some(next) => next,
            None => {
                results.send();
                // Nothing to do at once: a transaction must not wait for it.
                if let Some(open) = open.take() {
                    open.give_back().await;
                }
                next.await
            }
        };
        let Some((jobs, _permit)) = next else { return };
        let keys = queue.keys(&jobs);
        let begun = Instant::now();
        let mut running = pin!(run(&queue, &work, jobs, open.take()));
        let (mut finished, left) = match running.as_mut().now_or_never() {
            Some(ended) => ended,
            None => {
                results.send();
                running.await
            }
        };
        open = left;
        // A key goes on when it is known that its message has ended: the next one's failure must not be heard of before.
        let going_on = queue.shut(&mut finished, keys);
        results.add(finished, begun);
        if queue.gate.is_some() {
            results.send();
        }
        queue.go_on(&going_on);
    }
}

/// What has ended and was not told yet: of handlers that end at once some together, since whoever is told of each by itself does
/// nothing but wake up. Empty whenever its worker waits for anything, so that it is neither late nor lost with it.
struct Results<'a> {
    to: &'a mpsc::UnboundedSender<Vec<Finished>>,
    ended: Vec<Finished>,
    /// When the first of their handlers was called.
    since: Instant,
}

impl<'a> Results<'a> {
    /// So many are told together at most.
    const MOST: usize = 64;
    /// So long ago the first of their handlers may have been called.
    const LONGEST: Duration = Duration::from_millis(1);

    fn new(to: &'a mpsc::UnboundedSender<Vec<Finished>>) -> Self {
        Self { to, ended: Vec::new(), since: Instant::now() }
    }

    fn add(&mut self, finished: Vec<Finished>, begun: Instant) {
        if self.ended.is_empty() {
            (self.ended, self.since) = (finished, begun);
        } else {
            self.ended.extend(finished);
        }
        if self.ended.len() >= Self::MOST || self.since.elapsed() >= Self::LONGEST {
            self.send();
        }
    }

    fn send(&mut self) {
        if !self.ended.is_empty() {
            // Nobody listens any more when the consumer is gone.
            let _ = self.to.send(std::mem::take(&mut self.ended));
        }
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
    let Some(term) = jobs.first().map(|job| job.term.clone()) else {
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
            term.over().cancelled().await;
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
            jobs: Mutex::new(Turns::default()),
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
        jobs.into_iter().for_each(|job| queue.push_back(self.lane(&job), job));
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
        self.lock().by_lane()
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

    /// Jobs were run: keys of which one is to be tried again are shut. Returns the others.
    fn shut(&self, finished: &mut [Finished], keys: Vec<(i64, String)>) -> Vec<String> {
        let Some(gate) = &self.gate else { return Vec::new() };
        let mut going_on = Vec::with_capacity(keys.len());
        for (id, key) in keys {
            let Some(finished) = finished.iter_mut().find(|f| f.id == id) else { continue };
            finished.key = Some(key.clone());
            match finished.verdict.outcome {
                "ok" | "dead" => going_on.push(key),
                _ => gate.shut(&key),
            }
        }
        going_on
    }

    /// The next messages of these keys may be run.
    fn go_on(&self, keys: &[String]) {
        let Some(gate) = &self.gate else { return };
        // Locked throughout: nobody may take a later message of a key in between.
        let mut queue = self.lock();
        let mut added = 0;
        for next in keys.iter().filter_map(|key| gate.ended(key)) {
            queue.push_back(Some(WAITED), next);
            added += 1;
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
        waiting.into_iter().rev().for_each(|job| queue.push_front(None, job));
        drop(queue);
        self.ready.add_permits(added);
    }

    /// Takes the last jobs back, at most so many, that no worker has taken yet.
    pub(crate) fn take_last(&self, most: usize) -> Vec<(Source, i64)> {
        let mut jobs = self.lock();
        let taken: Vec<_> =
            jobs.take_last(most, |job| job.message.id).iter().map(Job::place).collect();
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
            let mut jobs = queue.take(count);
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
    fn lock(&self) -> MutexGuard<'_, Turns<Job>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
