//! The reference: the same transactions over plain connections.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use sqlstreams::Dsn;
use tokio::task::JoinSet;
use tokio_postgres::types::Type;

/// Commits a second of so many connections at once.
pub(super) async fn measure(
    url: &str,
    insert: &str,
    at_once: usize,
    time: Duration,
) -> anyhow::Result<f64> {
    let mut connections = Vec::new();
    for _ in 0..at_once {
        connections.push(Dsn::parse(url)?.connect().await?);
    }
    let begun = Instant::now();
    let mut tasks: JoinSet<anyhow::Result<u64>> = JoinSet::new();
    for db in connections {
        let insert = insert.to_owned();
        tasks.spawn(async move {
            let mut commits = 0;
            while begun.elapsed() < time {
                db.batch_execute("BEGIN ISOLATION LEVEL READ COMMITTED").await?;
                db.query_typed(&insert, &[(&0_i64, Type::INT8)]).await?;
                db.batch_execute("COMMIT").await?;
                commits += 1;
            }
            Ok(commits)
        });
    }
    let mut commits = 0;
    while let Some(ended) = tasks.join_next().await {
        commits += ended.context("a task ended early")?.context("could not insert and commit")?;
    }
    Ok(commits as f64 / begun.elapsed().as_secs_f64())
}
