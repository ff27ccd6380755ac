//! Schedules, beside the other steps: they are due to the second, and a partition that is written anew may take longer.

use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::maintainer::{Due, OnStep, run_step};
use super::step::Step;
use crate::backoff::Backoff;
use crate::client::Client;

/// The pause after trouble, growing from the first to the second.
const TROUBLE: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(4));
/// Until somebody says when.
const LONG: Duration = Duration::from_secs(24 * 3600);

/// A task that fires schedules when they are due, as long as whoever has it holds the lease. Dropped, it ends after what it is at; should
/// another one fire by then, none is fired twice.
pub(super) struct Firing {
    due: watch::Sender<Instant>,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Firing {
    /// Starts with the first that is due.
    pub(super) fn start(client: &Client, on_step: &OnStep, due: Instant) -> Self {
        let (sender, receiver) = watch::channel(due);
        let stop = CancellationToken::new();
        let task = fire(client.clone(), on_step.clone(), receiver, stop.clone());
        Self { due: sender, stop, task: tokio::spawn(task) }
    }

    /// The next is due then, or sooner. False where the task has ended, by a panic.
    pub(super) fn tell(&self, due: Instant) -> bool {
        !self.task.is_finished() && self.due.send(due).is_ok()
    }
}

impl Drop for Firing {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

async fn fire(
    client: Client,
    on_step: OnStep,
    mut told: watch::Receiver<Instant>,
    stop: CancellationToken,
) {
    let mut due = *told.borrow_and_update();
    let mut trouble = Backoff::new(TROUBLE);
    loop {
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            changed = told.changed() => match changed {
                Ok(()) => due = due.min(*told.borrow_and_update()),
                Err(_) => return,
            },
            () = tokio::time::sleep_until(due.into()) => {
                let step = Due { step: Step::Schedules, stream: None, name: None };
                let pause = match run_step(&client, step, &on_step).await {
                    Ok(ran) => {
                        trouble.reset();
                        // After a failure the next pass says when.
                        ran.wake.unwrap_or(LONG).min(LONG)
                    }
                    Err(_) => trouble.pause(),
                };
                due = Instant::now() + pause;
            }
        }
    }
}
