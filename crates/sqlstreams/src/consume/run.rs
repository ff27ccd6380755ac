//! The coordinator: decides what to ask the server next, and tells it what became of what it gave.
//!
//! One call at a time, in the order of [`Coordinator::step`]; between calls it waits for handlers to finish, for the next
//! poll or for the next heartbeat, whichever comes first.

use std::collections::BTreeSet;
use std::future::Future;
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::mpsc;
use uuid::Uuid;

use super::held::{Held, Source};
use super::pace::Pace;
use super::protocol::{Page, Protocol, Seen};
use super::workers::{Finished, Job, Workers};
use super::{Consumed, Settings};
use crate::error::{Error, ErrorKind, Result};
use crate::message::{Message, RawMessage};
use crate::name::shorten;
use crate::outcome::{IntoOutcome, Outcome, Verdict};
use crate::partitions;
use crate::payload::Codec;

/// The pause between two polls of an idle group, growing from the first to the second.
const POLL: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(500));
/// How often a busy consumer looks for exceptions that have come due.
const BUSY_POLL: Duration = Duration::from_millis(100);
/// How long news wait for more of them.
const NEWS: Duration = Duration::from_millis(20);
/// The pause after a failed call, growing from the first to the second.
const TROUBLE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// The most exceptions claimed at once.
const MOST_EXCEPTIONS: usize = 500;
/// How often exceptions are looked for without a lower bound on their due time; see `take_exceptions` in the SQL.
const UNBOUNDED: Duration = Duration::from_secs(5);

pub(super) async fn run<T, C, H, F>(
    protocol: Protocol,
    settings: Settings,
    handler: H,
    until_caught_up: bool,
) -> Result<Consumed>
where
    T: Send + 'static,
    C: Codec<T>,
    H: Fn(Message<T>) -> F + Send + Sync + 'static,
    F: Future<Output: IntoOutcome> + Send + 'static,
{
    let now = Instant::now();
    let goal = if until_caught_up { Some(protocol.head().await?) } else { None };
    let (workers, results) =
        Workers::start::<T, C, H, F>(settings.concurrency, settings.timeout, handler);
    let mut coordinator = Coordinator {
        protocol,
        pace: Pace::new(settings.concurrency, now),
        settings,
        workers,
        results,
        held: Held::default(),
        running: 0,
        consumed: Consumed::default(),
        seen: Seen { fresh: true, lapsed: true, due: true, suspect: true },
        exceptions_next: true,
        exceptions_one_by_one: false,
        due_from: DueFrom { bound: None, unbounded_at: now },
        news_due: None,
        unabsorbed: Vec::new(),
        next_poll: now,
        poll_pause: POLL.0,
        // Until the server says otherwise.
        lease_duration: Duration::from_secs(1),
        next_heartbeat: now,
    };
    let worked = coordinator.work(goal).await;
    let stopped = coordinator.stop().await;
    match worked.and(stopped) {
        Ok(()) => Ok(coordinator.consumed),
        Err(error) => Err(coordinator.named(error)),
    }
}

struct Coordinator {
    protocol: Protocol,
    settings: Settings,
    workers: Workers,
    results: mpsc::UnboundedReceiver<Finished>,
    held: Held,
    pace: Pace,
    /// Jobs that are queued or run.
    running: usize,
    consumed: Consumed,
    /// What may be there to claim, as far as is known.
    seen: Seen,
    /// Exceptions and the log take turns.
    exceptions_next: bool,
    /// Exceptions are fetched one at a time: one of them could not be read.
    exceptions_one_by_one: bool,
    due_from: DueFrom,
    /// When what is new has to be told.
    news_due: Option<Instant>,
    /// Taken from `results`, not looked at yet.
    unabsorbed: Vec<Finished>,
    next_poll: Instant,
    poll_pause: Duration,
    lease_duration: Duration,
    next_heartbeat: Instant,
}

/// The lower bound for looking at due exceptions.
struct DueFrom {
    bound: Option<SystemTime>,
    unbounded_at: Instant,
}

impl Coordinator {
    /// Works until stopped, or until everything up to `goal` is resolved.
    async fn work(&mut self, goal: Option<i64>) -> Result<()> {
        let mut trouble = TROUBLE.0;
        loop {
            self.absorb_all();
            if self.settings.stop.is_cancelled() {
                return Ok(());
            }
            if self.workers.has_dead() {
                return Err(Error::new(ErrorKind::Closed, "a worker task has ended"));
            }
            let result = match self.step().await {
                Ok(false) => self.is_caught_up(goal).await,
                Ok(true) => {
                    trouble = TROUBLE.0;
                    continue;
                }
                Err(error) => Err(error),
            };
            match result {
                Ok(true) => return Ok(()),
                Ok(false) => {
                    trouble = TROUBLE.0;
                    self.wait().await;
                }
                Err(error) if error.is_retryable() => {
                    tracing::warn!(
                        stream = self.protocol.stream.name,
                        error = &error as &dyn std::error::Error,
                        "a consumer's call failed; trying again in {trouble:?}"
                    );
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
        if now >= self.next_heartbeat && !self.held.is_empty() {
            self.heartbeat().await?;
            return Ok(true);
        }
        if !self.held.settled().is_empty() && self.news_are_due(now) {
            self.settle_exceptions().await?;
            return Ok(true);
        }
        let room = self.pace.room(self.held.messages());
        let hungry = self.workers.waiting() < self.settings.concurrency;
        if hungry && self.fetch_exceptions().await? {
            return Ok(true);
        }
        if room > 0
            && let Some((token, after, one_by_one)) = self.held.unfetched()
        {
            self.fetch(token, after, if one_by_one { 1 } else { room }).await?;
            return Ok(true);
        }
        if self.seen.suspect && !self.held.has_suspect() {
            self.claim_exceptions(1, true).await?;
            return Ok(true);
        }
        let log = self.seen.fresh || self.seen.lapsed;
        if room > 0 && self.seen.due && (self.exceptions_next || !log) {
            self.claim_exceptions(room.min(MOST_EXCEPTIONS), false).await?;
            return Ok(true);
        }
        // Also while there is a backlog, or what failed would wait for its end.
        if room > 0 && now >= self.next_poll {
            self.seen = self.protocol.poll(self.due_from.now()).await?;
            let anything = self.seen != Seen::default();
            let pause = if anything { BUSY_POLL } else { jittered(self.poll_pause) };
            self.next_poll = Instant::now() + pause;
            self.poll_pause = (self.poll_pause * 3 / 2).min(POLL.1);
            return Ok(anything);
        }
        if room > 0 && log || self.held.has_news() && self.news_are_due(now) {
            self.advance(if log { room } else { 0 }).await?;
            return Ok(true);
        }
        Ok(false)
    }

    async fn advance(&mut self, limit: usize) -> Result<()> {
        let reports = self.held.news();
        let advanced =
            self.protocol.advance(&reports, limit as i64, self.pace.fetch_bytes()).await?;
        self.exceptions_next = true;
        self.lease_duration = advanced.lease_duration;
        let lost = self.held.reported(&reports, &advanced.lost);
        self.give_up(lost);
        self.told();
        let now = Instant::now();
        match advanced.claimed {
            Some(claimed) => {
                self.poll_pause = POLL.0;
                let token = claimed.token;
                // Producers of other kinds may not look after partitions.
                if let Some(last) = claimed.pending.last() {
                    partitions::look_after(&self.protocol.stream, last);
                }
                // Short of what was asked for: that may have been all. Ask again by a poll, which locks nothing.
                let short = claimed
                    .pending
                    .last()
                    .zip(claimed.pending.first())
                    .is_none_or(|(last, first)| last - first + 1 < limit as i64);
                if short {
                    self.seen.fresh = false;
                    self.next_poll = now;
                }
                self.held_more(now);
                self.held.claimed(claimed);
                self.fetched(token, limit, advanced.page)?;
            }
            None if limit > 0 => {
                (self.seen.fresh, self.seen.lapsed) = (false, false);
                self.next_poll = now + jittered(self.poll_pause);
            }
            None => {}
        }
        Ok(())
    }

    /// Fetches messages of a lease.
    async fn fetch(&mut self, token: Uuid, after: i64, limit: usize) -> Result<()> {
        let bytes = self.pace.fetch_bytes();
        match self.protocol.fetch(token, after, limit as i64, bytes).await {
            Err(error) if limit == 1 && error.may_be_a_message() => {
                let id = self.protocol.next_id(token, after).await?;
                self.held.fetched(token, id, id.is_some());
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
                self.held.fetched(token, page.messages.iter().map(|m| m.id), page.more);
                self.received(Source::Lease(token), page.messages);
                Ok(())
            }
            Err(error) if limit > 1 && error.may_be_a_message() => {
                self.held.fetch_one_by_one(token);
                Ok(())
            }
            // The claim stands: what it holds is fetched by itself, after a pause.
            Err(error) => Err(error),
        }
    }

    /// Fetches messages of claimed exceptions, if there are any to fetch.
    async fn fetch_exceptions(&mut self) -> Result<bool> {
        let mut ids = self.held.unfetched_exceptions();
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
                        if let Some((source, _)) = self.held.fetched_exception(id) {
                            self.bury(source, id, &error);
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
            if let Some((source, _)) = self.held.fetched_exception(id) {
                let gone = Outcome::Dead("the message is no longer in the log".to_owned());
                self.end(source, id, gone.into());
            }
        }
        for mut message in page.messages {
            if let Some((source, attempts)) = self.held.fetched_exception(message.id) {
                message.attempts = attempts;
                self.received(source, vec![message]);
            }
        }
        Ok(true)
    }

    /// A message that the server cannot hand out is a dead letter.
    fn bury(&mut self, source: Source, id: i64, error: &Error) {
        tracing::warn!(stream = self.protocol.stream.name, id, %error, "a message cannot be read");
        self.end(source, id, Outcome::Dead(format!("the message cannot be read: {error}")).into());
    }

    /// A message ends without having been run.
    fn end(&mut self, source: Source, id: i64, verdict: Verdict) {
        self.count(&verdict);
        self.held.finished(source, id, verdict);
        self.news_due.get_or_insert_with(Instant::now);
    }

    async fn claim_exceptions(&mut self, limit: usize, suspect: bool) -> Result<()> {
        let token = Uuid::new_v4();
        // Suspects are few, and may have waited for long.
        let due_from = if suspect { None } else { self.due_from.now() };
        let claimed = self.protocol.take_exceptions(token, limit as i64, suspect, due_from).await?;
        self.exceptions_next = false;
        if suspect {
            // Where one was, more may be: the next is asked for as soon as this one has ended, not at the next poll.
            self.seen.suspect = !claimed.exceptions.is_empty();
        } else {
            self.seen.due = claimed.exceptions.len() == limit;
            self.due_from.claimed(claimed.earliest_due);
        }
        if claimed.exceptions.is_empty() {
            return Ok(());
        }
        self.poll_pause = POLL.0;
        self.lease_duration = claimed.lease_duration;
        self.held_more(Instant::now());
        self.held.claimed_exceptions(token, claimed.exceptions, suspect);
        Ok(())
    }

    async fn settle_exceptions(&mut self) -> Result<()> {
        let count = self.held.settled().len();
        let lost = self.protocol.settle_exceptions(self.held.settled()).await?;
        self.held.settled_reported(count);
        self.told();
        if !lost.is_empty() {
            tracing::warn!(stream = self.protocol.stream.name, messages = ?lost, "leases were lost before these exceptions were settled; they will be tried again");
        }
        Ok(())
    }

    /// Keeps everything that is held for another while, and tells what of it is finished.
    async fn heartbeat(&mut self) -> Result<()> {
        if self.held.has_leases() {
            // Failures go with `advance`.
            let reports = self.held.progress();
            let extended = self.protocol.extend(&reports).await?;
            let lost: Vec<Uuid> =
                extended.iter().filter(|(_, seq)| seq.is_none()).map(|(token, _)| *token).collect();
            for (token, seq) in &extended {
                seq.iter().for_each(|seq| self.held.moved(*token, *seq));
            }
            let lost = self.held.reported(&reports, &lost);
            self.give_up(lost);
        }
        let exceptions = self.held.exceptions();
        if !exceptions.is_empty() {
            let lost = self.protocol.extend_exceptions(&exceptions).await?;
            self.held.lost_exceptions(&lost);
            self.give_up(lost.len());
        }
        self.next_heartbeat = Instant::now() + self.lease_duration / 3;
        Ok(())
    }

    /// Hands messages to the workers.
    fn received(&mut self, source: Source, messages: Vec<RawMessage>) {
        self.pace.received(messages.len(), messages.iter().map(|m| m.payload.len()).sum());
        self.running += messages.len();
        self.workers.push(messages.into_iter().map(|message| Job { source, message }));
    }

    /// Takes in what handlers have finished.
    fn absorb_all(&mut self) {
        let mut finished = std::mem::take(&mut self.unabsorbed);
        while let Ok(next) = self.results.try_recv() {
            finished.push(next);
        }
        if finished.is_empty() {
            return;
        }
        let now = Instant::now();
        self.running -= finished.len();
        self.pace.finished(finished.len(), self.workers.waiting() == 0, now);
        for Finished { source, id, verdict } in finished.drain(..) {
            if self.held.holds(source, id) {
                self.count(&verdict);
            }
            self.held.finished(source, id, verdict);
        }
        self.unabsorbed = finished;
        if self.has_news() {
            self.news_due.get_or_insert(now + NEWS);
        }
    }

    /// Whether there is something to tell the server: a finished lease, a failure, an exception that was run.
    fn has_news(&self) -> bool {
        self.held.has_news() || !self.held.settled().is_empty()
    }

    /// The server has heard some of it.
    fn told(&mut self) {
        if !self.has_news() {
            self.news_due = None;
        }
    }

    /// News wait a moment for company, unless there is nothing else to do.
    fn news_are_due(&self, now: Instant) -> bool {
        self.running == 0 || self.news_due.is_some_and(|due| now >= due)
    }

    fn count(&mut self, verdict: &Verdict) {
        let counter = match verdict.outcome {
            "ok" => &mut self.consumed.handled,
            "retry" => &mut self.consumed.failed,
            "dead" => &mut self.consumed.dead_at_once,
            _ => &mut self.consumed.delayed,
        };
        *counter += 1;
    }

    /// Something new is held: the heartbeat may have to come sooner than it was due.
    fn held_more(&mut self, now: Instant) {
        let latest = now + self.lease_duration / 3;
        if self.held.is_empty() || self.next_heartbeat > latest {
            self.next_heartbeat = latest;
        }
    }

    /// Leases were lost: what of them has not started shall not.
    fn give_up(&mut self, lost: usize) {
        if lost == 0 {
            return;
        }
        tracing::warn!(
            stream = self.protocol.stream.name,
            lost,
            "leases were lost: another consumer handles what was left of them"
        );
        let held = &self.held;
        self.running -= self.workers.retain(|job| held.holds(job.source, job.message.id));
    }

    async fn is_caught_up(&mut self, goal: Option<i64>) -> Result<bool> {
        match goal {
            Some(goal) if self.held.is_empty() && self.seen == Seen::default() => {
                self.protocol.is_resolved(goal).await
            }
            _ => Ok(false),
        }
    }

    /// Waits for whatever comes first.
    async fn wait(&mut self) {
        let mut until = Instant::now() + POLL.1;
        if !self.held.is_empty() {
            until = until.min(self.next_heartbeat);
        }
        if self.pace.room(self.held.messages()) > 0 {
            until = until.min(self.next_poll);
        }
        if let Some(due) = self.news_due {
            until = until.min(due);
        }
        tokio::select! {
            biased;
            () = self.settings.stop.cancelled() => {}
            Some(finished) = self.results.recv() => self.unabsorbed.push(finished),
            () = tokio::time::sleep_until(until.into()) => {}
        }
    }

    /// The error in the user's words: the database knows streams and groups by number.
    fn named(&self, error: Error) -> Error {
        let stream = shorten(&self.protocol.stream.name);
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

    /// Waits out trouble; handlers go on meanwhile.
    async fn pause(&mut self, pause: Duration) {
        tokio::select! {
            () = self.settings.stop.cancelled() => {}
            () = tokio::time::sleep(pause) => {}
        }
    }

    /// Lets running handlers finish, then hands back what is left.
    async fn stop(&mut self) -> Result<()> {
        self.running -= self.workers.retain(|_| false);
        let deadline = Instant::now() + self.settings.shutdown_timeout;
        let abort = self.settings.abort.clone();
        self.absorb_all();
        while self.running > 0 && Instant::now() < deadline && !abort.is_cancelled() {
            if Instant::now() >= self.next_heartbeat
                && let Err(error) = self.heartbeat().await
            {
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    "a heartbeat failed while stopping"
                );
                self.next_heartbeat = Instant::now() + TROUBLE.0;
            }
            tokio::select! {
                Some(finished) = self.results.recv() => self.unabsorbed.push(finished),
                () = abort.cancelled() => {}
                () = tokio::time::sleep_until(deadline.min(self.next_heartbeat).into()) => {}
            }
            self.absorb_all();
        }
        if self.running > 0 && !abort.is_cancelled() {
            tracing::warn!(
                stream = self.protocol.stream.name,
                handlers = self.running,
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
        if !self.held.settled().is_empty() {
            self.settle_exceptions().await?;
        }
        if self.held.has_news() {
            self.advance(0).await?;
        }
        if self.held.has_leases() {
            let reports = self.held.last_words();
            self.protocol.release(&reports).await?;
            let tokens: Vec<Uuid> = reports.iter().map(|r| r.token).collect();
            self.held.reported(&reports, &tokens);
        }
        let exceptions = self.held.exceptions();
        if !exceptions.is_empty() {
            self.protocol.release_exceptions(&exceptions).await?;
            self.held.lost_exceptions(&exceptions.iter().map(|(_, id)| *id).collect::<Vec<_>>());
        }
        Ok(())
    }
}

impl DueFrom {
    /// The bound to use now: none every few seconds.
    fn now(&mut self) -> Option<SystemTime> {
        if self.unbounded_at.elapsed() >= UNBOUNDED {
            *self = Self { bound: None, unbounded_at: Instant::now() };
        }
        self.bound
    }

    fn claimed(&mut self, earliest_due: Option<SystemTime>) {
        if let Some(due) = earliest_due {
            self.bound = due.checked_sub(Duration::from_secs(1));
        }
    }
}

/// Between half and all of it, so that many consumers do not march in step.
fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(0.5 + fastrand::f64() / 2.0)
}
