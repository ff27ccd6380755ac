//! What is watched for a client's consumers: each group with its own pace, from a few milliseconds after something happened to
//! about a second, and what was seen of it. The task that looks (looking.rs) runs while something is consumed.

use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use futures_util::FutureExt;
use tokio::sync::{Notify, watch};
use tokio_postgres::types::ToSql;

use super::delayed::Delayed;
use super::looking::Looking;
use super::session::{Rung, Session};
use crate::backoff::jitter;
use crate::client::Client;
use crate::error::Result;

/// The pause between two looks at an idle group, growing from the first to the second.
pub(super) const PACE: (Duration, Duration) = (Duration::from_millis(5), Duration::from_secs(1));
/// The pace of a group that has a backlog: its consumer claims without being told; exceptions come due meanwhile.
pub(super) const BUSY: Duration = Duration::from_millis(100);
/// After a ring a consumer that got nothing the last time leaves so much time to the one that did, lest all of many idle
/// consumers claim because of one message.
const OTHERS_FIRST: Duration = Duration::from_millis(15);
/// How long a consumer waits at its start for its process to be known.
const INTRODUCTION: Duration = Duration::from_secs(1);
/// The pause after trouble, growing from the first to the second.
pub(super) const TROUBLE: (Duration, Duration) =
    (Duration::from_millis(100), Duration::from_secs(1));
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
    pub(super) listen: AtomicBool,
    pub(super) groups: Mutex<Groups>,
    pub(super) rung: Arc<Rung>,
    pub(super) delayed: Delayed,
    /// For looks, and for heartbeats.
    pub(super) session: tokio::sync::Mutex<Option<Session>>,
    /// As what this process is known; changes whenever the session does.
    pub(super) life: watch::Sender<Option<i64>>,
    /// Whether there is a session: then it is known whether it has a number.
    pub(super) connected: watch::Sender<bool>,
}

#[derive(Debug, Default)]
pub(super) struct Groups {
    /// By the order in which they came.
    pub(super) watched: BTreeMap<u64, Arc<Group>>,
    pub(super) next: u64,
    pub(super) running: bool,
}

/// A group that is looked at, and what was seen of it.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) stream: i64,
    pub(super) group: i64,
    pub(super) state: Mutex<State>,
    pub(super) news: Notify,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) seen: Seen,
    /// How many full looks there were.
    pub(super) looks: u64,
    pub(super) paused: bool,
    pub(super) pace: Duration,
    pub(super) next: Instant,
    /// Somebody rang: look for fresh messages then.
    pub(super) rung: Option<Instant>,
    /// How often in a row a claim brought nothing. Two say that others have what is rung for; one may be a ring that came when
    /// its message was claimed already.
    pub(super) misses: u32,
    /// Since the last full look somebody rang.
    pub(super) rang: bool,
    /// Rings tell of messages: the last full look found no other.
    pub(super) by_ring: bool,
    pub(super) claimed: i64,
    /// Where the cursor stood at the last full look: if it is below that at the next one, the group was moved back.
    pub(super) stood: i64,
    pub(super) due_from: DueFrom,
}

/// The lower bound for looking at due exceptions.
#[derive(Debug, Clone, Copy)]
pub(super) struct DueFrom {
    pub(super) bound: Option<SystemTime>,
    pub(super) unbounded_at: Instant,
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
            delayed: Delayed::default(),
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
                stood: 0,
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

    /// Told when a schedule was made or changed, as far as that is heard.
    pub(crate) fn schedules_changed(&self) -> Arc<Notify> {
        self.rung.schedules.clone()
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

    pub(super) async fn end_session(&self) {
        *self.session.lock().await = None;
        self.life.send_if_modified(|life| life.take().is_some());
        self.connected.send_replace(false);
    }

    pub(super) fn groups(&self) -> MutexGuard<'_, Groups> {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn watched(&self) -> Vec<Arc<Group>> {
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
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Somebody has produced, or handed something back, or resumed a group.
    pub(super) fn ring(&self) {
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
    pub(super) fn tell(&self, seen: Seen) {
        self.state().seen.add(seen);
        self.news.notify_one();
    }
}

impl DueFrom {
    pub(super) fn now(&mut self) -> Option<SystemTime> {
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

impl State {
    /// When it is to be looked at.
    pub(super) fn due(&self) -> Instant {
        self.rung.map_or(self.next, |rung| rung.min(self.next))
    }
}
