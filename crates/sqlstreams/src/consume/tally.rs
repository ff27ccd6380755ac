//! Tells the database how many messages went by unhandled, for whoever looks at the group: now and then, and at the end.

use std::time::Duration;

use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::Consumed;
use super::health::Health;
use super::protocol::Protocol;

/// How often it is told, if there is something to tell.
const PAUSE: Duration = Duration::from_secs(5);

/// Counts of a consumer that runs.
#[derive(Debug)]
pub(super) struct Tally {
    /// Dropped with the consumer, it ends the task as well.
    ended: DropGuard,
    task: JoinHandle<()>,
}

impl Tally {
    pub(super) fn start(protocol: Protocol, health: Health) -> Self {
        let ended = CancellationToken::new();
        let over = ended.clone();
        let task = tokio::spawn(async move {
            let mut told = health.snapshot().consumed;
            loop {
                let last = tokio::select! {
                    () = over.cancelled() => true,
                    () = tokio::time::sleep(PAUSE) => false,
                };
                let now = health.snapshot().consumed;
                if (now.expired, now.superseded) != (told.expired, told.superseded)
                    && tell(&protocol, &now, &told).await
                {
                    told = now;
                }
                if last {
                    return;
                }
            }
        });
        Self { ended: ended.drop_guard(), task }
    }

    /// Tells what has come last.
    pub(super) async fn end(self) {
        drop(self.ended);
        let _ = self.task.await;
    }
}

/// Whether it was heard. If the answer is lost it is counted twice: it is a figure, nothing depends on it.
async fn tell(protocol: &Protocol, now: &Consumed, told: &Consumed) -> bool {
    let expired = now.expired.saturating_sub(told.expired);
    let superseded = now.superseded.saturating_sub(told.superseded);
    protocol.count_passed_over(expired, superseded).await.is_ok()
}
