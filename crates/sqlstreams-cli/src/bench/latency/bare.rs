//! The reference: what inserting and committing a row costs without SQLStreams.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use sqlstreams::Dsn;
use tokio::task::JoinSet;

use super::ping::Ping;
use crate::bench::place::Place;
use crate::bench::spread::Spread;

/// The table that it writes to.
pub(crate) const TABLE: &str = "bare";
/// How long it is measured, and where it is to be brief.
const TIME: Duration = Duration::from_secs(3);
const QUICK_TIME: Duration = Duration::from_millis(1_500);
/// What is not counted of that.
const WARM_UP: Duration = Duration::from_millis(500);

/// Inserts rows of that size at that rate, one after the other over one connection.
///
/// A row's time begins when it is sent, not when it was due: this is to be the price of a commit, without a queue.
pub(crate) async fn measure(
    place: &Place<Ping>,
    rate: u32,
    bytes: usize,
    quick: bool,
) -> anyhow::Result<Spread> {
    let table = place.tables.name(TABLE);
    let create = format!(
        "CREATE TABLE {table} (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, payload text)"
    );
    place.db.batch_execute(&create).await.context("could not create a table")?;
    let db = Dsn::parse(&place.url)?.connect().await?;
    let insert = format!("INSERT INTO {table} (payload) VALUES ($1) RETURNING id");
    let time = if quick { QUICK_TIME } else { TIME };
    // A task, as those that send messages are; it ends with this future.
    let mut task = JoinSet::new();
    task.spawn(insert_rows(db, insert, rate, "x".repeat(bytes), time));
    let measured = task.join_next().await.context("a task vanished")?;
    measured.context("a task ended early")?
}

async fn insert_rows(
    db: tokio_postgres::Client,
    insert: String,
    rate: u32,
    payload: String,
    time: Duration,
) -> anyhow::Result<Spread> {
    let doing = || "could not insert into a table";
    let insert = db.prepare(&insert).await.with_context(doing)?;
    let mut spread = Spread::new()?;
    let begin = Instant::now();
    let mut due = begin;
    while due < begin + time && begin.elapsed() < time {
        tokio::time::sleep_until(due.into()).await;
        let sent = Instant::now();
        db.query_one(&insert, &[&payload]).await.with_context(doing)?;
        if due >= begin + WARM_UP {
            spread.record(sent.elapsed().as_nanos().cast_signed());
        }
        due += Duration::from_secs(1) / rate;
    }
    Ok(spread)
}
