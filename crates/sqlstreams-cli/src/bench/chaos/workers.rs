//! The worker processes: started, killed, frozen, restarted.

use std::os::unix::process::ExitStatusExt;
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use rustix::process::{Pid, Signal, kill_process};
use serde::Serialize;
use tokio::process::{Child, ChildStdin, Command};

use super::groups::LEASE;
use crate::context::Context;

/// How long a worker may take to stop when it is asked to.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// How often they are looked at.
pub(crate) const TICK: Duration = Duration::from_millis(20);

/// What was done to them, and what they did.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(crate) struct Done {
    /// `kill -9`, then started again.
    pub(crate) killed: u64,
    /// SIGSTOP, and SIGCONT after a while.
    pub(crate) frozen: u64,
    /// How many of these were frozen for longer than a lease lasts.
    pub(crate) frozen_beyond_lease: u64,
    /// SIGTERM, then started again.
    pub(crate) restarted: u64,
    /// Workers that ended by themselves, or with an error, or not when they were asked to.
    pub(crate) failed: u64,
}

/// All of them. Dropped, they are killed.
#[derive(Debug)]
pub(crate) struct Workers {
    start: Start,
    slots: Vec<Slot>,
    done: Done,
}

/// What a worker needs to know.
#[derive(Debug)]
struct Start {
    url: String,
    schema: String,
    stream: String,
    failures: u8,
    verbosity: u8,
}

/// One worker, as long as it is not replaced.
#[derive(Debug)]
struct Slot {
    child: Child,
    /// Ends the worker when it is closed. Apart, since waiting for a child closes what it has.
    _lifeline: Option<ChildStdin>,
    /// How many there were in its place.
    incarnation: u32,
    state: State,
}

#[derive(Debug, Clone, Copy)]
enum State {
    Running,
    Frozen {
        since: Instant,
        until: Instant,
    },
    /// Was asked to stop.
    Stopping {
        until: Instant,
    },
}

impl Workers {
    /// Starts so many.
    pub(crate) fn start(
        context: &Context,
        url: &str,
        stream: &str,
        count: usize,
        failures: u8,
    ) -> anyhow::Result<Self> {
        let start = Start {
            url: url.to_owned(),
            schema: context.schema().to_owned(),
            stream: stream.to_owned(),
            failures,
            verbosity: context.verbosity(),
        };
        let slots = (0..count).map(|place| start.slot(place, 0)).collect::<anyhow::Result<_>>()?;
        Ok(Self { start, slots, done: Done::default() })
    }

    pub(crate) fn count(&self) -> usize {
        self.slots.len()
    }

    /// Those that are neither frozen nor stopping.
    pub(crate) fn running(&self) -> Vec<usize> {
        let is_running = |place: &usize| matches!(self.slots[*place].state, State::Running);
        (0..self.slots.len()).filter(is_running).collect()
    }

    /// Kills one, frozen or not, and starts another.
    pub(crate) async fn kill(&mut self, place: usize) -> anyhow::Result<()> {
        tracing::info!("worker {place}: kill -9");
        self.slots[place].child.kill().await.context("could not kill a worker")?;
        self.done.killed += 1;
        self.replace(place)
    }

    /// Freezes one that runs for so long.
    pub(crate) fn freeze(&mut self, place: usize, time: Duration) {
        tracing::info!("worker {place}: frozen for {time:?}");
        let now = Instant::now();
        self.slots[place].signal(Signal::STOP);
        self.slots[place].state = State::Frozen { since: now, until: now + time };
        self.done.frozen += 1;
    }

    /// Has one stop as a deployment would; another is started when it has.
    pub(crate) fn restart(&mut self, place: usize) {
        tracing::info!("worker {place}: SIGTERM");
        self.slots[place].ask_to_stop();
        self.done.restarted += 1;
    }

    /// Looks after them: thaws whose time is up, and replaces who has ended.
    pub(crate) async fn look_after(&mut self) -> anyhow::Result<()> {
        for place in 0..self.slots.len() {
            if self.has_ended(place).await? {
                self.replace(place)?;
            }
        }
        Ok(())
    }

    /// Thaws all of them.
    pub(crate) fn thaw_all(&mut self) {
        (0..self.slots.len()).for_each(|place| self.thaw(place));
    }

    /// Stops all of them for good.
    pub(crate) async fn stop(mut self) -> anyhow::Result<Done> {
        self.thaw_all();
        self.slots.iter_mut().for_each(Slot::ask_to_stop);
        for place in 0..self.slots.len() {
            while !self.has_ended(place).await? {
                tokio::time::sleep(TICK).await;
            }
        }
        Ok(self.done)
    }

    /// Whether one has ended, properly or not.
    async fn has_ended(&mut self, place: usize) -> anyhow::Result<bool> {
        let now = Instant::now();
        let slot = &mut self.slots[place];
        let status = slot.child.try_wait().context("lost a worker")?;
        match (status, slot.state) {
            (Some(status), State::Stopping { .. }) if is_proper(status) => return Ok(true),
            (Some(status), _) => tracing::warn!("worker {place} ended by itself: {status}"),
            (None, State::Stopping { until }) if until <= now => {
                tracing::warn!("worker {place} did not stop within {STOP_TIMEOUT:?}");
                slot.child.kill().await.context("could not kill a worker")?;
            }
            (None, State::Frozen { until, .. }) if until <= now => {
                self.thaw(place);
                return Ok(false);
            }
            (None, _) => return Ok(false),
        }
        self.done.failed += 1;
        Ok(true)
    }

    fn thaw(&mut self, place: usize) {
        let slot = &mut self.slots[place];
        if let State::Frozen { since, .. } = slot.state {
            slot.signal(Signal::CONT);
            slot.state = State::Running;
            self.done.frozen_beyond_lease += u64::from(since.elapsed() > LEASE);
        }
    }

    fn replace(&mut self, place: usize) -> anyhow::Result<()> {
        let incarnation = self.slots[place].incarnation + 1;
        self.slots[place] = self.start.slot(place, incarnation)?;
        Ok(())
    }
}

impl Start {
    fn slot(&self, place: usize, incarnation: u32) -> anyhow::Result<Slot> {
        let program = std::env::current_exe().context("could not find this program")?;
        let mut command = Command::new(program);
        command
            .args(["bench", "chaos-worker", "--stream", &self.stream])
            .args(["--name", &format!("{place}.{incarnation}")])
            .args(["--failures", &self.failures.to_string()])
            // Not as an argument: it may hold a password.
            .env("DATABASE_URL", &self.url)
            .env("SQLSTREAMS_SCHEMA", &self.schema)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .kill_on_drop(true);
        match self.verbosity {
            // Of lost leases they may warn as they like; why one gave up is told all the same.
            0 => command.env("RUST_LOG", "off"),
            more => command.arg(format!("-{}", "v".repeat(usize::from(more)))),
        };
        let mut child = command.spawn().context("could not start a worker")?;
        Ok(Slot { _lifeline: child.stdin.take(), child, incarnation, state: State::Running })
    }
}

impl Slot {
    fn ask_to_stop(&mut self) {
        if !matches!(self.state, State::Stopping { .. }) {
            self.signal(Signal::TERM);
            self.state = State::Stopping { until: Instant::now() + STOP_TIMEOUT };
        }
    }

    /// A process that has ended takes no signals, and its id is not reused before it was waited for.
    fn signal(&self, signal: Signal) {
        let pid = self.child.id().and_then(|id| Pid::from_raw(id.cast_signed()));
        if let Some(pid) = pid {
            let _ = kill_process(pid, signal);
        }
    }
}

/// How a worker ends that was asked to; by the signal itself only before it was ready for it.
fn is_proper(status: ExitStatus) -> bool {
    status.success() || status.signal() == Some(Signal::TERM.as_raw())
}
