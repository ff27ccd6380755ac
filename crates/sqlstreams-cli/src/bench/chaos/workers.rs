//! The worker processes: started, killed, frozen, restarted.

use std::os::unix::process::ExitStatusExt;
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use fastrand::Rng;
use rustix::process::{Pid, Signal, kill_process};
use serde::Serialize;
use tokio::process::{Child, ChildStdin, Command};

use super::groups::LEASE;
use crate::context::Context;

/// How long a worker may take to stop when it is asked to.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

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
    frozen: Option<Frozen>,
}

#[derive(Debug, Clone, Copy)]
struct Frozen {
    since: Instant,
    until: Instant,
}

impl Workers {
    /// Starts so many.
    pub(crate) fn start(
        context: &Context,
        url: &str,
        stream: &str,
        count: usize,
    ) -> anyhow::Result<Self> {
        let start = Start {
            url: url.to_owned(),
            schema: context.schema().to_owned(),
            stream: stream.to_owned(),
            verbosity: context.verbosity(),
        };
        let slots = (0..count).map(|place| start.slot(place, 0)).collect::<anyhow::Result<_>>()?;
        Ok(Self { start, slots, done: Done::default() })
    }

    /// One of those that are not frozen, if there is any.
    pub(crate) fn pick(&self, rng: &mut Rng) -> usize {
        let awake: Vec<usize> =
            (0..self.slots.len()).filter(|place| self.slots[*place].frozen.is_none()).collect();
        match awake.is_empty() {
            true => rng.usize(..self.slots.len()),
            false => awake[rng.usize(..awake.len())],
        }
    }

    pub(crate) fn done(&self) -> Done {
        self.done
    }

    /// Kills one, frozen or not, and starts another.
    pub(crate) async fn kill(&mut self, place: usize) -> anyhow::Result<()> {
        tracing::info!("worker {place}: kill -9");
        self.slots[place].kill().await?;
        self.done.killed += 1;
        self.replace(place)
    }

    /// Freezes one for so long, or longer if it is frozen already.
    pub(crate) fn freeze(&mut self, place: usize, time: Duration) {
        tracing::info!("worker {place}: frozen for {time:?}");
        let slot = &mut self.slots[place];
        let now = Instant::now();
        match &mut slot.frozen {
            Some(frozen) => frozen.until = frozen.until.max(now + time),
            None => {
                slot.signal(Signal::STOP);
                slot.frozen = Some(Frozen { since: now, until: now + time });
                self.done.frozen += 1;
            }
        }
    }

    /// Stops one as a deployment would, and starts another.
    pub(crate) async fn restart(&mut self, place: usize) -> anyhow::Result<()> {
        tracing::info!("worker {place}: SIGTERM");
        self.thaw(place);
        if !self.slots[place].stop().await? {
            self.done.failed += 1;
        }
        self.done.restarted += 1;
        self.replace(place)
    }

    /// Looks after them: thaws whose time is up, and replaces who ended by itself.
    pub(crate) fn look_after(&mut self) -> anyhow::Result<()> {
        let now = Instant::now();
        for place in 0..self.slots.len() {
            if self.slots[place].frozen.is_some_and(|frozen| frozen.until <= now) {
                self.thaw(place);
            }
            if let Some(status) = self.slots[place].child.try_wait().context("lost a worker")? {
                tracing::warn!("worker {place} ended by itself: {status}");
                self.done.failed += 1;
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
    pub(crate) async fn stop(&mut self) -> anyhow::Result<()> {
        self.thaw_all();
        for slot in &mut self.slots {
            if !slot.stop().await? {
                self.done.failed += 1;
            }
        }
        Ok(())
    }

    fn thaw(&mut self, place: usize) {
        let slot = &mut self.slots[place];
        if let Some(frozen) = slot.frozen.take() {
            slot.signal(Signal::CONT);
            self.done.frozen_beyond_lease += u64::from(frozen.since.elapsed() > LEASE);
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
        Ok(Slot { _lifeline: child.stdin.take(), child, incarnation, frozen: None })
    }
}

impl Slot {
    async fn kill(&mut self) -> anyhow::Result<()> {
        self.child.kill().await.context("could not kill a worker")
    }

    /// Asks it to stop, and waits; says whether it did so properly. In any case it is gone then.
    async fn stop(&mut self) -> anyhow::Result<bool> {
        self.signal(Signal::TERM);
        match tokio::time::timeout(STOP_TIMEOUT, self.child.wait()).await {
            Ok(status) => Ok(is_proper(status.context("lost a worker")?)),
            Err(_) => self.kill().await.map(|()| false),
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
