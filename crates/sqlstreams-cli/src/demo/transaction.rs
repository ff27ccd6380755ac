//! The last step: a business transaction and its message are one.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use anyhow::Context as _;
use sqlstreams::Stream;

use super::facts::{Transaction, Written};
use super::orders::Order;
use super::stage::{RECEIPTS, Stage, receipts_handler};
use super::tally::Tally;

/// Stands for a table of the shop. Temporary, so that it leaves nothing behind in a database that is not ours.
const SHOP_ORDER: &str =
    "CREATE TEMPORARY TABLE shop_order (id bigint PRIMARY KEY, customer text, total bigint)";

/// How a transaction is to end.
#[derive(Clone, Copy)]
enum End {
    Rollback,
    Commit,
}

pub(crate) async fn run(stage: &mut Stage, receipts: &Arc<Tally>) -> anyhow::Result<Transaction> {
    let db = stage.tables.connection();
    db.batch_execute(SHOP_ORDER).await.context("could not make a table for the shop")?;
    let regretted = Order::numbered(stage.orders + 1);
    let wanted = Order::numbered(stage.orders + 2);
    let rolled_back = place(&stage.stream, db, &regretted, End::Rollback).await?;
    let committed = place(&stage.stream, db, &wanted, End::Commit).await?;
    let committed_at = Instant::now();

    let before = receipts.handled();
    let received_at = Arc::new(OnceLock::new());
    let (handler, noted) = (receipts_handler(receipts), received_at.clone());
    let handler = move |message| {
        noted.get_or_init(Instant::now);
        handler(message)
    };
    let consumed = stage.receipts.consumer().until_caught_up().run(handler).await?;
    let new = receipts.handled() - before;

    let status = stage.receipts.status().await?;
    let checks = &mut stage.checks;
    checks.equal("rows of the rolled-back transaction", rolled_back.rows, 0)?;
    checks.equal("messages of the rolled-back transaction", rolled_back.messages, 0)?;
    checks.equal("rows of the committed transaction", committed.rows, 1)?;
    checks.equal("messages of the committed transaction", committed.messages, 1)?;
    checks.equal("orders that receipts got from them", new, 1)?;
    checks.equal("messages that receipts got from them", consumed.handled, 1)?;
    checks.equal("whether that was the committed one", receipts.has_handled(wanted.id), true)?;
    checks.equal("position of receipts", status.resolved, committed.message_id)?;
    let received_after_seconds = received_at
        .get()
        .map_or(0.0, |received| received.saturating_duration_since(committed_at).as_secs_f64());
    Ok(Transaction { rolled_back, committed, received_by: RECEIPTS, received_after_seconds })
}

/// Writes an order into the shop's table and into the stream, in one transaction, and looks what is there afterwards.
async fn place(
    stream: &Stream<Order>,
    db: &mut tokio_postgres::Client,
    order: &Order,
    end: End,
) -> anyhow::Result<Written> {
    let id = i64::try_from(order.id)?;
    let doing = || "could not place an order in a transaction";
    let tx = db.transaction().await.with_context(doing)?;
    tx.execute(
        "INSERT INTO shop_order VALUES ($1, $2, $3)",
        &[&id, &order.customer, &i64::try_from(order.total)?],
    )
    .await
    .with_context(doing)?;
    let receipt = stream.send_in(&tx, order).key(&order.customer).await?;
    match end {
        End::Rollback => tx.rollback().await,
        End::Commit => tx.commit().await,
    }
    .with_context(doing)?;

    let rows = db
        .query_one("SELECT count(*) FROM shop_order WHERE id = $1", &[&id])
        .await
        .with_context(doing)?
        .get(0);
    let messages = stream.read(&[receipt.id]).await?.len() as u64;
    Ok(Written { message_id: receipt.id, rows, messages })
}
