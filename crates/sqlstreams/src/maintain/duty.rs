//! Maintenance beside the consumers of a client: a task on the client's own thread, as long as something is consumed.

use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::FutureExt;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::StepRun;
use super::maintainer::Maintainer;
use crate::backoff::jitter;
use crate::client::Client;

/// Whoever consumes for a moment only is not to do it.
const FIRST: Duration = Duration::from_secs(2);
/// How long a consumer that ends waits for the lease to be given back.
const LAST: Duration = Duration::from_secs(1);
/// The pause after a panic.
const AGAIN: Duration = Duration::from_secs(30);

/// The consumers of a client, as far as maintenance goes.
#[derive(Debug)]
pub(crate) struct Duty {
    /// Whether consumers do it.
    wanted: bool,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    consumers: usize,
    running: Option<(CancellationToken, JoinHandle<()>)>,
}

/// Held by a consumer.
#[derive(Debug)]
pub(crate) struct OnDuty {
    client: Client,
    left: bool,
}

impl Duty {
    pub(crate) fn new(wanted: bool) -> Self {
        Self { wanted, state: Mutex::default() }
    }

    /// A consumer has started.
    pub(crate) fn join(client: &Client) -> OnDuty {
        let duty = &client.inner.duty;
        let mut state = duty.state();
        state.consumers += 1;
        if duty.wanted && state.running.is_none() {
            let stop = CancellationToken::new();
            let task = supervise(client.clone(), stop.clone());
            state.running = Some((stop, client.inner.background.handle().spawn(task)));
        }
        OnDuty { client: client.clone(), left: false }
    }

    /// One has ended. If it was the last one, so does the task.
    fn leave(&self) -> Option<JoinHandle<()>> {
        let mut state = self.state();
        state.consumers = state.consumers.saturating_sub(1);
        if state.consumers > 0 {
            return None;
        }
        let (stop, task) = state.running.take()?;
        stop.cancel();
        Some(task)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl OnDuty {
    /// The consumer has ended. Waits, but not for long, until another process may go on with the maintenance.
    pub(crate) async fn end(mut self) {
        self.left = true;
        if let Some(task) = self.client.inner.duty.leave() {
            let _ = tokio::time::timeout(LAST, task).await;
        }
    }
}

impl Drop for OnDuty {
    fn drop(&mut self) {
        if !self.left {
            self.client.inner.duty.leave();
        }
    }
}

/// Keeps the task alive until it is stopped.
async fn supervise(client: Client, stop: CancellationToken) {
    let mut pause = FIRST.mul_f64(jitter());
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(pause) => {}
        }
        let maintainer =
            Maintainer::new(client.clone(), stop.clone(), Arc::new(Mutex::new(|_: &StepRun| {})));
        if AssertUnwindSafe(maintainer.run()).catch_unwind().await.is_ok() {
            return;
        }
        tracing::error!("the task that does the maintenance has panicked; it is started again");
        pause = AGAIN;
    }
}
