//! The groups that take the messages, and what they saw.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;
use sqlstreams::{CancellationToken, Consumed, Delivery, GroupBuilder, RetryPolicy, Stream};
use tokio::task::JoinHandle;

/// What a group saw.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct GroupFacts {
    pub(crate) group: &'static str,
    /// Messages that were handled, each counted once.
    pub(crate) handled: u64,
    /// How often one was handled again.
    pub(crate) repeated: u64,
    /// Messages that always fail, and were seen to.
    pub(crate) dead: u64,
    /// Messages that never came, or never again after a failure.
    pub(crate) lost: u64,
}

/// Whether a message is for a group.
type IsFor = fn(i64) -> bool;

pub(crate) struct Consumers {
    stop: CancellationToken,
    groups: Vec<Running>,
}

struct Running {
    name: &'static str,
    is_for: IsFor,
    seen: Arc<Mutex<Seen>>,
    consumer: JoinHandle<sqlstreams::Result<Consumed>>,
}

#[derive(Debug, Default)]
struct Seen {
    handled: Vec<bool>,
    failed: Vec<bool>,
    repeated: u64,
}

impl Seen {
    fn note(list: &mut Vec<bool>, number: i64) -> bool {
        let at = usize::try_from(number).unwrap_or_default();
        if list.len() <= at {
            list.resize(at + 1, false);
        }
        std::mem::replace(&mut list[at], true)
    }
}

/// One that fails whenever it is tried.
fn always_fails(number: i64) -> bool {
    number % 1_000 == 7
}

/// One that fails the first time.
fn fails_once(number: i64) -> bool {
    number % 100 == 3
}

impl Consumers {
    pub(crate) async fn start(stream: &Stream<i64>) -> anyhow::Result<Self> {
        let stop = CancellationToken::new();
        let mut groups = Vec::new();
        type Kind = fn(GroupBuilder<i64>) -> GroupBuilder<i64>;
        let kinds: [(&'static str, IsFor, Kind); 3] = [
            ("all", |_| true, |group| group),
            ("part", |n| n % 10 == 0, |group| group.bind("a")),
            ("ordered", |_| true, GroupBuilder::ordered),
        ];
        for (name, is_for, kind) in kinds {
            let pause = Duration::from_millis(200);
            let retry = RetryPolicy::attempts(3).backoff(pause, 1.0, pause);
            let group = kind(stream.group(name).retry(retry)).create().await?;
            let seen: Arc<Mutex<Seen>> = Arc::default();
            let notes = seen.clone();
            let consumer = tokio::spawn(group.consumer().stop_on(stop.clone()).run(
                move |message: Delivery<i64>| {
                    let mut seen = notes.lock().unwrap_or_else(PoisonError::into_inner);
                    let number = message.payload;
                    let outcome = if always_fails(number) {
                        Seen::note(&mut seen.failed, number);
                        Err("it always does")
                    } else if fails_once(number) && message.attempt() == 1 {
                        Err("the first time")
                    } else {
                        let again = Seen::note(&mut seen.handled, number);
                        seen.repeated += u64::from(again);
                        Ok(())
                    };
                    async move { outcome }
                },
            ));
            groups.push(Running { name, is_for, seen, consumer });
        }
        Ok(Self { stop, groups })
    }

    /// Waits until the groups are done with all that was produced, but no longer than so.
    pub(crate) async fn finish(
        &self,
        stream: &Stream<i64>,
        produced: u64,
        limit: Duration,
    ) -> anyhow::Result<Vec<GroupFacts>> {
        let deadline = Instant::now() + limit;
        let mut facts = Vec::new();
        for Running { name, is_for, seen, .. } in &self.groups {
            let group = stream.group(*name).open().await?;
            while Instant::now() < deadline {
                let status = group.status().await?;
                if status.resolved >= status.head
                    && status.ready + status.inflight + status.deferred == 0
                {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            facts.push(tell(name, *is_for, seen, produced));
        }
        Ok(facts)
    }

    /// Stops the consumers. Until then they do the maintenance, too.
    pub(crate) async fn stop(self) -> anyhow::Result<()> {
        self.stop.cancel();
        for Running { consumer, .. } in self.groups {
            consumer.await??;
        }
        Ok(())
    }
}

fn tell(group: &'static str, is_for: IsFor, seen: &Mutex<Seen>, produced: u64) -> GroupFacts {
    let seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
    let count = |list: &[bool]| list.iter().filter(|seen| **seen).count() as u64;
    let (handled, dead) = (count(&seen.handled), count(&seen.failed));
    let expected = (0..produced as i64).filter(|n| is_for(*n)).count() as u64;
    let lost = expected.saturating_sub(handled + dead);
    GroupFacts { group, handled, repeated: seen.repeated, dead, lost }
}
