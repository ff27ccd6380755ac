//! Lets the groups come to their end, with all workers running.

use std::time::{Duration, Instant};

use super::groups::Groups;
use super::workers::Workers;

/// How long that may take: what was lost with a worker is first tried again after its lease and a backoff.
const TIMEOUT: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(50);

/// Waits until every group is through with everything up to that id; how long that took, or nothing if it did not happen.
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
        if status.resolved < last || status.ready > 0 || status.inflight > 0 {
            return Ok(false);
        }
    }
    Ok(true)
}
