//! Keeping what is held: heartbeats, and the end of what could not be renewed in time.
//!
//! Two loops beside the coordinator, so that neither a call of it that hangs nor a handler that blocks delays them.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, watch};
use uuid::Uuid;

use super::held::Held;
use super::protocol::Protocol;
use super::workers::Queue;
use crate::backoff::Backoff;
use crate::error::Result;

/// The pause after a heartbeat that failed, growing from the first to the second.
const TROUBLE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// What is held, shared by the coordinator and the keeper.
#[derive(Debug, Default)]
pub(crate) struct Holding {
    held: Mutex<Held>,
    /// There is more to keep than before.
    more: Notify,
    /// Something that is held has changed by itself.
    pub(crate) changed: Notify,
}

impl Holding {
    /// Nothing panics while it holds the lock but on a defect of ours, which ends the consumer anyway.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Something was claimed.
    pub(crate) fn grown(&self) {
        self.more.notify_waiters();
    }
}

pub(crate) struct Keeper {
    pub(crate) protocol: Protocol,
    pub(crate) holding: Arc<Holding>,
    pub(crate) queue: Arc<Queue>,
    pub(crate) life: watch::Receiver<Option<i64>>,
}

impl Keeper {
    /// Runs until it is dropped.
    pub(crate) async fn run(self) {
        tokio::join!(self.heartbeats(), self.lapses());
    }

    /// Renews everything three times per lease, and at once when this process is known under another number: what it holds
    /// under the old one looks like that of a dead one.
    async fn heartbeats(&self) {
        let mut life = self.life.clone();
        let mut next = Instant::now();
        let mut trouble = Backoff::new(TROUBLE);
        loop {
            #[cfg(test)]
            self.protocol.stream.client.inner.faults.strike(crate::supervision::Task::Keeper);
            // Made before the look, so that nothing is missed between the two.
            let more = self.holding.more.notified();
            let (empty, lease) = {
                let held = self.holding.lock();
                (held.is_empty(), held.lease_duration())
            };
            if empty {
                more.await;
                next = Instant::now() + self.holding.lock().lease_duration() / 3;
                continue;
            }
            let interval = lease / 3;
            next = next.min(Instant::now() + interval);
            tokio::select! {
                _ = life.changed() => {}
                () = tokio::time::sleep_until(next.into()) => {}
            }
            match self.heartbeat().await {
                Ok(()) => {
                    next = Instant::now() + interval;
                    trouble.reset();
                    // Handlers may be so slow that nothing else makes the coordinator look what it holds.
                    self.holding.changed.notify_one();
                }
                Err(error) => {
                    let pause = trouble.pause();
                    tracing::warn!(
                        stream = self.protocol.stream.name,
                        error = &error as &dyn std::error::Error,
                        "could not renew leases; trying again in {pause:?}"
                    );
                    next = Instant::now() + pause;
                }
            }
        }
    }

    /// Keeps everything that is held for another while, and tells what of it is finished. Failures go with `advance`.
    async fn heartbeat(&self) -> Result<()> {
        let sent = Instant::now();
        let reports = self.holding.lock().progress();
        if !reports.is_empty() {
            let extended = self.protocol.extend(&reports).await?;
            let lost: Vec<Uuid> =
                extended.iter().filter(|(_, seq)| seq.is_none()).map(|(token, _)| *token).collect();
            let lost = {
                let mut held = self.holding.lock();
                for (token, seq) in &extended {
                    seq.iter().for_each(|seq| held.extended(*token, *seq, sent));
                }
                held.reported(&reports, &lost)
            };
            self.give_up(lost);
        }
        let sent = Instant::now();
        let exceptions = self.holding.lock().exceptions();
        if !exceptions.is_empty() {
            let lost = self.protocol.extend_exceptions(&exceptions).await?;
            let tokens: BTreeSet<Uuid> = exceptions.iter().map(|(token, _)| *token).collect();
            let lost = {
                let mut held = self.holding.lock();
                held.extended_exceptions(&tokens, sent);
                held.lost_exceptions(&lost)
            };
            self.give_up(lost);
        }
        Ok(())
    }

    /// Ends what could not be renewed in time: handlers are told before anybody else can have their messages.
    async fn lapses(&self) {
        loop {
            let more = self.holding.more.notified();
            let next = self.holding.lock().next_lapse();
            match next {
                None => more.await,
                Some(next) => tokio::select! {
                    () = more => {}
                    () = tokio::time::sleep_until(next.into()) => {}
                },
            }
            let lapsed = {
                let mut held = self.holding.lock();
                self.queue.set_margin(held.margin());
                held.lapse(Instant::now())
            };
            if lapsed > 0 {
                tracing::warn!(
                    stream = self.protocol.stream.name,
                    leases = lapsed,
                    "leases could not be renewed in time; their handlers are cancelled"
                );
                take_back(&self.holding, &self.queue);
            }
        }
    }

    fn give_up(&self, lost: usize) {
        give_up(&self.protocol, &self.holding, &self.queue, lost);
    }
}

/// So many leases were lost: what of them has not started shall not.
pub(crate) fn give_up(protocol: &Protocol, holding: &Holding, queue: &Queue, lost: usize) {
    if lost > 0 {
        tracing::warn!(
            stream = protocol.stream.name,
            lost,
            "leases were lost: another consumer handles what was left of them"
        );
        take_back(holding, queue);
    }
}

/// What must not be started any more is not.
fn take_back(holding: &Holding, queue: &Queue) {
    let taken = queue.take_back(|job| holding.lock().may_start(job.source, job.message.id));
    let mut held = holding.lock();
    for (source, id) in taken {
        held.leave(source, id);
    }
    drop(held);
    holding.changed.notify_one();
}
