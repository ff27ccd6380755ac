//! The reference: what inserting and committing a row costs without SQLStreams.

use std::time::{Duration, Instant};

use anyhow::Context as _;

use super::ping::Ping;
use super::spread::Spread;
use crate::bench::place::Place;

/// The table that it writes to.
pub(crate) const TABLE: &str = "bare";
/// How long it is measured.
const TIME: Duration = Duration::from_secs(3);
/// What is not counted of that.
const WARM_UP: Duration = Duration::from_millis(500);

/// Inserts rows of that size at that rate, one after the other over one connection.
///
/// A row's time begins when it is sent, not when it was due: this is to be the price of a commit, without a queue.
pub(crate) async fn measure(
    place: &Place<Ping>,
    rate: u32,
    bytes: usize,
) -> anyhow::Result<Spread> {
    let doing = || "could not insert into a table";
    let (db, table) = (&place.db, place.tables.name(TABLE));
    db.batch_execute(&format!(
        "CREATE TABLE {table} (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, payload text)"
    ))
    .await
    .context("could not create a table")?;
    let insert = format!("INSERT INTO {table} (payload) VALUES ($1) RETURNING id");
    let insert = db.prepare(&insert).await.with_context(doing)?;
    let payload = "x".repeat(bytes);
    let mut spread = Spread::new()?;
    let begin = Instant::now();
    let mut due = begin;
    while due < begin + TIME && begin.elapsed() < TIME {
        tokio::time::sleep_until(due.into()).await;
        let sent = Instant::now();
        db.query_one(&insert, &[&payload]).await.with_context(doing)?;
        if sent >= begin + WARM_UP {
            spread.record(sent.elapsed().as_nanos().cast_signed());
        }
        due += Duration::from_secs(1) / rate;
    }
    Ok(spread)
}
