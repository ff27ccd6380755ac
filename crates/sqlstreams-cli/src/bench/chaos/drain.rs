//! Waits for the groups to come to their end.

use std::time::{Duration, Instant};

use super::groups::Groups;
use super::workers::Workers;
use crate::progress::Progress;

/// How long that may take: what was lost with a worker is first tried again after its lease and a backoff.
const TIMEOUT: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(50);

/// Waits until every group has handed out everything up to that id, while they are disturbed; gives up when none comes on for a while.
pub(crate) async fn hand_out(
    groups: &Groups,
    last: i64,
    progress: &Progress,
) -> anyhow::Result<()> {
    let (mut before, mut since) = (-1, Instant::now());
    loop {
        let mut slowest = i64::MAX;
        for group in groups.all() {
            slowest = slowest.min(group.status().await?.resolved);
        }
        if slowest != before {
            (before, since) = (slowest, Instant::now());
        }
        progress.update(slowest.unsigned_abs(), slowest.unsigned_abs());
        if slowest >= last || since.elapsed() > TIMEOUT {
            return Ok(());
        }
        tokio::time::sleep(PAUSE * 4).await;
    }
}

/// Waits until every group is through with everything up to that id, with all workers running; how long that took, or nothing if it did not happen.
pub(crate) async fn drain(
    groups: &Groups,
    last: i64,
    workers: &mut Workers,
) -> anyhow::Result<Option<Duration>> {
    let begin = Instant::now();
    while begin.elapsed() < TIMEOUT {
        workers.look_after().await?;
        if are_through(groups, last).await? {
            return Ok(Some(begin.elapsed()));
        }
        tokio::time::sleep(PAUSE).await;
    }
    Ok(None)
}

async fn are_through(groups: &Groups, last: i64) -> anyhow::Result<bool> {
    for group in groups.all() {
        let status = group.status().await?;
        if status.resolved < last || status.ready + status.inflight + status.deferred > 0 {
            return Ok(false);
        }
    }
    Ok(true)
}
