//! The watcher's task, one per client: it looks for work in one statement for all groups that are due or nearly, and judges
//! owners that died. A look costs the database about as much as it finds out.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tokio_postgres::Row;
use tokio_postgres::types::ToSql;

use super::delayed::Delayed;
use super::presence::Presence;
use super::session::{Life, Session};
use super::watcher::{BUSY, Group, PACE, Seen, TROUBLE, Watcher};
use crate::backoff::{Backoff, jitter};
use crate::client::{BOOKKEEPING, Client};
use crate::error::{Error, Result};

/// How often a group is looked at of whose leases another process has some.
const OTHERS: Duration = Duration::from_millis(500);
/// How long an owner has to be missing.
const MISSING: Duration = Duration::from_secs(1);
/// After a look there is none for so many times as long as it took, unless it took very long.
const SHARE: u32 = 4;
/// What `watch` answers when it is asked of another server process than that of the session.
const OTHER_BACKEND: &str = "SQ011";

/// The watcher's task.
pub(super) struct Looking<'a> {
    client: &'a Client,
    watcher: &'a Watcher,
    life: Option<Life>,
    /// A session broke, and there is no new one yet.
    lost: bool,
    /// Since when owners are missing, by the group in whose full looks they are, and their number.
    missing: HashMap<(i64, i64), Instant>,
    /// When the next look is allowed.
    rested: Instant,
    presence: Presence,
    trouble: Backoff,
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
    pub(super) fn new(client: &'a Client) -> Self {
        Self {
            client,
            watcher: &client.inner.watcher,
            life: None,
            lost: false,
            missing: HashMap::new(),
            rested: Instant::now(),
            presence: Presence::new(),
            trouble: Backoff::new(TROUBLE),
        }
    }

    pub(super) async fn run(mut self) {
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
                Ok(()) => self.trouble.reset(),
                Err(error) => {
                    let pause = self.trouble.pause();
                    tracing::warn!(
                        error = &error as &dyn std::error::Error,
                        "could not look for messages; trying again in {pause:?}"
                    );
                    let watched = self.watcher.watched();
                    if self.look(&watched, Instant::now()).await.is_err() {
                        // Nobody knows what there is: consumers are to see for themselves.
                        watched.iter().for_each(|group| group.tell(Seen::ANYTHING));
                    }
                    tokio::time::sleep(pause).await;
                }
            }
        }
    }

    /// Sees to it that there is a session, and looks or waits.
    async fn step(&mut self) -> Result<()> {
        #[cfg(test)]
        self.client.inner.faults.strike(crate::supervision::Task::Watcher);
        self.connect().await?;
        let delayed = &self.watcher.delayed;
        for stream in self.watcher.rung.take() {
            if self.watcher.watched().iter().any(|group| group.stream == -stream) {
                delayed.ring(-stream);
            }
            for group in self.watcher.watched().iter().filter(|g| g.stream == stream) {
                group.ring();
            }
        }
        let now = Instant::now();
        let watched = self.watcher.watched();
        Delayed::move_due(self.client);
        self.presence.note(self.client, &watched);
        let next = match delayed.is_rung() {
            true => Some(now),
            false => watched.iter().map(|group| group.state().due()).min(),
        };
        match next {
            Some(next) if next.max(self.rested) <= now => self.look(&watched, now).await,
            _ => {
                let next = next.map_or(now + PACE.1, |next| next.max(self.rested));
                let next = delayed.next().map_or(next, |due| due.min(next));
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
        let delayed = &self.watcher.delayed;
        delayed.keep(&watched.iter().map(|group| group.stream).collect());
        let in_full: BTreeSet<i64> = streams
            .iter()
            .zip(&full)
            .filter(|(_, full)| **full)
            .map(|(stream, _)| *stream)
            .collect();
        let (of_streams, from) = delayed.to_look_at(&in_full);
        let params: [&(dyn ToSql + Sync); 8] =
            [&streams, &groups, &known, &due_from, &full, &judge, &of_streams, &from];
        let (looks, due) = self.ask(params).await?;
        for stream in of_streams {
            let due = due.iter().find(|(of, _)| *of == stream);
            delayed.seen(stream, due.map(|(_, due_in)| *due_in));
        }
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
            if full.is_some() {
                if look.claimed < state.stood {
                    state.claimed = 0;
                }
                state.stood = look.claimed;
            }
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

    /// What is to be said of groups, and of which streams delayed messages are due in so many milliseconds.
    async fn ask(&self, params: [&(dyn ToSql + Sync); 8]) -> Result<(Vec<Look>, Vec<(i64, i64)>)> {
        let doing = "look for messages";
        let query = &self.client.inner.queries.watch;
        let session = self.watcher.session.lock().await;
        let session = session.as_ref().filter(|session| !session.is_broken());
        // Only the session has to be what it was.
        let backend = session.and_then(|session| session.life).map(|life| life.backend);
        let [streams, groups, known, due_from, full, judge, of_streams, from] = params;
        let params = &[streams, groups, known, due_from, full, judge, &backend, of_streams, from];
        let rows = match session {
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
        let stream = |row: &Row| row.get::<_, Option<i64>>(11);
        let due = rows.iter().filter_map(|row| Some((stream(row)?, row.get(12)))).collect();
        let looks = rows
            .iter()
            .filter(|row| stream(row).is_none())
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
            .collect();
        Ok((looks, due))
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
