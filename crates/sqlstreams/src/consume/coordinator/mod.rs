//! The coordinator: decides what to ask the server next, and tells it what became of what it gave.
//!
//! One call at a time, in the order of [`Coordinator::step`]; between calls it waits for handlers to finish or for the
//! watcher to see something. Leases are kept beside it (keeper.rs).

mod exceptions;
mod hand_back;
mod ranges;

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::task::JoinHandle;
use uuid::Uuid;

use super::fairness::{ALL, Fairness};
use super::health::{Activity, Health};
use super::held::Source;
use super::keeper::{Holding, give_up};
use super::pace::Pace;
use super::protocol::Protocol;
use super::sieve::Sieve;
use super::straight::Straight;
use super::turns::LANES;
use super::workers::{Finished, Job, Queue, Workers};
use super::{Consumed, Settings, sleep_until};
use crate::backoff::Backoff;
use crate::error::{Error, ErrorKind, Result};
use crate::outcome::{Outcome, Verdict};
use crate::wake::{Seen, Watch};

/// How long news wait for more of them.
pub(super) const NEWS: Duration = Duration::from_millis(10);
/// The pause after a failed call, growing from the first to the second.
pub(super) const TROUBLE: (Duration, Duration) =
    (Duration::from_millis(100), Duration::from_secs(5));

pub(super) struct Coordinator {
    protocol: Protocol,
    settings: Settings,
    workers: Workers,
    queue: Arc<Queue>,
    results: mpsc::UnboundedReceiver<Vec<Finished>>,
    holding: Arc<Holding>,
    keeper: JoinHandle<()>,
    watch: Watch,
    health: Health,
    pace: Pace,
    sieve: Sieve,
    straight: Straight,
    fairness: Fairness,
    consumed: Consumed,
    /// What may be there to claim, as far as is known.
    seen: Seen,
    /// Exceptions and the log take turns.
    exceptions_next: bool,
    /// Exceptions are fetched one at a time: one of them could not be read.
    exceptions_one_by_one: bool,
    /// The group has a limit: others wait for what we finish.
    limited: bool,
    /// Until then the rate limit is used up.
    not_before: Instant,
    /// When what is new has to be told.
    news_due: Option<Instant>,
    /// Taken from `results`, not looked at yet.
    unabsorbed: Vec<Finished>,
    /// Claims whose answers were lost.
    orphans: Vec<Uuid>,
    /// Held while a suspect runs.
    suspect: Option<OwnedSemaphorePermit>,
    /// At which of the watcher's looks it was last asked whether everything is resolved.
    asked_at: u64,
}

/// What a coordinator works with.
pub(super) struct Parts {
    pub(super) protocol: Protocol,
    pub(super) settings: Settings,
    pub(super) workers: Workers,
    pub(super) queue: Arc<Queue>,
    pub(super) results: mpsc::UnboundedReceiver<Vec<Finished>>,
    pub(super) holding: Arc<Holding>,
    pub(super) keeper: JoinHandle<()>,
    pub(super) watch: Watch,
}

impl Drop for Coordinator {
    fn drop(&mut self) {
        self.keeper.abort();
    }
}

impl Coordinator {
    pub(super) fn new(parts: Parts) -> Self {
        let Parts { protocol, settings, workers, queue, results, holding, keeper, watch } = parts;
        let now = Instant::now();
        Self {
            pace: Pace::new(settings.concurrency * settings.batch_size, now),
            // Not nothing, if it has begun again.
            consumed: settings.health.snapshot().consumed,
            sieve: Sieve::new(),
            straight: Straight::default(),
            fairness: Fairness::new(),
            health: settings.health.clone(),
            protocol,
            settings,
            workers,
            queue,
            results,
            holding,
            keeper,
            watch,
            seen: Seen::ANYTHING,
            exceptions_next: true,
            exceptions_one_by_one: false,
            limited: false,
            not_before: now,
            news_due: None,
            unabsorbed: Vec::new(),
            orphans: Vec::new(),
            suspect: None,
            asked_at: 0,
        }
    }

    /// Works until stopped, or until everything up to `goal` is resolved; then lets handlers finish and hands back the rest.
    pub(super) async fn run(mut self, goal: Option<i64>) -> Result<Consumed> {
        let worked = self.work(goal).await;
        self.health.update(|health| health.activity = Activity::Stopping);
        let stopped = self.stop().await;
        self.show();
        worked.and(stopped).map(|()| self.consumed).map_err(|error| self.protocol.named(error))
    }

    async fn work(&mut self, goal: Option<i64>) -> Result<()> {
        let mut trouble = Backoff::new(TROUBLE);
        loop {
            self.absorb_all();
            self.show();
            if self.settings.stop.is_cancelled() {
                return Ok(());
            }
            if self.workers.has_dead() || self.keeper.is_finished() {
                return Err(Error::new(ErrorKind::Closed, "one of the consumer's tasks has ended"));
            }
            let result = match self.step().await {
                Ok(false) => self.is_caught_up(goal).await.map(|caught_up| (caught_up, false)),
                Ok(true) => Ok((false, true)),
                Err(error) => Err(error),
            };
            match result {
                Ok((true, _)) => return Ok(()),
                Ok((false, called)) => {
                    if called || trouble.has_begun() {
                        self.health.trouble(None);
                    }
                    trouble.reset();
                    if !called {
                        self.wait().await;
                    }
                }
                Err(error) if error.is_retryable() => {
                    let pause = trouble.pause();
                    tracing::warn!(
                        stream = self.protocol.stream.name,
                        error = &error as &dyn std::error::Error,
                        "a consumer's call failed; trying again in {pause:?}"
                    );
                    self.health.trouble(Some(error.to_string()));
                    self.pause(pause).await;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Makes the most urgent call, if any is to be made; says whether it made one.
    async fn step(&mut self) -> Result<bool> {
        #[cfg(test)]
        self.protocol.stream.client.inner.faults.strike(crate::supervision::Task::Coordinator);
        let now = Instant::now();
        let seen = self.watch.take();
        if seen.fresh {
            self.fairness.news();
        }
        self.seen.add(seen);
        let paused = self.watch.is_paused();
        self.queue.pause(paused);
        if self.hand_back_spent().await? {
            return Ok(true);
        }
        if self.hand_back_surplus().await? {
            return Ok(true);
        }
        if self.has_settled() && self.news_are_due(now) {
            self.settle_exceptions().await?;
            return Ok(true);
        }
        let (room, lanes) = self.room();
        let hungry = self.queue.waiting() < self.settings.concurrency * self.settings.batch_size;
        if hungry && self.fetch_exceptions().await? {
            return Ok(true);
        }
        let unfetched = self.holding.lock().unfetched(lanes);
        if room > 0
            && let Some((token, after, one_by_one)) = unfetched
        {
            self.fetch(token, after, if one_by_one { 1 } else { room }).await?;
            return Ok(true);
        }
        if let Some(orphan) = self.orphans.last() {
            self.protocol.release_claim(*orphan).await?;
            self.orphans.pop();
            return Ok(true);
        }
        let open = !paused && now >= self.not_before;
        if open && self.seen.suspect && self.may_take_suspect() {
            self.claim_exceptions(1, true, ALL).await?;
            return Ok(true);
        }
        // All there was has been read, if in parts; what comes is told of anew.
        self.seen.fresh &= self.fairness.has_unread(ALL);
        let fresh = self.seen.fresh && self.fairness.has_unread(lanes);
        let log = open && room > 0 && (fresh || self.seen.lapsed);
        let due = open && room > 0 && self.seen.due && (self.exceptions_next || !log);
        let news = self.holding.lock().has_news(self.limited) && self.news_are_due(now);
        // Where there is a limit, what was finished makes room first: for exceptions, or they would wait for the log to end,
        // and else for the next of the log.
        if due && !(self.limited && news) {
            self.claim_exceptions(room, false, lanes).await?;
            return Ok(true);
        }
        if log || news {
            let claim = !due && (log || open && self.limited);
            self.advance(if claim { room } else { 0 }, lanes).await?;
            return Ok(true);
        }
        Ok(false)
    }

    /// For how many messages there is room, and of which lanes. In a fair group what waits of a lane beyond its share leaves the room to
    /// the others: they would wait behind it. So less than three times as much as elsewhere is held, whatever comes.
    fn room(&self) -> (usize, i64) {
        let held = self.holding.lock();
        let messages = held.messages();
        let room = self.pace.room(messages, self.limited);
        if room > 0 || !self.fairness.is_fair() {
            return (room, ALL);
        }
        let mut waiting = self.queue.waiting_by_lane();
        for lane in held.unfetched_lanes() {
            waiting[lane as usize % LANES] += 1;
        }
        drop(held);
        let (mut full, mut beyond) = (0, 0);
        for (lane, waiting) in waiting.into_iter().enumerate() {
            if waiting > self.pace.share() {
                full |= 1 << lane;
                beyond += waiting - self.pace.share();
            }
        }
        let room = self.pace.room(messages.saturating_sub(beyond), self.limited);
        (if full == 0 { 0 } else { room }, !full)
    }

    /// A message that the server cannot hand out is a dead letter.
    fn bury(&mut self, source: Source, id: i64, error: &Error) {
        tracing::warn!(stream = self.protocol.stream.name, id, %error, "a message cannot be read");
        self.end(source, id, Outcome::Dead(format!("the message cannot be read: {error}")).into());
    }

    /// A message ends without having been run.
    fn end(&mut self, source: Source, id: i64, verdict: Verdict) {
        let counts = verdict.counts;
        if self.holding.lock().finished(source, id, verdict) {
            self.consumed.count(counts);
        }
        self.news_due.get_or_insert_with(Instant::now);
    }

    /// Hands messages to the workers.
    fn received(&mut self, jobs: impl ExactSizeIterator<Item = Job>) {
        let count = jobs.len();
        let mut bytes = 0;
        self.queue.push(jobs.inspect(|job| bytes += job.message.payload.bytes().len()));
        self.pace.received(count, bytes);
        if count > 0 {
            self.health.progress();
        }
    }

    /// Takes in what handlers have finished.
    fn absorb_all(&mut self) {
        let mut finished = std::mem::take(&mut self.unabsorbed);
        while let Ok(next) = self.results.try_recv() {
            finished.extend(next);
        }
        let now = Instant::now();
        self.queue.finished(finished.len());
        self.pace.finished(finished.len(), self.queue.waiting() == 0, now);
        if finished.is_empty() {
            return;
        }
        let mut held = self.holding.lock();
        for Finished { source, id, verdict, .. } in finished.drain(..) {
            let counts = verdict.counts;
            if held.finished(source, id, verdict) {
                self.consumed.count(counts);
            }
        }
        if !held.has_suspect() {
            self.suspect = None;
        }
        drop(held);
        self.unabsorbed = finished;
        if self.has_news() {
            self.news_due.get_or_insert(now + NEWS);
        }
    }

    fn has_settled(&self) -> bool {
        !self.holding.lock().settled().is_empty()
    }

    /// Whether there is something to tell the server: a finished lease, a failure, an exception that was run.
    fn has_news(&self) -> bool {
        let held = self.holding.lock();
        held.has_news(self.limited) || !held.settled().is_empty()
    }

    /// The server has heard some of it.
    fn told(&mut self) {
        self.health.progress();
        if !self.has_news() {
            self.news_due = None;
        }
    }

    /// News wait a moment for company, unless there is nothing else to do, or others wait for them.
    fn news_are_due(&self, now: Instant) -> bool {
        self.limited || self.queue.unfinished() == 0 || self.news_due.is_some_and(|due| now >= due)
    }

    fn give_up(&self, lost: usize) {
        give_up(&self.protocol, &self.holding, &self.queue, lost);
    }

    async fn is_caught_up(&mut self, goal: Option<i64>) -> Result<bool> {
        let Some(goal) = goal else { return Ok(false) };
        let looks = self.watch.looks();
        if looks == self.asked_at || self.seen != Seen::default() || !self.holding.lock().is_empty()
        {
            return Ok(false);
        }
        self.asked_at = looks;
        self.protocol.is_resolved(goal).await
    }

    /// Waits for whatever comes first.
    async fn wait(&mut self) {
        let until = [self.news_due, Some(self.not_before).filter(|at| *at > Instant::now())];
        let until = until.into_iter().flatten().min();
        tokio::select! {
            biased;
            () = self.settings.stop.cancelled() => {}
            Some(finished) = self.results.recv() => self.unabsorbed.extend(finished),
            () = self.watch.news() => {}
            () = self.holding.changed.notified() => {}
            _ = &mut self.keeper => {}
            () = sleep_until(until) => {}
        }
    }

    /// Waits out trouble; handlers go on meanwhile.
    async fn pause(&mut self, pause: Duration) {
        tokio::select! {
            () = self.settings.stop.cancelled() => {}
            () = tokio::time::sleep(pause) => {}
        }
    }

    /// Shows how things stand.
    fn show(&self) {
        let (held, abandoned) = {
            let held = self.holding.lock();
            (held.messages(), held.abandoned())
        };
        let in_flight = self.queue.unfinished().saturating_sub(self.queue.waiting());
        let watcher = &self.protocol.stream.client.inner.watcher;
        let listening = watcher.life().borrow().is_some();
        let paused = self.watch.is_paused();
        self.health.update(|health| {
            (health.held, health.in_flight, health.abandoned) = (held, in_flight, abandoned);
            (health.consumed, health.listening) = (self.consumed, listening);
            if matches!(health.activity, Activity::Starting | Activity::Claiming | Activity::Paused)
            {
                health.activity = if paused { Activity::Paused } else { Activity::Claiming };
            }
        });
    }
}
