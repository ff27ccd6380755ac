//! The reference: the log read by ranges of ids over a plain connection, with the filter in the query.

use std::time::Instant;

use anyhow::Context as _;
use sqlstreams::Dsn;
use tokio_postgres::types::Type;

/// Ids per query: as many as a consumer claims at once at most.
const RANGE: i64 = 50_000;

/// Ids a second, from 1 to `last`, and how many messages passed the filter.
pub(super) async fn measure(
    url: &str,
    log: &str,
    filter: &str,
    last: i64,
) -> anyhow::Result<(f64, u64)> {
    let db = Dsn::parse(url)?.connect().await?;
    db.batch_execute("SET enable_seqscan = off; SET jit = off").await?;
    let query = format!(
        "SELECT id, key, routing_key, headers, produced_at, payload FROM {log}
         WHERE id > $1 AND id <= $2 AND {filter} ORDER BY id"
    );
    let (mut found, begun) = (0, Instant::now());
    for after in (0..last).step_by(RANGE as usize) {
        let params = [(&after as _, Type::INT8), (&(after + RANGE) as _, Type::INT8)];
        let rows = db.query_typed(&query, &params).await.context("could not read the log")?;
        found += rows.len() as u64;
    }
    Ok((last as f64 / begun.elapsed().as_secs_f64(), found))
}
