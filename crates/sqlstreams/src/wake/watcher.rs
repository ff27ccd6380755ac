//! One task per client that looks for work, for all the groups that are consumed through it, and judges owners that died.
//!
//! It runs while something is consumed. A look costs the database about as much as it finds out: each group has its own
//! pace, from a few milliseconds after something happened to about a second, and what is nearly due is looked at together.

use std::collections::{BTreeMap, HashMap};
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use futures_util::FutureExt;
use tokio::sync::{Notify, watch};
use tokio_postgres::types::ToSql;

use super::session::{Life, Rung, Session};
use crate::client::{BOOKKEEPING, Client};
use crate::error::{Error, Result};

/// The pause between two looks at an idle group, growing from the first to the second.
const PACE: (Duration, Duration) = (Duration::from_millis(5), Duration::from_secs(1));
/// The pace of a group that has a backlog: its consumer claims without being told; exceptions come due meanwhile.
const BUSY: Duration = Duration::from_millis(100);
/// How often a group is looked at of whose leases another process has some.
const OTHERS: Duration = Duration::from_millis(500);
/// After a ring a consumer that got nothing the last time leaves so much time to the one that did, lest all of many idle
/// consumers claim because of one message.
const OTHERS_FIRST: Duration = Duration::from_millis(15);
/// How long an owner has to be missing.
const MISSING: Duration = Duration::from_secs(1);
/// How long a consumer waits at its start for its process to be known.
const INTRODUCTION: Duration = Duration::from_secs(1);
/// After a look there is none for so many times as long as it took, unless it took very long.
const SHARE: u32 = 4;
/// The pause after trouble, growing from the first to the second.
const TROUBLE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(1));
/// What `watch` answers when it is asked of another server process than that of the session.
const OTHER_BACKEND: &str = "SQ011";
/// How often exceptions are looked for without a lower bound on their due time; see `take_exceptions` in the SQL.
const UNBOUNDED: Duration = Duration::from_secs(5);

/// What may be there to do in a group.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) fresh: bool,
    pub(crate) lapsed: bool,
    pub(crate) due: bool,
    pub(crate) suspect: bool,
}

impl Seen {
    /// Nobody knows.
    pub(crate) const ANYTHING: Self = Self { fresh: true, lapsed: true, due: true, suspect: true };

    pub(crate) fn add(&mut self, other: Self) {
        self.fresh |= other.fresh;
        self.lapsed |= other.lapsed;
        self.due |= other.due;
        self.suspect |= other.suspect;
    }
}

/// The watcher of a client.
#[derive(Debug)]
pub(crate) struct Watcher {
    /// Whether to listen. Not where a pooler was found in between.
    listen: AtomicBool,
    groups: Mutex<Groups>,
    rung: Arc<Rung>,
    /// For looks, and for heartbeats.
    session: tokio::sync::Mutex<Option<Session>>,
    /// As what this process is known; changes whenever the session does.
    life: watch::Sender<Option<i64>>,
    /// Whether there is a session: then it is known whether it has a number.
    connected: watch::Sender<bool>,
}

#[derive(Debug, Default)]
struct Groups {
    /// By the order in which they came.
    watched: BTreeMap<u64, Arc<Group>>,
    next: u64,
    running: bool,
}

/// A group that is looked at, and what was seen of it.
#[derive(Debug)]
struct Group {
    stream: i64,
    group: i64,
    state: Mutex<State>,
    news: Notify,
}

#[derive(Debug)]
struct State {
    seen: Seen,
    /// How many full looks there were.
    looks: u64,
    paused: bool,
    pace: Duration,
    next: Instant,
    /// Somebody rang: look for fresh messages then.
    rung: Option<Instant>,
    /// How often in a row a claim brought nothing. Two say that others have what is rung for; one may be a ring that came when
    /// its message was claimed already.
    misses: u32,
    /// Since the last full look somebody rang.
    rang: bool,
    /// Rings tell of messages: the last full look found no other.
    by_ring: bool,
    claimed: i64,
    due_from: DueFrom,
}

/// The lower bound for looking at due exceptions.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DueFrom {
    bound: Option<SystemTime>,
    unbounded_at: Instant,
}

/// A consumer's hold of its group's watch; dropped, the group is not looked at any more.
#[derive(Debug)]
pub(crate) struct Watch {
    client: Client,
    key: u64,
    group: Arc<Group>,
}

impl Watcher {
    pub(crate) fn new(listen: bool) -> Self {
        Self {
            listen: AtomicBool::new(listen),
            groups: Mutex::default(),
            rung: Arc::default(),
            session: tokio::sync::Mutex::default(),
            life: watch::Sender::new(None),
            connected: watch::Sender::new(false),
        }
    }

    /// Starts to look at a group.
    pub(crate) fn watch(client: &Client, stream: i64, group: i64) -> Watch {
        let now = Instant::now();
        let group = Arc::new(Group {
            stream,
            group,
            state: Mutex::new(State {
                seen: Seen::ANYTHING,
                looks: 0,
                paused: false,
                pace: PACE.0,
                next: now,
                rung: None,
                misses: 0,
                rang: false,
                by_ring: false,
                claimed: 0,
                due_from: DueFrom { bound: None, unbounded_at: now },
            }),
            news: Notify::new(),
        });
        let watcher = &client.inner.watcher;
        let mut groups = watcher.groups();
        let key = groups.next;
        groups.next += 1;
        groups.watched.insert(key, group.clone());
        if !std::mem::replace(&mut groups.running, true) {
            client.inner.background.handle().spawn(supervise(client.clone()));
        }
        drop(groups);
        watcher.rung.news.notify_one();
        Watch { client: client.clone(), key, group }
    }

    /// A producer of the same process has committed: no need to hear of it by way of the server, if nobody listens there.
    pub(crate) fn rang(&self, stream: i64) {
        if self.life.borrow().is_none() && self.groups().running {
            self.rung.ring(stream);
        }
    }

    /// The number of this process, now and whenever it changes.
    pub(crate) fn life(&self) -> watch::Receiver<Option<i64>> {
        self.life.subscribe()
    }

    /// Waits, but not for long, until it is known as whom this process holds leases. What it claims before that has no
    /// owner, so that nobody would notice its death: and a message that kills its process does so right at the start.
    pub(crate) async fn known(&self) {
        let mut connected = self.connected.subscribe();
        let _ = tokio::time::timeout(INTRODUCTION, connected.wait_for(|is| *is)).await;
    }

    /// A statement in a transaction of its own on the session; `None` when there is no session that works.
    pub(crate) async fn transact(
        client: &Client,
        begin: &str,
        query: &crate::queries::Query,
        params: &[&(dyn ToSql + Sync)],
        doing: &str,
    ) -> Option<Result<Vec<tokio_postgres::Row>>> {
        let watcher = &client.inner.watcher;
        let session = watcher.session.lock().await;
        let session = session.as_ref().filter(|session| !session.is_broken())?;
        let answer = session.transact(begin, query, params, doing).await;
        if session.is_broken() {
            client.forget_idle_connections();
            watcher.rung.news.notify_one();
            return None;
        }
        Some(answer)
    }

    /// A pooler in transaction mode was found: neither a lock nor a LISTEN lasts.
    pub(crate) fn is_pooled(&self) {
        if self.listen.swap(false, Ordering::Relaxed) {
            tracing::info!(
                "the connection is pooled by transaction: no notifications, messages are found by polling"
            );
        }
    }

    fn groups(&self) -> MutexGuard<'_, Groups> {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn watched(&self) -> Vec<Arc<Group>> {
        self.groups().watched.values().cloned().collect()
    }
}

impl Watch {
    /// What was seen since the last call.
    pub(crate) fn take(&self) -> Seen {
        std::mem::take(&mut self.group.state().seen)
    }

    /// How many full looks there were so far.
    pub(crate) fn looks(&self) -> u64 {
        self.group.state().looks
    }

    pub(crate) fn is_paused(&self) -> bool {
        self.group.state().paused
    }

    /// A call of the consumer's own said so.
    pub(crate) fn set_paused(&self, paused: bool) {
        self.group.state().paused = paused;
    }

    /// Waits until something was seen.
    pub(crate) async fn news(&self) {
        self.group.news.notified().await;
    }

    /// Something was claimed: all there was (`short`), or likely not. What comes next is looked for accordingly.
    pub(crate) fn claimed(&self, up_to: Option<i64>, short: bool) {
        let mut state = self.group.state();
        state.claimed = state.claimed.max(up_to.unwrap_or_default());
        state.misses = 0;
        // Where rings tell of messages there is no need to look for them as often.
        state.pace = if short && !state.by_ring { PACE.0 } else { BUSY };
        let next = Instant::now() + state.pace;
        if next < state.next {
            state.next = next;
            self.client.inner.watcher.rung.news.notify_one();
        }
    }

    /// There was nothing to claim: another consumer of the group has it.
    pub(crate) fn claimed_nothing(&self) {
        let mut state = self.group.state();
        state.misses = state.misses.saturating_add(1);
    }

    /// The lower bound for claiming due exceptions: none every few seconds.
    pub(crate) fn due_from(&self) -> Option<SystemTime> {
        self.group.state().due_from.now()
    }

    /// Exceptions were claimed, the first of them due at this time.
    pub(crate) fn claimed_exceptions(&self, earliest_due: Option<SystemTime>) {
        if let Some(due) = earliest_due {
            self.group.state().due_from.bound = due.checked_sub(Duration::from_secs(1));
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let watcher = &self.client.inner.watcher;
        watcher.groups().watched.remove(&self.key);
        watcher.rung.news.notify_one();
    }
}

impl Group {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Somebody has produced, or handed something back, or resumed a group.
    fn ring(&self) {
        let mut state = self.state();
        state.rang = true;
        state.by_ring = true;
        if state.paused {
            state.next = Instant::now();
        } else if state.misses < 2 {
            state.seen.fresh = true;
            drop(state);
            self.news.notify_one();
        } else if state.rung.is_none() {
            state.rung = Some(Instant::now() + OTHERS_FIRST.mul_f64(jitter()));
        }
    }

    /// Tells the consumer what was seen.
    fn tell(&self, seen: Seen) {
        self.state().seen.add(seen);
        self.news.notify_one();
    }
}

impl DueFrom {
    fn now(&mut self) -> Option<SystemTime> {
        if self.unbounded_at.elapsed() >= UNBOUNDED {
            *self = Self { bound: None, unbounded_at: Instant::now() };
        }
        self.bound
    }
}

/// Keeps the watcher's task alive until there is nothing to watch.
async fn supervise(client: Client) {
    loop {
        match AssertUnwindSafe(Looking::new(&client).run()).catch_unwind().await {
            Ok(()) => return,
            Err(_) => {
                tracing::error!(
                    "the task that looks for messages has panicked; it is started again"
                );
                client.inner.watcher.end_session().await;
                tokio::time::sleep(TROUBLE.1).await;
            }
        }
    }
}

impl Watcher {
    async fn end_session(&self) {
        *self.session.lock().await = None;
        self.life.send_if_modified(|life| life.take().is_some());
        self.connected.send_replace(false);
    }
}

/// The watcher's task.
struct Looking<'a> {
    client: &'a Client,
    watcher: &'a Watcher,
    life: Option<Life>,
    /// A session broke, and there is no new one yet.
    lost: bool,
    /// Since when owners are missing, by the group in whose full looks they are, and their number.
    missing: HashMap<(i64, i64), Instant>,
    /// When the next look is allowed.
    rested: Instant,
    trouble: Duration,
}

/// What a look says of one group.
struct Look {
    group: i64,
    gone: bool,
    seen: Seen,
    paused: Option<bool>,
    claimed: i64,
    next_due: Option<Duration>,
    others: bool,
    missing: Vec<i64>,
}

impl<'a> Looking<'a> {
    fn new(client: &'a Client) -> Self {
        Self {
            client,
            watcher: &client.inner.watcher,
            life: None,
            lost: false,
            missing: HashMap::new(),
            rested: Instant::now(),
            trouble: TROUBLE.0,
        }
    }

    async fn run(mut self) {
        loop {
            if self.watcher.groups().watched.is_empty() {
                self.watcher.end_session().await;
                let mut groups = self.watcher.groups();
                if groups.watched.is_empty() {
                    groups.running = false;
                    return;
                }
            }
            match self.step().await {
                Ok(()) => self.trouble = TROUBLE.0,
                Err(error) => {
                    tracing::warn!(
                        error = &error as &dyn std::error::Error,
                        "could not look for messages; trying again in {:?}",
                        self.trouble
                    );
                    let watched = self.watcher.watched();
                    if self.look(&watched, Instant::now()).await.is_err() {
                        // Nobody knows what there is: consumers are to see for themselves.
                        watched.iter().for_each(|group| group.tell(Seen::ANYTHING));
                    }
                    tokio::time::sleep(jittered(self.trouble)).await;
                    self.trouble = (self.trouble * 2).min(TROUBLE.1);
                }
            }
        }
    }

    /// Sees to it that there is a session, and looks or waits.
    async fn step(&mut self) -> Result<()> {
        #[cfg(test)]
        self.client.inner.faults.strike(crate::supervision::Task::Watcher);
        self.connect().await?;
        for stream in self.watcher.rung.take() {
            for group in self.watcher.watched().iter().filter(|g| g.stream == stream) {
                group.ring();
            }
        }
        let now = Instant::now();
        let watched = self.watcher.watched();
        let next = watched.iter().map(|group| group.state().due()).min();
        match next {
            Some(next) if next.max(self.rested) <= now => self.look(&watched, now).await,
            _ => {
                let next = next.map_or(now + PACE.1, |next| next.max(self.rested));
                tokio::select! {
                    () = self.watcher.rung.news.notified() => {}
                    () = tokio::time::sleep_until(next.into()) => {}
                }
                Ok(())
            }
        }
    }

    async fn connect(&mut self) -> Result<()> {
        let listen = self.watcher.listen.load(Ordering::Relaxed);
        match &*self.watcher.session.lock().await {
            Some(session) if session.is_broken() => self.lost = true,
            Some(session) if listen && session.is_unsure() => {}
            Some(_) => return Ok(()),
            None => {}
        }
        // Leases of a life that ended are renewed under none until there is a new one, or others would take them.
        self.watcher.end_session().await;
        self.life = None;
        let session = Session::open(self.client, listen, &self.watcher.rung).await?;
        self.life = session.life;
        let owner = session.life.map(|life| life.owner);
        tracing::debug!(owner, "connected to look for messages");
        *self.watcher.session.lock().await = Some(session);
        self.watcher.life.send_replace(owner);
        self.watcher.connected.send_replace(true);
        self.missing.clear();
        if std::mem::take(&mut self.lost) {
            // Some that were in use when it was lost may still lead to where it led.
            self.client.forget_idle_connections();
        }
        // What was rung for meanwhile was not heard.
        for group in self.watcher.watched() {
            group.state().next = Instant::now();
        }
        Ok(())
    }

    /// One statement for all groups that are due, or nearly.
    async fn look(&mut self, watched: &[Arc<Group>], now: Instant) -> Result<()> {
        let mut looked: Vec<&Arc<Group>> = Vec::new();
        let (mut streams, mut groups, mut known) = (Vec::new(), Vec::new(), Vec::new());
        let (mut due_from, mut full) = (Vec::new(), Vec::new());
        for group in watched {
            let mut state = group.state();
            let due = state.next.saturating_duration_since(now) <= state.pace / 2;
            if due || state.rung.is_some_and(|rung| rung <= now) {
                streams.push(group.stream);
                groups.push(group.group);
                known.push(state.claimed);
                due_from.push(state.due_from.now());
                full.push(due);
                state.rung = None;
                looked.push(group);
            }
        }
        let judge = self.life.filter(Life::may_judge).map(|life| life.owner);
        let backend = self.life.map(|life| life.backend);
        let params: [&(dyn ToSql + Sync); 7] =
            [&streams, &groups, &known, &due_from, &full, &judge, &backend];
        let looks = self.ask(&params).await?;
        self.rested = Instant::now() + (now.elapsed() * SHARE).min(PACE.1);

        // The same for all, so that those that are idle are looked at together again.
        let jitter = jitter();
        for (group, full) in looked.into_iter().zip(full) {
            let look = looks.iter().find(|look| look.group == group.group);
            self.take_in(group, look, full.then_some(jitter)).await?;
        }
        self.missing.retain(|(id, _), _| watched.iter().any(|group| group.group == *id));
        Ok(())
    }

    /// What was seen of a group, `None`: nothing. After a full look the next is timed, with this jitter.
    async fn take_in(
        &mut self,
        group: &Group,
        look: Option<&Look>,
        full: Option<f64>,
    ) -> Result<()> {
        let now = Instant::now();
        let mut seen = look.map_or(Seen::default(), |look| match look.gone {
            // The consumer will be told so by its own next call.
            true => Seen::ANYTHING,
            false => look.seen,
        });
        let mut verdict = None;
        if full.is_some() {
            // Only such a look tells who is back, or has nothing any more.
            let still = look.map_or(&[][..], |look| &look.missing);
            self.missing.retain(|(id, owner), _| *id != group.group || still.contains(owner));
        }
        for owner in look.iter().flat_map(|look| &look.missing) {
            let since = *self.missing.entry((group.group, *owner)).or_insert(now);
            if now.duration_since(since) >= MISSING {
                tracing::warn!(
                    stream = group.stream,
                    group = group.group,
                    owner,
                    "a consumer has died; its leases are taken over"
                );
                seen.lapsed |= self.expire(group, *owner).await?;
            } else {
                verdict = verdict.max(Some(since + MISSING));
            }
        }
        let mut state = group.state();
        let was_paused = state.paused;
        if let Some(look) = look {
            state.claimed = state.claimed.max(look.claimed);
            state.paused = look.paused.unwrap_or(state.paused);
        }
        if let Some(jitter) = full {
            let rang = std::mem::take(&mut state.rang);
            if seen.fresh {
                state.by_ring = rang;
            }
            state.looks += 1;
            let others = look.is_some_and(|look| look.others);
            state.pace = match seen == Seen::default() {
                true => (state.pace * 3 / 2).min(if others { OTHERS } else { PACE.1 }),
                false => state.pace.clamp(BUSY, PACE.1),
            };
            // Exactly when there is something to see, where that is known.
            let known = look.and_then(|look| look.next_due).map(|due| now + due);
            let next = now + state.pace.mul_f64(jitter);
            state.next =
                [known, verdict].into_iter().flatten().fold(next, Instant::min).max(now + PACE.0);
        }
        let tell = full.is_some() || seen != Seen::default() || was_paused != state.paused;
        drop(state);
        if tell {
            group.tell(seen);
        }
        Ok(())
    }

    async fn ask(&self, params: &[&(dyn ToSql + Sync)]) -> Result<Vec<Look>> {
        let doing = "look for messages";
        let query = &self.client.inner.queries.watch;
        let session = self.watcher.session.lock().await;
        let rows = match session.as_ref().filter(|session| !session.is_broken()) {
            Some(session) => {
                let rows = session.read(query, params, doing).await;
                if rows.as_ref().is_err_and(|error| error.sql_state() == Some(OTHER_BACKEND)) {
                    self.watcher.is_pooled();
                    session.give_up();
                }
                if rows.as_ref().is_err_and(Error::is_of_connection) {
                    // What broke it has probably broken others, which nobody is to wait for.
                    self.client.forget_idle_connections();
                }
                rows
            }
            // There may be a limit that allows none beside the pool.
            None => self.client.ask(query, params, doing).await,
        };
        let rows = rows?;
        Ok(rows
            .iter()
            .map(|row| Look {
                group: row.get(0),
                gone: row.get(1),
                seen: Seen {
                    fresh: row.get(2),
                    lapsed: row.get(3),
                    due: row.get(4),
                    suspect: row.get(5),
                },
                paused: row.get(6),
                claimed: row.get(7),
                next_due: row
                    .get::<_, Option<i64>>(8)
                    .map(|ms| Duration::from_millis(u64::try_from(ms).unwrap_or_default() + 1)),
                others: row.get::<_, Option<Vec<i64>>>(9).is_some_and(|owners| !owners.is_empty()),
                missing: row.get(10),
            })
            .collect())
    }

    async fn expire(&self, group: &Group, owner: i64) -> Result<bool> {
        let params: [&(dyn ToSql + Sync); 3] = [&group.stream, &group.group, &owner];
        let expire = &self.client.inner.queries.expire_owner;
        let doing = "take over from a dead consumer";
        match Watcher::transact(self.client, BOOKKEEPING, expire, &params, doing).await {
            Some(rows) => Ok(rows?.first().is_some_and(|row| row.get(0))),
            None => Ok(false),
        }
    }
}

impl State {
    /// When it is to be looked at.
    fn due(&self) -> Instant {
        self.rung.map_or(self.next, |rung| rung.min(self.next))
    }
}

/// Between half and all of it, so that many processes do not march in step.
pub(crate) fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(jitter())
}

fn jitter() -> f64 {
    0.5 + fastrand::f64() / 2.0
}
