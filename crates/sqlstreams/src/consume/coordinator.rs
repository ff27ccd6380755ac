//! The coordinator: decides what to ask the server next, and tells it what became of what it gave.
//!
//! One call at a time, in the order of [`Coordinator::step`]; between calls it waits for handlers to finish or for the
//! watcher to see something. Leases are kept beside it (keeper.rs).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::task::JoinHandle;
use uuid::Uuid;

use super::delivery::History;
use super::health::{Activity, Health};
use super::held::Source;
use super::keeper::{Holding, take_back};
use super::pace::Pace;
use super::protocol::{Page, Protocol};
use super::workers::{Finished, Job, Queue, Workers};
use super::{Consumed, Settings};
use crate::error::{Error, ErrorKind, Result};
use crate::outcome::{Outcome, Verdict};
use crate::partitions;
use crate::wake::{Seen, Watch, jittered};

/// How long news wait for more of them.
const NEWS: Duration = Duration::from_millis(10);
/// The pause after a failed call, growing from the first to the second.
pub(super) const TROUBLE: (Duration, Duration) =
    (Duration::from_millis(100), Duration::from_secs(5));
/// Longer than anything runs.
const FOREVER: Duration = Duration::from_secs(86_400 * 365);
/// The most exceptions claimed at once.
const MOST_EXCEPTIONS: usize = 500;

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
            health: settings.health.clone(),
            protocol,
            settings,
            workers,
            queue,
            results,
            holding,
            keeper,
            watch,
            consumed: Consumed::default(),
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
        worked.and(stopped).map(|()| self.consumed).map_err(|error| self.named(error))
    }

    async fn work(&mut self, goal: Option<i64>) -> Result<()> {
        let mut trouble = TROUBLE.0;
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
                    if called || trouble > TROUBLE.0 {
                        self.health.trouble(None);
                    }
                    trouble = TROUBLE.0;
                    if !called {
                        self.wait().await;
                    }
                }
                Err(error) if error.is_retryable() => {
                    tracing::warn!(
                        stream = self.protocol.stream.name,
                        error = &error as &dyn std::error::Error,
                        "a consumer's call failed; trying again in {trouble:?}"
                    );
                    self.health.trouble(Some(error.to_string()));
                    self.pause(jittered(trouble)).await;
                    trouble = (trouble * 2).min(TROUBLE.1);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Makes the most urgent call, if any is to be made; says whether it made one.
    async fn step(&mut self) -> Result<bool> {
        let now = Instant::now();
        self.seen.add(self.watch.take());
        let paused = self.watch.is_paused();
        self.queue.pause(paused);
        if self.hand_back_spent().await? {
            return Ok(true);
        }
        if self.has_settled() && self.news_are_due(now) {
            self.settle_exceptions().await?;
            return Ok(true);
        }
        let room = self.pace.room(self.holding.lock().messages(), self.limited);
        let hungry = self.queue.waiting() < self.settings.concurrency * self.settings.batch_size;
        if hungry && self.fetch_exceptions().await? {
            return Ok(true);
        }
        let unfetched = self.holding.lock().unfetched();
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
            self.claim_exceptions(1, true).await?;
            return Ok(true);
        }
        let log = open && room > 0 && (self.seen.fresh || self.seen.lapsed);
        let due = open && room > 0 && self.seen.due && (self.exceptions_next || !log);
        let news = self.holding.lock().has_news(self.limited) && self.news_are_due(now);
        // Where there is a limit, what was finished makes room first: for exceptions, or they would wait for the log to end,
        // and else for the next of the log.
        if due && !(self.limited && news) {
            self.claim_exceptions(room.min(MOST_EXCEPTIONS), false).await?;
            return Ok(true);
        }
        if log || news {
            let claim = !due && (log || open && self.limited);
            self.advance(if claim { room } else { 0 }).await?;
            return Ok(true);
        }
        Ok(false)
    }

    async fn advance(&mut self, limit: usize) -> Result<()> {
        let reports = self.holding.lock().news(self.limited);
        let token = Uuid::new_v4();
        let (sent, bytes) = (Instant::now(), self.pace.fetch_bytes());
        let advanced = self.protocol.advance(&reports, token, limit as i64, bytes).await;
        let advanced = self.unless_orphaned(token, advanced, limit > 0)?;
        self.exceptions_next = true;
        self.limited = advanced.limited;
        self.watch.set_paused(advanced.paused);
        self.not_before = advanced.wait.map_or(self.not_before, |wait| sent + wait);
        let lost = self.holding.lock().reported(&reports, &advanced.lost);
        self.give_up(lost);
        self.told();
        match advanced.claimed {
            Some(claimed) => {
                let (first, last) = (claimed.pending.first(), claimed.pending.last());
                // Producers of other kinds may not look after partitions.
                if let Some(last) = last {
                    partitions::look_after(&self.protocol.stream, last);
                }
                // Short of what was asked for: that may have been all. The watcher looks again soon, which locks nothing.
                let short =
                    last.zip(first).is_none_or(|(last, first)| last - first + 1 < limit as i64);
                if short && !self.limited {
                    self.seen.fresh = false;
                }
                self.watch.claimed(last, short);
                self.holding.lock().claimed(claimed, sent);
                self.holding.grown();
                self.fetched(token, limit, advanced.page)?;
            }
            None if limit > 0 && advanced.wait.is_none() => {
                self.watch.claimed_nothing();
                (self.seen.fresh, self.seen.lapsed) = (false, false);
            }
            None => {}
        }
        Ok(())
    }

    /// A claim that may have been made without our learning of it is handed back as soon as that can be said.
    fn unless_orphaned<R>(&mut self, token: Uuid, answer: Result<R>, claiming: bool) -> Result<R> {
        if claiming && answer.as_ref().is_err_and(|e| e.kind() == ErrorKind::Connection) {
            self.orphans.push(token);
        }
        answer
    }

    /// Fetches messages of a lease.
    async fn fetch(&mut self, token: Uuid, after: i64, limit: usize) -> Result<()> {
        let bytes = self.pace.fetch_bytes();
        match self.protocol.fetch(token, after, limit as i64, bytes).await {
            Err(error) if limit == 1 && error.may_be_a_message() => {
                let id = self.protocol.next_id(token, after).await?;
                self.holding.lock().fetched(token, id, id.is_some());
                if let Some(id) = id {
                    self.bury(Source::Lease(token), id, &error);
                }
                Ok(())
            }
            page => self.fetched(token, limit, page),
        }
    }

    /// Takes in what a fetch for a lease brought. Where one message keeps all from being read, they are read one by one.
    fn fetched(&mut self, token: Uuid, limit: usize, page: Result<Page>) -> Result<()> {
        match page {
            Ok(page) => {
                let ids = page.messages.iter().map(|m| m.id);
                let over = self.holding.lock().fetched(token, ids, page.more);
                if let Some(over) = over {
                    let source = Source::Lease(token);
                    self.received(page.messages.into_iter().map(|message| Job {
                        source,
                        message,
                        history: History::default(),
                        over: over.clone(),
                    }));
                }
                Ok(())
            }
            Err(error) if limit > 1 && error.may_be_a_message() => {
                self.holding.lock().fetch_one_by_one(token);
                Ok(())
            }
            // The claim stands: what it holds is fetched by itself, after a pause.
            Err(error) => Err(error),
        }
    }

    /// Fetches messages of claimed exceptions, if there are any to fetch.
    async fn fetch_exceptions(&mut self) -> Result<bool> {
        let mut ids = self.holding.lock().unfetched_exceptions();
        if ids.is_empty() {
            self.exceptions_one_by_one = false;
            return Ok(false);
        }
        if self.exceptions_one_by_one {
            ids.truncate(1);
        }
        let page = match self.protocol.fetch_messages(&ids, self.pace.fetch_bytes()).await {
            Ok(page) => page,
            Err(error) if error.may_be_a_message() => {
                match ids.as_slice() {
                    &[id] => {
                        let retry = self.holding.lock().fetched_exception(id);
                        if let Some(retry) = retry {
                            self.bury(retry.source, id, &error);
                        }
                    }
                    _ => self.exceptions_one_by_one = true,
                }
                return Ok(true);
            }
            Err(error) => return Err(error),
        };
        // Up to here the page is complete: an id that is not on it has no message any more.
        let complete_to = match page.messages.last() {
            Some(last) if page.more => last.id,
            _ => i64::MAX,
        };
        let found: BTreeSet<i64> = page.messages.iter().map(|m| m.id).collect();
        for id in ids.into_iter().filter(|id| *id <= complete_to && !found.contains(id)) {
            let retry = self.holding.lock().fetched_exception(id);
            if let Some(retry) = retry {
                let gone = Outcome::Dead("the message is no longer in the log".to_owned());
                self.end(retry.source, id, gone.into());
            }
        }
        let mut jobs = Vec::with_capacity(page.messages.len());
        for message in page.messages {
            if let Some(retry) = self.holding.lock().fetched_exception(message.id) {
                let history = History {
                    attempts: u32::try_from(retry.attempts).unwrap_or(0),
                    delays: u32::try_from(retry.delays).unwrap_or(0),
                    first_failed_at: Some(retry.first_failed_at),
                };
                jobs.push(Job { source: retry.source, message, history, over: retry.over });
            }
        }
        self.received(jobs.into_iter());
        Ok(true)
    }

    /// A message that the server cannot hand out is a dead letter.
    fn bury(&mut self, source: Source, id: i64, error: &Error) {
        tracing::warn!(stream = self.protocol.stream.name, id, %error, "a message cannot be read");
        self.end(source, id, Outcome::Dead(format!("the message cannot be read: {error}")).into());
    }

    /// A message ends without having been run.
    fn end(&mut self, source: Source, id: i64, verdict: Verdict) {
        let outcome = verdict.outcome;
        if self.holding.lock().finished(source, id, verdict) {
            self.consumed.count(outcome);
        }
        self.news_due.get_or_insert_with(Instant::now);
    }

    /// One suspect at a time in the whole process.
    fn may_take_suspect(&mut self) -> bool {
        if self.suspect.is_some() {
            return false;
        }
        let suspects = &self.protocol.stream.client.inner.suspects;
        self.suspect = suspects.clone().try_acquire_owned().ok();
        self.suspect.is_some()
    }

    async fn claim_exceptions(&mut self, limit: usize, suspect: bool) -> Result<()> {
        let token = Uuid::new_v4();
        // Suspects are few, and may have waited for long.
        let due_from = if suspect { None } else { self.watch.due_from() };
        let sent = Instant::now();
        let claimed = self.protocol.take_exceptions(token, limit as i64, suspect, due_from).await;
        if suspect {
            // Unless one is held, which is seen to below.
            let permit = self.suspect.take();
            if claimed.as_ref().is_ok_and(|claimed| !claimed.exceptions.is_empty()) {
                self.suspect = permit;
            }
        }
        let claimed = self.unless_orphaned(token, claimed, true)?;
        self.exceptions_next = false;
        if suspect {
            // Where one was, more may be: the next is asked for as soon as this one has ended, not at the next look.
            self.seen.suspect = !claimed.exceptions.is_empty();
        } else {
            // A limit may have allowed some of many.
            let some = self.limited && !claimed.exceptions.is_empty();
            self.seen.due = claimed.exceptions.len() == limit || some;
            self.watch.claimed_exceptions(claimed.earliest_due);
        }
        if !claimed.exceptions.is_empty() {
            self.watch.claimed(None, !self.seen.due);
            self.holding.lock().claimed_exceptions(
                token,
                claimed.exceptions,
                suspect,
                claimed.lease_duration,
                sent,
            );
            self.holding.grown();
        }
        Ok(())
    }

    async fn settle_exceptions(&mut self) -> Result<()> {
        let reports = self.holding.lock().settled().to_vec();
        let lost = self.protocol.settle_exceptions(&reports).await?;
        self.holding.lock().settled_reported(reports.len());
        self.told();
        if !lost.is_empty() {
            tracing::warn!(stream = self.protocol.stream.name, messages = ?lost, "leases were lost before these exceptions were settled; they will be tried again");
        }
        Ok(())
    }

    /// Hands back what will not be run here any more.
    async fn hand_back_spent(&mut self) -> Result<bool> {
        let (spent, left) = {
            let held = self.holding.lock();
            (held.spent(), held.left_exceptions())
        };
        if !spent.is_empty() {
            self.protocol.release(&spent).await?;
            let tokens: Vec<Uuid> = spent.iter().map(|r| r.token).collect();
            self.holding.lock().reported(&spent, &tokens);
        }
        if !left.is_empty() {
            self.protocol.release_exceptions(&left).await?;
            let ids: Vec<i64> = left.iter().map(|(_, id)| *id).collect();
            self.holding.lock().lost_exceptions(&ids);
        }
        Ok(!spent.is_empty() || !left.is_empty())
    }

    /// Hands messages to the workers.
    fn received(&mut self, jobs: impl ExactSizeIterator<Item = Job>) {
        let count = jobs.len();
        let mut bytes = 0;
        self.queue.push(jobs.inspect(|job| bytes += job.message.payload.len()));
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
        if finished.is_empty() {
            return;
        }
        let now = Instant::now();
        self.queue.finished(finished.len());
        self.pace.finished(finished.len(), self.queue.waiting() == 0, now);
        let mut held = self.holding.lock();
        for Finished { source, id, verdict } in finished.drain(..) {
            let outcome = verdict.outcome;
            if held.finished(source, id, verdict) {
                self.consumed.count(outcome);
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

    /// Leases were lost: what of them has not started shall not.
    fn give_up(&mut self, lost: usize) {
        if lost > 0 {
            tracing::warn!(
                stream = self.protocol.stream.name,
                lost,
                "leases were lost: another consumer handles what was left of them"
            );
            take_back(&self.holding, &self.queue);
        }
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
            () = async {
                match until {
                    Some(until) => tokio::time::sleep_until(until.into()).await,
                    None => std::future::pending().await,
                }
            } => {}
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

    /// The error in the user's words: the database knows streams and groups by number.
    fn named(&self, error: Error) -> Error {
        let stream = crate::name::shorten(&self.protocol.stream.name);
        let (kind, what) = match (error.kind(), error.sql_state()) {
            (ErrorKind::UnknownGroup, _) => {
                (ErrorKind::UnknownGroup, format!("the group was dropped from stream {stream}"))
            }
            (ErrorKind::UnknownStream, _) | (ErrorKind::SchemaMissing, Some("42P01")) => {
                (ErrorKind::UnknownStream, format!("stream {stream} was dropped"))
            }
            _ => return error,
        };
        Error::new(kind, format!("{what} while it was being consumed")).with_source(error)
    }

    /// Lets running handlers finish, then hands back what is left.
    async fn stop(&mut self) -> Result<()> {
        let taken = self.queue.take_back(|_| false);
        {
            let mut held = self.holding.lock();
            for (source, id) in taken {
                held.leave(source, id);
            }
        }
        let now = Instant::now();
        let deadline = now.checked_add(self.settings.shutdown_timeout).unwrap_or(now + FOREVER);
        let abort = self.settings.abort.clone();
        self.absorb_all();
        while self.queue.unfinished() > 0 && Instant::now() < deadline && !abort.is_cancelled() {
            self.show();
            tokio::select! {
                Some(finished) = self.results.recv() => self.unabsorbed.extend(finished),
                () = abort.cancelled() => {}
                () = tokio::time::sleep_until(deadline.into()) => {}
            }
            self.absorb_all();
        }
        let running = self.queue.unfinished();
        if running > 0 && !abort.is_cancelled() {
            tracing::warn!(
                stream = self.protocol.stream.name,
                handlers = running,
                "handlers did not finish in time; their messages are handed back"
            );
        }
        self.workers.abort().await;
        self.absorb_all();
        let last_try = Instant::now() + TROUBLE.1;
        loop {
            match self.hand_back().await {
                Err(error) if error.is_retryable() && Instant::now() < last_try => {
                    tokio::time::sleep(jittered(TROUBLE.0 * 2)).await;
                }
                result => return result,
            }
        }
    }

    async fn hand_back(&mut self) -> Result<()> {
        if self.has_settled() {
            self.settle_exceptions().await?;
        }
        if self.holding.lock().has_news(false) {
            self.advance(0).await?;
        }
        while let Some(orphan) = self.orphans.last() {
            self.protocol.release_claim(*orphan).await?;
            self.orphans.pop();
        }
        let reports = self.holding.lock().last_words();
        if !reports.is_empty() {
            self.protocol.release(&reports).await?;
            let tokens: Vec<Uuid> = reports.iter().map(|r| r.token).collect();
            self.holding.lock().reported(&reports, &tokens);
        }
        let exceptions = self.holding.lock().exceptions();
        if !exceptions.is_empty() {
            self.protocol.release_exceptions(&exceptions).await?;
            let ids: Vec<i64> = exceptions.iter().map(|(_, id)| *id).collect();
            self.holding.lock().lost_exceptions(&ids);
        }
        Ok(())
    }
}
