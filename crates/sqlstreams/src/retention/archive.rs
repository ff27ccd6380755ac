//! Dead letters that have been kept for long enough, and archived messages that nothing refers to any more: a step of the upkeep of one stream.

use std::time::{Duration, Instant, SystemTime};

use crate::client::Client;
use crate::error::Result;

/// How long a step takes at the most, about.
const BUDGET: Duration = Duration::from_secs(2);
/// So many dead letters go in one transaction.
const CHUNK: i64 = 1_000;
/// How often the archive is looked through, and dead letters are looked for.
const SOONEST: Duration = Duration::from_secs(10);
const LATEST: Duration = Duration::from_secs(600);

/// What a step came to.
#[derive(Debug, Default)]
pub(crate) struct Ended {
    pub(crate) dead_letters: u64,
    /// When to come again.
    pub(crate) next: Duration,
}

pub(crate) async fn step(client: &Client, stream: i64) -> Result<Ended> {
    let queries = &client.inner.queries;
    let doing = "let old dead letters go";
    let deadline = Instant::now() + BUDGET;
    let mut ended = Ended { next: LATEST, ..Ended::default() };
    let mut from: Option<SystemTime> = None;
    loop {
        let params: [&(dyn tokio_postgres::types::ToSql + Sync); 3] = [&stream, &from, &CHUNK];
        let row = client.query_one(&queries.expire_dead_letters, &params, doing).await?;
        let removed: i64 = row.get(0);
        ended.dead_letters += removed.unsigned_abs();
        if removed < CHUNK {
            let due = row.get::<_, Option<f64>>(2).map(|s| Duration::try_from_secs_f64(s));
            if let Some(due) = due {
                ended.next = due.unwrap_or_default().clamp(SOONEST, LATEST);
            }
            break;
        }
        from = row.get(1);
        if Instant::now() >= deadline {
            ended.next = Duration::ZERO;
            return Ok(ended);
        }
    }
    let mut after = 0_i64;
    while Instant::now() < deadline {
        let row = client.query_one(&queries.tidy_archive, &[&stream, &after], doing).await?;
        match row.get(1) {
            Some(upto) => after = upto,
            None => break,
        }
    }
    Ok(ended)
}
