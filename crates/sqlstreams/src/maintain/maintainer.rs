//! Whoever does the maintenance, or waits for whoever does to be gone.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio_postgres::types::ToSql;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::StepRun;
use super::firing::Firing;
use super::step::{self, Step};
use crate::backoff::{Backoff, jitter};
use crate::client::Client;
use crate::error::{Error, ErrorKind, Result};

/// How long the lease lasts. Whoever holds it is replaced so soon after its death, and the second that others take to notice.
const LEASE: Duration = Duration::from_secs(10);
/// The pause between two passes, each of which renews it.
const PACE: Duration = Duration::from_secs(4);
/// The pause where something is left to do, so that others have the server in between.
const REST: Duration = Duration::from_secs(1);
/// The pause between two renewals while steps are running.
const RENEW: Duration = Duration::from_secs(3);
/// By how much others are late for a lease that ran out, at most: not all of them at once.
const OTHERS: Duration = Duration::from_secs(1);
/// How long steps that nobody waits for may hold up the next pass, which may have some that are urgent.
const PATIENCE: Duration = Duration::from_secs(3);
/// The pause after trouble, growing from the first to the second.
const TROUBLE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// The pause where the role may not do it, or there is no schema.
const NOT_HERE: Duration = Duration::from_secs(300);
/// After schedules were changed.
const TOGETHER: Duration = Duration::from_millis(50);

/// Called with each step that was run.
pub(super) type OnStep = Arc<Mutex<dyn FnMut(&StepRun) + Send>>;

pub(super) struct Maintainer {
    client: Client,
    holder: Uuid,
    name: String,
    stop: CancellationToken,
    on_step: OnStep,
    /// It holds the lease, as far as it knows.
    holds: bool,
    /// Whether schedules are fired beside the passes, and who does that.
    beside: bool,
    firing: Option<Firing>,
}

/// What came of a pass.
pub(super) enum Pass {
    /// It was ours: so many steps were run, and the next is due then, if that is known.
    Done { ran: usize, again: Again, next: Option<Duration> },
    /// Somebody else does it, for so long yet.
    Elsewhere(Duration),
}

/// Whether something was left to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Again {
    No,
    Soon,
    AtOnce,
}

/// A step that is due.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Due {
    pub(super) step: Step,
    pub(super) stream: Option<i64>,
    pub(super) name: Option<String>,
}

/// What came of a step.
pub(super) struct Ran {
    again: Again,
    /// In how long there will be more to do, if that is known.
    pub(super) wake: Option<Duration>,
}

impl Maintainer {
    pub(super) fn new(client: Client, stop: CancellationToken, on_step: OnStep) -> Self {
        Self {
            client,
            holder: Uuid::new_v4(),
            name: name(),
            stop,
            on_step,
            holds: false,
            beside: false,
            firing: None,
        }
    }

    /// Until it is stopped.
    pub(super) async fn run(mut self) {
        self.beside = true;
        let rung = self.client.inner.watcher.schedules_changed();
        let mut trouble = Backoff::new(TROUBLE);
        while !self.stop.is_cancelled() {
            let pause = match self.pass().await {
                Ok(pass) => {
                    trouble.reset();
                    match pass {
                        Pass::Done { again: Again::AtOnce, .. } => Duration::ZERO,
                        Pass::Done { again: Again::Soon, .. } => REST,
                        Pass::Done { next, .. } => next.map_or(PACE, |next| next.min(PACE)),
                        Pass::Elsewhere(remaining) => {
                            remaining.min(LEASE) + OTHERS.mul_f64(jitter())
                        }
                    }
                }
                Err(error) => {
                    let pause = match error.kind() {
                        ErrorKind::PermissionDenied | ErrorKind::SchemaMissing => NOT_HERE,
                        _ => trouble.pause(),
                    };
                    let cause = &error as &dyn std::error::Error;
                    match error.kind() {
                        // Others will.
                        ErrorKind::PermissionDenied => {
                            tracing::debug!(error = cause, "not doing the maintenance");
                        }
                        _ => tracing::info!(
                            error = cause,
                            "cannot do the maintenance; trying again in {pause:?}"
                        ),
                    }
                    pause
                }
            };
            tokio::select! {
                () = self.stop.cancelled() => {}
                () = tokio::time::sleep(pause) => {}
                // Many are changed at a time, as a rule.
                () = rung.notified(), if self.holds => tokio::time::sleep(TOGETHER).await,
            }
        }
        self.firing = None;
        self.release().await;
    }

    /// Renews the lease and does what is due of all streams, the urgent steps first. Those that are not may be left to the next pass.
    pub(super) async fn pass(&mut self) -> Result<Pass> {
        let (mut due, mut next, mut after) = (Vec::new(), None, 0_i64);
        loop {
            let seconds = LEASE.as_secs_f64();
            let params: [&(dyn ToSql + Sync); 4] = [&self.holder, &self.name, &seconds, &after];
            let look = &self.client.inner.queries.maintenance_look;
            let rows = self.client.ask(look, &params, "look for maintenance").await?;
            let first = rows.first().ok_or_else(|| {
                Error::new(ErrorKind::Database, "no answer from maintenance_look")
            })?;
            self.holds = first.get(0);
            if !self.holds {
                self.firing = None;
                return Ok(Pass::Elsewhere(milliseconds(first.get(1))));
            }
            for row in rows.iter().skip(1) {
                let Some(step) = Step::from_name(row.get(3)) else { continue };
                let due_in = milliseconds(row.get(5));
                if step == Step::Schedules && self.beside {
                    self.fire(due_in);
                    continue;
                }
                match due_in {
                    Duration::ZERO => due.push(Due { step, stream: row.get(4), name: row.get(6) }),
                    later => next = Some(next.map_or(later, |next: Duration| next.min(later))),
                }
            }
            match first.get(2) {
                Some(further) => after = further,
                None => break,
            }
        }
        due.sort_unstable();
        // Those of the installation come with each part of the streams.
        due.dedup();
        let (ran, again) = self.work(due).await?;
        Ok(Pass::Done { ran, again, next })
    }

    /// Schedules are due then.
    fn fire(&mut self, due_in: Duration) {
        let now = Instant::now();
        let due = now.checked_add(due_in).unwrap_or(now + LEASE);
        if !self.firing.as_ref().is_some_and(|firing| firing.tell(due)) {
            self.firing = Some(Firing::start(&self.client, &self.on_step, due));
        }
    }

    /// Runs steps, and renews the lease meanwhile. Ends early when that is lost.
    async fn work(&mut self, due: Vec<Due>) -> Result<(usize, Again)> {
        let lost = AtomicBool::new(false);
        let Self { client, holder, name, stop, on_step, .. } = self;
        let working = async {
            let (begun, mut ran, mut again) = (Instant::now(), 0, Again::No);
            for due in due {
                if stop.is_cancelled() || lost.load(Ordering::Relaxed) {
                    break;
                }
                if !due.step.is_urgent() && begun.elapsed() > PATIENCE {
                    again = again.max(Again::Soon);
                    break;
                }
                again = again.max(run_step(client, due, on_step).await?.again);
                ran += 1;
            }
            Ok((ran, again))
        };
        let renewing = async {
            loop {
                tokio::time::sleep(RENEW).await;
                let seconds = LEASE.as_secs_f64();
                let params: [&(dyn ToSql + Sync); 3] = [holder, name, &seconds];
                let hold = &client.inner.queries.hold_maintenance;
                // An error says nothing: the next time, or the next pass, tells.
                if let Ok(rows) = client.ask(hold, &params, "go on with the maintenance").await {
                    let held = rows.first().is_some_and(|row| row.get(0));
                    lost.store(!held, Ordering::Relaxed);
                }
            }
        };
        tokio::select! {
            worked = working => worked,
            () = renewing => unreachable!("it never ends"),
        }
    }

    /// Gives the lease back, so that others need not wait for it to run out.
    pub(super) async fn release(&mut self) {
        if std::mem::take(&mut self.holds) {
            let release = &self.client.inner.queries.release_maintenance;
            let doing = "give the maintenance back";
            if let Err(error) = self.client.ask(release, &[&self.holder], doing).await {
                tracing::debug!(%error, "the lease of the maintenance runs out by itself");
            }
        }
    }
}

/// Runs one step and records what came of it. Returns whether it is to be run again. Fails only where the database cannot be reached.
pub(super) async fn run_step(
    client: &Client,
    Due { step, stream, name }: Due,
    on_step: &OnStep,
) -> Result<Ran> {
    let begun = Instant::now();
    let came = step.run(client, stream).await;
    let took = begun.elapsed();
    let wake = came.as_ref().ok().and_then(|done| done.wake);
    let ran = |again| Ok(Ran { again, wake });
    let error = match &came {
        // It was dropped meanwhile.
        Err(error) if error.kind() == ErrorKind::UnknownStream => return ran(Again::No),
        Err(error) => Some(error),
        Ok(_) => None,
    };
    if let Some(error) = error {
        let error = error as &dyn std::error::Error;
        tracing::warn!(
            step = step.name(),
            stream = name,
            error,
            "a step of the maintenance has failed"
        );
    }
    let told =
        StepRun { step: step.name(), stream: name, took, error: error.map(ToString::to_string) };
    on_step.lock().unwrap_or_else(PoisonError::into_inner)(&told);
    let recorded = step::record(client, step.name(), stream, took, came.as_ref()).await;
    match (came, recorded) {
        (Err(error), _) if error.is_of_connection() => Err(error),
        (_, Err(error)) => Err(error),
        (Ok(done), Ok(())) if done.urgent => ran(Again::AtOnce),
        (Ok(done), Ok(())) if done.more => ran(Again::Soon),
        (_, Ok(())) => ran(Again::No),
    }
}

fn milliseconds(count: Option<i64>) -> Duration {
    Duration::from_millis(u64::try_from(count.unwrap_or_default()).unwrap_or_default())
}

/// What a process calls itself, for people.
fn name() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    match host.trim() {
        "" => format!("process {}", std::process::id()),
        host => format!("process {} on {host}", std::process::id()),
    }
}
