//! The consumer of an ordered group: messages of one key one at a time, in id order. The rules are in sql/functions/lanes.sql.
//!
//! One task makes all calls, heartbeats too, one after the other; each tells of everything that is held. Which message of a key may
//! run is decided by the gate (consume/gate.rs), since a worker goes on with the next one by itself.

mod calls;
mod crowd;
mod lanes;
mod shares;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{OwnedSemaphorePermit, mpsc};
use uuid::Uuid;

use self::calls::{Claimed, Read, Wanted};
use self::lanes::{Lanes, Report};
use self::shares::Shares;
use super::coordinator::NEWS;
use super::delivery::History;
use super::health::{Activity, Health};
use super::held::Source;
use super::pace::Pace;
use super::protocol::{Page, Protocol};
use super::term::margin;
use super::turns::lane_number;
use super::workers::{Finished, Job, Queue, Workers};
use super::{Consumed, Settings, later, sleep_until};
use crate::backoff::{Backoff, jittered};
use crate::error::{Error, ErrorKind, Result};
use crate::outcome::{Outcome, Verdict};
use crate::partitions;
use crate::wake::{Seen, Watch};

/// The pause after a failed call, growing from the first to the second.
const TROUBLE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(1));
/// How soon a consumer asks again that waits for lanes of others.
const WAITING: Duration = Duration::from_millis(100);

/// What there was to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Called,
    Idle,
    CaughtUp,
}

pub(super) struct Ordered {
    protocol: Protocol,
    settings: Settings,
    workers: Workers,
    queue: Arc<Queue>,
    results: mpsc::UnboundedReceiver<Vec<Finished>>,
    watch: Watch,
    health: Health,
    pace: Pace,
    shares: Shares,
    consumed: Consumed,
    lanes: Lanes,
    seen: Seen,
    /// Lanes that had nothing of what was seen.
    dry: u64,
    /// The group has a limit: others wait for what we finish.
    limited: bool,
    /// Until then the rate limit is used up.
    not_before: Instant,
    lease_duration: Duration,
    /// When everything has to be renewed.
    renewal: Instant,
    /// When what is new has to be told.
    news_due: Option<Instant>,
    /// When to ask for lanes again.
    ask_again: Option<Instant>,
    unabsorbed: Vec<Finished>,
    /// Held while a suspect runs.
    suspect: Option<OwnedSemaphorePermit>,
    exceptions_one_by_one: bool,
    asked_at: u64,
}

impl Ordered {
    pub(super) fn new(
        protocol: Protocol,
        settings: Settings,
        workers: Workers,
        queue: Arc<Queue>,
        results: mpsc::UnboundedReceiver<Vec<Finished>>,
        watch: Watch,
    ) -> Self {
        let now = Instant::now();
        Self {
            pace: Pace::new(settings.concurrency * settings.batch_size, now),
            consumed: settings.health.snapshot().consumed,
            health: settings.health.clone(),
            protocol,
            settings,
            workers,
            queue,
            results,
            watch,
            shares: Shares::new(),
            lanes: Lanes::new(),
            seen: Seen::ANYTHING,
            dry: 0,
            limited: false,
            not_before: now,
            lease_duration: Duration::from_secs(15),
            renewal: now,
            news_due: None,
            ask_again: None,
            unabsorbed: Vec::new(),
            suspect: None,
            exceptions_one_by_one: false,
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
            self.lapse();
            self.absorb_all();
            self.show();
            if self.settings.stop.is_cancelled() {
                return Ok(());
            }
            if self.workers.has_dead() {
                return Err(Error::new(ErrorKind::Closed, "one of the consumer's tasks has ended"));
            }
            let lapse = self.lapses_at();
            let result = tokio::select! {
                biased;
                result = self.step_or_end(goal) => result,
                () = sleep_until(lapse) => {
                    // What has hung went back to the pool.
                    self.protocol.stream.client.forget_idle_connections();
                    continue;
                }
            };
            match result {
                Ok(Step::CaughtUp) => return Ok(()),
                Ok(step) => {
                    let called = step == Step::Called;
                    if called || trouble.has_begun() {
                        self.health.trouble(None);
                    }
                    trouble.reset();
                    if !called {
                        self.wait(None).await;
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
                    self.wait(Some(Instant::now() + pause)).await;
                }
                Err(error) => return Err(error),
            }
        }
    }

    async fn step_or_end(&mut self, goal: Option<i64>) -> Result<Step> {
        Ok(match self.step().await? {
            true => Step::Called,
            false if self.is_caught_up(goal).await? => Step::CaughtUp,
            false => Step::Idle,
        })
    }

    /// Makes the most urgent call, if any is to be made; says whether it made one.
    async fn step(&mut self) -> Result<bool> {
        let now = Instant::now();
        let news = self.watch.take();
        if news != Seen::default() {
            self.seen.add(news);
            self.dry = 0;
        }
        let paused = self.watch.is_paused();
        self.queue.pause(paused);
        if now >= self.renewal && !self.lanes.is_empty() {
            self.tell().await?;
            return Ok(true);
        }
        let hungry = self.queue.waiting() < self.settings.concurrency * self.settings.batch_size;
        if hungry && let Some((token, ids)) = self.lanes.unfetched_exceptions() {
            self.fetch_exceptions(token, ids).await?;
            return Ok(true);
        }
        let (held, limited) = (self.lanes.messages(), self.limited);
        let crowded = self.lanes.crowded(self.pace.target(), limited);
        let room = match limited {
            true => self.pace.room(held, true),
            false => self.pace.room_beside(held, crowded.excess),
        };
        let crowding = crowded.lanes;
        // What a group that has a limit has handed out is counted, and fetched in any case.
        let crowded = if limited { 0 } else { crowding };
        if room > 0
            && let Some((token, after, one_by_one)) = self.lanes.unfetched(crowded)
        {
            self.fetch(token, after, if one_by_one { 1 } else { room }).await?;
            return Ok(true);
        }
        if room > 0
            && let Some(part) = self.lanes.to_part(crowded)
        {
            let wanted = Wanted { part: Some(part), ..self.nothing() };
            self.advance(wanted).await?;
            return Ok(true);
        }
        let news = self.lanes.has_news()
            && (limited
                || self.queue.unfinished() == 0
                || self.news_due.is_some_and(|due| now >= due));
        let suspect = self.seen.suspect && self.may_take_suspect();
        let anything = self.seen.fresh || self.seen.lapsed || self.seen.due || suspect;
        let asking = self.ask_again.is_none_or(|at| now >= at) && now >= self.not_before;
        // A lane is read in order: what follows when what is held of it has been fetched.
        let lanes = !(crowding | self.lanes.unfetched_lanes());
        // What was finished makes room where there is a limit.
        let anything = anything && lanes & !self.dry != 0 || limited && news;
        let claim = anything && asking && !paused && room > 0 && lanes != 0;
        if claim {
            let width = self.shares.width(room, lanes);
            let wanted = Wanted { limit: room, lanes, width, suspect, ..self.nothing() };
            self.advance(wanted).await?;
            return Ok(true);
        }
        if news {
            self.tell().await?;
            return Ok(true);
        }
        if suspect {
            self.suspect = None;
        }
        Ok(false)
    }

    /// Asks for nothing.
    fn nothing(&self) -> Wanted {
        Wanted {
            limit: 0,
            lanes: u64::MAX,
            width: 0,
            part: None,
            suspect: false,
            token: Uuid::new_v4(),
            bytes: self.pace.fetch_bytes(),
        }
    }

    /// Settles and renews what is held.
    async fn tell(&mut self) -> Result<()> {
        self.advance(self.nothing()).await
    }

    async fn advance(&mut self, wanted: Wanted) -> Result<()> {
        let report = self.lanes.report();
        let Wanted { limit, lanes, suspect, token, .. } = wanted;
        let sent = Instant::now();
        let advanced = self.protocol.advance_lanes(self.lanes.holder, &report, &wanted).await?;
        self.watch.set_paused(advanced.paused);
        self.limited = advanced.limited;
        self.not_before = advanced.wait.map_or(self.not_before, |wait| sent + wait);
        if advanced.lost {
            self.lose("they were taken over");
            return Ok(());
        }
        self.told(&report, sent, advanced.lease_duration);
        if let Some(part) = &wanted.part {
            self.lanes.parted(part);
        }
        self.ask_again = advanced.waiting.then(|| sent + WAITING);
        let read = advanced.read;
        self.shares.claimed(lanes, &read, sent.elapsed());
        let Some(claimed) = advanced.claimed else {
            self.shares.found(read.lanes, 0, read.ids);
            let nothing = read.ids == 0 && advanced.wait.is_none();
            if limit > 0 && !advanced.waiting && nothing {
                self.found_nothing(lanes, suspect);
            }
            self.suspect = self.suspect.take().filter(|_| self.lanes.holds_suspect());
            return Ok(());
        };
        if !claimed.suspect && !self.lanes.holds_suspect() {
            self.suspect = None;
        }
        if let Some(last) = claimed.pending.last() {
            partitions::look_after(&self.protocol.stream, last);
            self.watch.claimed(Some(last), false);
        }
        self.dry &= !claimed.lanes;
        if read.ids > 0 {
            self.sift(&claimed, &read, &advanced.page);
        }
        let is_range = claimed.exceptions.is_empty();
        self.lanes.claimed(token, claimed);
        if is_range { self.fetched(token, limit, advanced.page) } else { Ok(()) }
    }

    /// Learns from the first messages of a range how many of its ids can be handled. Those that were deferred cannot: behind a key
    /// that fails there may be very many.
    fn sift(&mut self, claimed: &Claimed, read: &Read, page: &Result<Page>) {
        let Ok(page) = page else { return };
        let ids = match (page.messages.last(), claimed.pending.first()) {
            // Those beyond the last message were not looked at.
            (Some(last), Some(first)) if page.more => (last.id - first + 1) as usize,
            _ => read.ids,
        };
        self.shares.found(claimed.lanes, page.messages.len(), ids);
    }

    /// These lanes have nothing of what was seen; when none has, the watcher says when there is more.
    fn found_nothing(&mut self, lanes: u64, suspect: bool) {
        self.dry |= lanes;
        if self.dry == u64::MAX {
            self.watch.claimed_nothing();
            self.seen = Seen { suspect: self.seen.suspect && !suspect, ..Seen::default() };
            self.dry = 0;
        }
    }

    fn told(&mut self, report: &Report, sent: Instant, lease_duration: Duration) {
        self.lease_duration = lease_duration;
        self.renewal = sent + lease_duration / 3;
        self.queue.set_margin(self.margin());
        self.lanes.reported(report, sent, lease_duration);
        self.news_due = None;
        self.health.progress();
    }

    async fn fetch(&mut self, token: Uuid, after: i64, limit: usize) -> Result<()> {
        let bytes = self.pace.fetch_bytes();
        match self.protocol.fetch(token, after, limit as i64, bytes, None).await {
            Err(error) if limit == 1 && error.may_be_a_message() => {
                let id = self.protocol.next_id(token, after).await?;
                let source = self.lanes.fetched(token, id, id.is_some());
                if let (Some(id), Some(source)) = (id, source) {
                    self.lanes.opened(source, id, None, None);
                    self.bury(source, id, &error);
                }
                Ok(())
            }
            page => self.fetched(token, limit, page),
        }
    }

    fn fetched(&mut self, token: Uuid, limit: usize, page: Result<Page>) -> Result<()> {
        match page {
            Ok(page) => {
                let last = page.messages.last().map(|m| m.id);
                let Some(source) = self.lanes.fetched(token, last, page.more) else {
                    return Ok(());
                };
                let term = self.lanes.term.clone();
                let mut jobs = Vec::with_capacity(page.messages.len());
                for message in page.messages {
                    let lane = lane_number(message.lane);
                    if self.lanes.opened(source, message.id, message.key.as_ref(), lane) {
                        let (term, history) = (term.clone(), History::default());
                        jobs.push(Job { source, message, history, term });
                    }
                }
                self.received(jobs);
                Ok(())
            }
            Err(error) if limit > 1 && error.may_be_a_message() => {
                self.lanes.fetch_one_by_one(token);
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    async fn fetch_exceptions(&mut self, token: Uuid, mut ids: Vec<i64>) -> Result<()> {
        if self.exceptions_one_by_one {
            ids.truncate(1);
        }
        let source = Source::Exception(token);
        let page = match self.protocol.fetch_messages(&ids, self.pace.fetch_bytes()).await {
            Ok(page) => page,
            Err(error) if error.may_be_a_message() => {
                match ids.as_slice() {
                    &[id] => {
                        if self.lanes.fetched_exception(token, id).is_some() {
                            self.lanes.opened(source, id, None, None);
                            self.bury(source, id, &error);
                        }
                        self.exceptions_one_by_one = false;
                    }
                    _ => self.exceptions_one_by_one = true,
                }
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        let complete_to = match page.messages.last() {
            Some(last) if page.more => last.id,
            _ => i64::MAX,
        };
        let found: BTreeSet<i64> = page.messages.iter().map(|m| m.id).collect();
        for id in ids.into_iter().filter(|id| *id <= complete_to && !found.contains(id)) {
            if self.lanes.fetched_exception(token, id).is_some() {
                self.lanes.opened(source, id, None, None);
                let gone = Outcome::Dead("the message is no longer in the log".to_owned());
                self.end(source, id, gone.into());
            }
        }
        let term = self.lanes.term.clone();
        let mut jobs = Vec::with_capacity(page.messages.len());
        for message in page.messages {
            if let Some(history) = self.lanes.fetched_exception(token, message.id)
                && self.lanes.opened(
                    source,
                    message.id,
                    message.key.as_ref(),
                    lane_number(message.lane),
                )
            {
                jobs.push(Job { source, message, history, term: term.clone() });
            }
        }
        self.received(jobs);
        Ok(())
    }

    fn bury(&mut self, source: Source, id: i64, error: &Error) {
        tracing::warn!(stream = self.protocol.stream.name, id, %error, "a message cannot be read");
        self.end(source, id, Outcome::Dead(format!("the message cannot be read: {error}")).into());
    }

    /// A message ends without having been run.
    fn end(&mut self, source: Source, id: i64, verdict: Verdict) {
        let counts = verdict.counts;
        if self.lanes.finished(source, id, verdict).0 {
            self.consumed.count(counts);
        }
        self.news_due.get_or_insert_with(Instant::now);
    }

    fn received(&mut self, jobs: Vec<Job>) {
        let count = jobs.len();
        let bytes = jobs.iter().map(|job| job.message.payload.bytes().len()).sum();
        self.queue.push(jobs);
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
        for Finished { source, id, verdict, key } in finished {
            let (counts, settled) = (verdict.counts, verdict.settled);
            let (was_ours, stopped) = self.lanes.finished(source, id, verdict);
            if was_ours || settled {
                self.consumed.count(counts);
            }
            match (stopped, key) {
                // What waits of it is the server's with the next call.
                (Some(key), _) => self.queue.forget_key(&key),
                (None, Some(key)) if !was_ours => self.queue.reopen(&key),
                _ => {}
            }
        }
        if self.lanes.has_news() {
            self.news_due.get_or_insert(now + NEWS);
        }
    }

    fn margin(&self) -> Duration {
        margin(self.lease_duration)
    }

    /// What could not be renewed in time is given up before anybody else may have it.
    fn lapse(&mut self) {
        if self.lapses_at().is_some_and(|at| Instant::now() >= at) {
            self.lose("they could not be renewed in time");
        }
    }

    /// When what is held has to be given up, unless it is renewed before.
    fn lapses_at(&self) -> Option<Instant> {
        (!self.lanes.is_empty()).then(|| self.lanes.term.until() - self.margin())
    }

    /// Everything is somebody else's now, or free: starts again as another holder.
    fn lose(&mut self, why: &str) {
        tracing::warn!(
            stream = self.protocol.stream.name,
            "the leases of an ordered group were lost: {why}"
        );
        self.lanes.forget();
        self.shares.forget();
        self.queue.take_back(|_| false);
        self.suspect = None;
        self.news_due = None;
        (self.seen, self.dry) = (Seen::ANYTHING, 0);
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

    async fn is_caught_up(&mut self, goal: Option<i64>) -> Result<bool> {
        let Some(goal) = goal else { return Ok(false) };
        let looks = self.watch.looks();
        if looks == self.asked_at || self.seen != Seen::default() || !self.lanes.is_empty() {
            return Ok(false);
        }
        self.asked_at = looks;
        self.protocol.is_resolved(goal).await
    }

    /// Waits for whatever comes first; in trouble, only for `until`.
    async fn wait(&mut self, until: Option<Instant>) {
        let trouble = until.is_some();
        let held = !self.lanes.is_empty();
        let ask_again = self.ask_again.filter(|at| *at > Instant::now());
        let times = [
            until,
            self.news_due.filter(|_| !trouble),
            ask_again.filter(|_| !trouble),
            Some(self.not_before).filter(|at| !trouble && *at > Instant::now()),
            Some(self.renewal).filter(|_| held && !trouble),
            self.lapses_at(),
        ];
        let first = times.into_iter().flatten().min();
        tokio::select! {
            biased;
            () = self.settings.stop.cancelled() => {}
            Some(finished) = self.results.recv(), if !trouble => self.unabsorbed.extend(finished),
            () = self.watch.news(), if !trouble => {}
            () = sleep_until(first) => {}
        }
    }

    /// Lets running handlers finish, and hands back what is left then.
    async fn stop(&mut self) -> Result<()> {
        // What does not run stays ours: it must not overtake what does.
        self.queue.take_back(|_| false);
        let deadline = later(Instant::now(), self.settings.shutdown_timeout);
        let abort = self.settings.abort.clone();
        self.absorb_all();
        while self.queue.unfinished() > 0 && Instant::now() < deadline && !abort.is_cancelled() {
            self.lapse();
            self.show();
            let renewal = self.renewal.max(Instant::now() + TROUBLE.0);
            tokio::select! {
                Some(finished) = self.results.recv() => self.unabsorbed.extend(finished),
                () = abort.cancelled() => {}
                () = tokio::time::sleep_until(deadline.min(renewal).into()) => {
                    if Instant::now() >= self.renewal && !self.lanes.is_empty() {
                        let lapse = self.lapses_at();
                        tokio::select! {
                            // A failure shows in the lapse.
                            _ = self.tell() => {}
                            () = sleep_until(lapse) => {}
                        }
                    }
                }
            }
            self.absorb_all();
        }
        if self.queue.unfinished() > 0 && !abort.is_cancelled() {
            tracing::warn!(
                stream = self.protocol.stream.name,
                handlers = self.queue.unfinished(),
                "handlers did not finish in time; their messages are handed back"
            );
        }
        self.workers.abort().await;
        self.absorb_all();
        let last_try = Instant::now() + Duration::from_secs(5);
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
        if self.lanes.is_empty() {
            return Ok(());
        }
        self.tell().await?;
        self.protocol.release_lanes(self.lanes.holder).await
    }

    fn show(&self) {
        let in_flight = self.queue.unfinished().saturating_sub(self.queue.waiting());
        let watcher = &self.protocol.stream.client.inner.watcher;
        let listening = watcher.life().borrow().is_some();
        let paused = self.watch.is_paused();
        let held = self.lanes.messages();
        self.health.update(|health| {
            (health.held, health.in_flight) = (held, in_flight);
            (health.consumed, health.listening) = (self.consumed, listening);
            if matches!(health.activity, Activity::Starting | Activity::Claiming | Activity::Paused)
            {
                health.activity = if paused { Activity::Paused } else { Activity::Claiming };
            }
        });
    }
}
