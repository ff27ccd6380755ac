//! Waits for the groups to come to their end.

use std::time::{Duration, Instant};

use super::groups::Groups;
use super::workers::Workers;
use crate::progress::Progress;

/// How long nothing may come on: what was lost with a worker is first tried again after its lease and a backoff.
const TIMEOUT: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(50);

/// Waits until every group has handed out everything up to that id, while they are disturbed; gives up when none comes on for a while.
pub(crate) async fn hand_out(
    groups: &Groups,
    last: i64,
    progress: &Progress,
) -> anyhow::Result<()> {
    let mut watch = Watch::new();
    while watch.comes_on(groups).await? {
        progress.update(watch.resolved.unsigned_abs(), watch.resolved.unsigned_abs());
        if watch.resolved >= last {
            break;
        }
        tokio::time::sleep(PAUSE * 4).await;
    }
    Ok(())
}

/// Waits until every group is through with everything up to that id, with all workers running; how long that took, or nothing when
/// none comes on for a while before.
pub(crate) async fn drain(
    groups: &Groups,
    last: i64,
    workers: &mut Workers,
) -> anyhow::Result<Option<Duration>> {
    let begin = Instant::now();
    let mut watch = Watch::new();
    while watch.comes_on(groups).await? {
        if watch.resolved >= last && watch.open == 0 {
            return Ok(Some(begin.elapsed()));
        }
        workers.look_after().await?;
        tokio::time::sleep(PAUSE).await;
    }
    Ok(None)
}

/// How far the groups are, and since when they are there.
struct Watch {
    /// What the slowest has resolved.
    resolved: i64,
    /// Failed messages of all that are not through.
    open: i64,
    /// Of each group what changes when it does anything.
    seen: Vec<[i64; 5]>,
    since: Instant,
}

impl Watch {
    fn new() -> Self {
        Self { resolved: 0, open: 0, seen: Vec::new(), since: Instant::now() }
    }

    /// Looks, and says whether anything has changed in the time that is given to it.
    async fn comes_on(&mut self, groups: &Groups) -> anyhow::Result<bool> {
        (self.resolved, self.open) = (i64::MAX, 0);
        let mut seen = Vec::new();
        for group in groups.all() {
            let at = group.status().await?;
            self.resolved = self.resolved.min(at.resolved);
            self.open += at.ready + at.inflight + at.deferred;
            seen.push([at.claimed, at.resolved, at.ready, at.inflight, at.deferred]);
        }
        if seen != self.seen {
            (self.seen, self.since) = (seen, Instant::now());
        }
        Ok(self.since.elapsed() < TIMEOUT)
    }
}
