//! The client's connections: how many there may be, what for, and those that are idle.
//!
//! A place is the right to have a connection. There are `pool_size` of them, divided between the client's own calls and
//! handlers' transactions: as many for handlers as consumers have reserved, but one is always left for the rest. A place that
//! is taken when it is to change sides does so as soon as it is given back. A side never has more connections, idle or in use,
//! than places, so both together never have more than `pool_size`; those that are being closed have their place still.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::FutureExt;
use tokio::runtime::{Handle, Id};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};
use tokio_postgres::{CancelToken, Client as PgClient};

use crate::background::Background;
use crate::client::{SOON, answered};
use crate::connect::Connector;
use crate::error::{Error, Result};

/// How long the client's own calls wait for a connection.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long the server may take to let go of a connection that is closed while something runs on it.
const LET_GO: Duration = Duration::from_secs(5);
/// The pause between two requests to cancel what runs.
const CANCEL_AGAIN: Duration = Duration::from_millis(250);
const WATCH_CLIENT: &str = "SET client_connection_check_interval = '500ms'";
/// Ends a transaction that somebody still uses: what they send after this finds no connection.
const HANG_UP: &str = "ROLLBACK; SELECT pg_terminate_backend(pg_backend_pid())";

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum For {
    /// The client's own calls: such connections live on its thread.
    Calls,
    /// A handler's transaction: they live on the runtime of the handler, as every answer would have to cross over otherwise.
    Handlers,
}

/// Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Pool(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    connector: Connector,
    background: Handle,
    target: String,
    size: usize,
    /// The free places of each side.
    free: [Semaphore; 2],
    /// How many wait for one.
    waiting: [AtomicUsize; 2],
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// How many handlers all consumers together want to run at once.
    wanted: usize,
    shares: [Share; 2],
}

/// What one side has.
#[derive(Debug, Default)]
struct Share {
    /// How many places it ought to have.
    due: usize,
    /// How many it has, free or taken.
    places: usize,
    /// What was used last is last, and used first: its backend's caches are warm.
    idle: Vec<Opened>,
}

/// An open connection. Dropped, it is closed once what is under way has ended.
#[derive(Debug)]
struct Opened {
    client: Arc<PgClient>,
    driver: JoinHandle<Option<tokio_postgres::Error>>,
    /// The runtime of the driver.
    runtime: Id,
}

/// A place that is taken.
#[derive(Debug)]
struct Place {
    pool: Arc<Inner>,
    side: For,
}

/// A connection in use. Dropped, it goes back to the pool.
#[derive(Debug)]
pub(crate) struct Pooled {
    /// `None` only on its way out.
    opened: Option<Opened>,
    place: Place,
}

/// Connections for so many handlers, as far as there are so many, until it is dropped.
#[derive(Debug)]
pub(crate) struct Reserved {
    pool: Pool,
    handlers: usize,
}

impl Pool {
    /// None is opened yet.
    pub(crate) fn new(
        connector: Connector,
        background: &Background,
        target: String,
        size: usize,
    ) -> Self {
        let calls = Share { due: size, places: size, idle: Vec::new() };
        Self(Arc::new(Inner {
            connector,
            background: background.handle().clone(),
            target,
            size,
            free: [Semaphore::new(size), Semaphore::new(0)],
            waiting: Default::default(),
            state: Mutex::new(State { wanted: 0, shares: [calls, Share::default()] }),
        }))
    }

    /// One for a call of the client's; `doing` is for the error.
    pub(crate) async fn get(&self, doing: &str) -> Result<Pooled> {
        let place = timeout(PATIENCE, self.place(For::Calls)).await;
        self.connect(place.map_err(|_| Error::no_connection(doing, &self.0.target))?).await
    }

    /// One for a handler, however long that takes. The driver runs on the runtime of the caller.
    pub(crate) async fn get_for_handler(&self) -> Result<Pooled> {
        self.connect(self.place(For::Handlers).await).await
    }

    /// Several consumers share what they have reserved.
    pub(crate) fn reserve(&self, handlers: usize) -> Reserved {
        self.0.reserve(|wanted| wanted + handlers);
        Reserved { pool: self.clone(), handlers }
    }

    /// Whether a handler waits for a connection.
    pub(crate) fn is_waited_for(&self) -> bool {
        self.0.waiting[For::Handlers as usize].load(Ordering::Relaxed) > 0
    }

    /// Closes the idle ones: what broke one connection has probably broken the others.
    pub(crate) fn close_idle(&self) {
        for share in &mut self.0.lock().shares {
            share.idle.clear();
        }
    }

    async fn place(&self, side: For) -> Place {
        let waiting = Waiting::new(&self.0.waiting[side as usize]);
        // Never closed.
        if let Ok(permit) = self.0.free[side as usize].acquire().await {
            permit.forget();
        }
        drop(waiting);
        Place { pool: self.0.clone(), side }
    }

    async fn connect(&self, place: Place) -> Result<Pooled> {
        let Inner { connector, background, target, .. } = &*self.0;
        let runtime = match place.side {
            For::Calls => background.id(),
            For::Handlers => Handle::current().id(),
        };
        if let Some(opened) = self.0.lock().shares[place.side as usize].take(runtime) {
            return Ok(Pooled { opened: Some(opened), place });
        }
        let opened = match place.side {
            For::Handlers => connector.connect().await,
            For::Calls => {
                let connector = connector.clone();
                let connecting = background.spawn(async move { connector.connect().await });
                // The task ends early only with the runtime, that is, with the client.
                connecting.await.unwrap_or_else(|_| Err(crate::connect::timed_out()))
            }
        };
        let (client, driver) = opened.map_err(|e| Error::from_connect(e, target))?;
        if place.side == For::Handlers {
            watch_client(&client).await?;
        }
        Ok(Pooled { opened: Some(Opened { client: Arc::new(client), driver, runtime }), place })
    }
}

/// Lets the server look, while a statement runs, whether the client is still there; not every platform can.
async fn watch_client(connection: &PgClient) -> Result<()> {
    match answered(SOON, connection.batch_execute(WATCH_CLIENT), "open a connection").await {
        Err(error) if error.is_of_connection() => Err(error),
        Err(error) => {
            tracing::debug!(setting = WATCH_CLIENT, %error, "not available here");
            Ok(())
        }
        Ok(()) => Ok(()),
    }
}

impl Inner {
    fn reserve(&self, change: impl FnOnce(usize) -> usize) {
        let mut state = self.lock();
        state.wanted = change(state.wanted);
        let handlers = state.wanted.min(self.size.saturating_sub(1));
        state.shares[For::Handlers as usize].due = handlers;
        state.shares[For::Calls as usize].due = self.size - handlers;
        self.balance(&mut state);
    }

    /// Moves free places to where they ought to be.
    fn balance(&self, State { shares, .. }: &mut State) {
        for (share, free) in shares.iter_mut().zip(&self.free) {
            let surplus = share.places.saturating_sub(share.due);
            share.places -= free.forget_permits(surplus);
            if surplus > 0 {
                // What is out has a place, so for these there are only the free ones.
                let unplaced = share.idle.len().saturating_sub(free.available_permits());
                share.idle.drain(..unplaced);
            }
        }
        let mut unassigned = self.size - shares.iter().map(|share| share.places).sum::<usize>();
        for (share, free) in shares.iter_mut().zip(&self.free) {
            let more = share.due.saturating_sub(share.places).min(unassigned);
            share.places += more;
            unassigned -= more;
            free.add_permits(more);
        }
    }

    /// Nothing panics while it holds the lock.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Share {
    /// An idle connection of this runtime: others may be blocked by what else they run. Without one, another has to make room.
    fn take(&mut self, runtime: Id) -> Option<Opened> {
        while let Some(place) = self.idle.iter().rposition(|opened| opened.runtime == runtime) {
            let opened = self.idle.remove(place);
            if !opened.client.is_closed() {
                return Some(opened);
            }
        }
        if !self.idle.is_empty() {
            self.idle.remove(0);
        }
        None
    }

    /// Whether the next place that is given back goes to the other side.
    fn has_too_much(&self) -> bool {
        self.places > self.due
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.pool.lock();
        let share = &mut state.shares[self.side as usize];
        if share.has_too_much() {
            share.places -= 1;
            self.pool.balance(&mut state);
        } else {
            self.pool.free[self.side as usize].add_permits(1);
        }
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.pool.0.reserve(|wanted| wanted - self.handlers);
    }
}

impl Pooled {
    /// Closes it at once: it is of no use any more.
    pub(crate) fn close(mut self) {
        if let Some(opened) = self.opened.take() {
            opened.driver.abort();
        }
    }

    /// For the handler.
    pub(crate) fn share(&self) -> Arc<PgClient> {
        self.opened().client.clone()
    }

    /// Whether somebody still has it who was [given](Self::share) it.
    pub(crate) fn is_shared(&self) -> bool {
        Arc::strong_count(&self.opened().client) > 1
    }

    /// What broke it, as far as that is known.
    pub(crate) fn reason(mut self) -> Option<tokio_postgres::Error> {
        self.opened.take()?.driver.now_or_never()?.ok()?
    }

    /// Closes it whatever runs on it and whoever has it, and cancels what runs. Its place is free again once the server has let
    /// go of it, or has not for long.
    pub(crate) fn abandon(mut self) {
        let Some(Opened { client, driver, .. }) = self.opened.take() else { return };
        let token = client.cancel_token();
        if Arc::strong_count(&client) > 1 {
            // On its way at the first poll, before whatever the others send from now on.
            let _ = client.batch_execute(HANG_UP).now_or_never();
        }
        drop(client);
        let background = self.place.pool.background.clone();
        background.spawn(async move {
            let connector = self.place.pool.connector.clone();
            close_busy(&connector, &token, driver).await;
            drop(self);
        });
    }

    fn opened(&self) -> &Opened {
        match &self.opened {
            Some(opened) => opened,
            None => unreachable!("what takes it out consumes this"),
        }
    }
}

/// Until the connection is closed. What runs is cancelled more than once: it may have been on its way the first time.
async fn close_busy(
    connector: &Connector,
    token: &CancelToken,
    mut driver: JoinHandle<Option<tokio_postgres::Error>>,
) {
    let limit = Instant::now() + LET_GO;
    while Instant::now() < limit && !driver.is_finished() {
        if let Ok(Err(error)) = timeout(LET_GO, connector.cancel(token)).await {
            tracing::debug!(
                error = &error as &dyn std::error::Error,
                "could not cancel what a handler has left running"
            );
        }
        if timeout(CANCEL_AGAIN, &mut driver).await.is_ok() {
            return;
        }
    }
    driver.abort();
}

impl Deref for Pooled {
    type Target = PgClient;

    fn deref(&self) -> &PgClient {
        &self.opened().client
    }
}

impl DerefMut for Pooled {
    fn deref_mut(&mut self) -> &mut PgClient {
        match self.opened.as_mut().and_then(|opened| Arc::get_mut(&mut opened.client)) {
            Some(client) => client,
            None => unreachable!("only handlers' connections are shared"),
        }
    }
}

impl Drop for Pooled {
    fn drop(&mut self) {
        let Some(opened) = self.opened.take() else { return };
        if opened.client.is_closed() {
            return;
        }
        let mut state = self.place.pool.lock();
        let share = &mut state.shares[self.place.side as usize];
        // Before its place is given back: whoever gets that has to find it.
        if !share.has_too_much() {
            share.idle.push(opened);
        }
    }
}

/// Counted as long as it lasts.
struct Waiting<'a>(&'a AtomicUsize);

impl<'a> Waiting<'a> {
    fn new(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
