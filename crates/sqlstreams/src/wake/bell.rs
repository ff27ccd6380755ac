//! The producers' side of wake-ups: a ring after the commit, by whoever commits or else by a task, for all streams at once.
//!
//! Nobody waits for it, and nothing depends on it.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio_postgres::types::ToSql;

use crate::client::{Client, run};
use crate::error::Result;

/// From the beginning of a ring to that of the next at least: who rings meanwhile is part of that.
const APART: Duration = Duration::from_millis(1);
/// One that took so long says that the database is busy: there is none for as long again.
const SLOW: Duration = Duration::from_millis(5);

#[derive(Debug, Default)]
pub(crate) struct Bell {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Streams to ring for.
    streams: BTreeSet<i64>,
    ringing: bool,
    /// When the last ring began that was not the task's.
    last: Option<Instant>,
}

/// The right to ring now, on a connection of the caller's. Who rings meanwhile waits for its end.
#[derive(Debug)]
pub(crate) struct Turn(Client);

impl Turn {
    /// Rings for a stream, and does so once more if that fails.
    pub(crate) async fn ring(
        &self,
        connection: &tokio_postgres::Client,
        stream: i64,
    ) -> Result<(), tokio_postgres::Error> {
        let params: [&(dyn ToSql + Sync); 2] = [&vec![stream], &self.0.schema()];
        let rang = run(connection, &self.0.inner.queries.ring, &params).await;
        if rang.is_err() {
            self.0.inner.bell.lock().streams.insert(stream);
        }
        rang.map(drop)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut state = self.0.inner.bell.lock();
        if state.streams.is_empty() {
            state.ringing = false;
        } else {
            self.0.inner.background.handle().spawn(ring_all(Ringing(self.0.clone())));
        }
    }
}

impl Bell {
    /// Rings for a stream soon.
    pub(crate) fn ring(client: &Client, stream: i64) {
        let bell = &client.inner.bell;
        let mut state = bell.lock();
        state.streams.insert(stream);
        if !std::mem::replace(&mut state.ringing, true) {
            client.inner.background.handle().spawn(ring_all(Ringing(client.clone())));
        }
    }

    /// The right to ring now, unless somebody rings or has just done so.
    pub(crate) fn turn(client: &Client) -> Option<Turn> {
        let now = Instant::now();
        let mut state = client.inner.bell.lock();
        let rested = state.last.is_none_or(|last| now.duration_since(last) >= APART);
        if state.ringing || !rested {
            return None;
        }
        (state.ringing, state.last) = (true, Some(now));
        Some(Turn(client.clone()))
    }

    /// The streams to ring for now; when there are none, the task that asks ends.
    fn take(&self) -> Option<Vec<i64>> {
        let mut state = self.lock();
        let streams: Vec<i64> = std::mem::take(&mut state.streams).into_iter().collect();
        state.ringing = !streams.is_empty();
        state.ringing.then_some(streams)
    }

    #[cfg(test)]
    pub(crate) fn is_ringing(&self) -> bool {
        self.lock().ringing
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The task that rings. Should it panic, the next ring starts another.
struct Ringing(Client);

impl Drop for Ringing {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.inner.bell.lock().ringing = false;
        }
    }
}

/// Rings until there is nobody to ring for. A task by itself, that lives no longer than there is something to do.
async fn ring_all(ringing: Ringing) {
    let Ringing(client) = &ringing;
    while let Some(streams) = client.inner.bell.take() {
        #[cfg(test)]
        client.inner.faults.strike(crate::supervision::Task::Bell);
        let started = Instant::now();
        if let Err(error) = ring(client, &streams).await {
            tracing::debug!(
                error = &error as &dyn std::error::Error,
                "could not ring for consumers"
            );
        }
        let took = started.elapsed();
        let rest = if took < SLOW { APART.saturating_sub(took) } else { took };
        if !rest.is_zero() {
            tokio::time::sleep(rest).await;
        }
    }
}

async fn ring(client: &Client, streams: &[i64]) -> Result<()> {
    let doing = "wake consumers";
    let params: [&(dyn ToSql + Sync); 2] = [&streams, &client.schema()];
    client.ask(&client.inner.queries.ring, &params, doing).await.map(drop)
}
