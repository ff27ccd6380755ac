//! What the steps of the demo share.

use std::future::{Future, Ready, ready};
use std::sync::Arc;

use anyhow::Context as _;
use sqlstreams::{Delivery, Group, Outcome, Stream};
use tokio::task::JoinSet;

use super::bars::Bars;
use super::checks::Checks;
use super::orders::Order;
use super::payments::{ATTEMPTS, PaymentError, Payments};
use super::tables::Tables;
use super::tally::Tally;

/// The group that handles everything.
pub(crate) const RECEIPTS: &str = "receipts";
/// The group that fails now and then.
pub(crate) const PAYMENTS: &str = "payments";
/// The group that comes late.
pub(crate) const ANALYTICS: &str = "analytics";

/// The stream, and how to look at it.
pub(crate) struct Stage {
    pub(crate) stream: Stream<Order>,
    pub(crate) receipts: Group<Order>,
    pub(crate) payments: Group<Order>,
    pub(crate) tables: Tables,
    pub(crate) bars: Bars,
    pub(crate) checks: Checks,
    /// How many orders there are.
    pub(crate) orders: u64,
}

/// Runs it as a task of its own, which ends when this future is dropped.
pub(crate) async fn beside<T: Send + 'static>(
    work: impl Future<Output = anyhow::Result<T>> + Send + 'static,
) -> anyhow::Result<T> {
    let mut tasks = JoinSet::new();
    tasks.spawn(work);
    tasks.join_next().await.context("a task vanished")?.context("a task ended early")?
}

/// The handler of `receipts`: there is nothing that could go wrong.
pub(crate) fn receipts_handler(
    tally: &Arc<Tally>,
) -> impl Fn(Delivery<Order>) -> Ready<()> + Send + Sync + 'static {
    let tally = tally.clone();
    move |message| {
        tally.handled_one(message.payload.id, message.attempt());
        ready(())
    }
}

/// The handler of `payments`.
pub(crate) fn payments_handler(
    tally: &Arc<Tally>,
    service: Payments,
) -> impl Fn(Delivery<Order>) -> Ready<Result<Outcome, PaymentError>> + Send + Sync + 'static {
    let tally = tally.clone();
    move |message| {
        let (order, attempt) = (message.payload.id, message.attempt());
        let outcome = service.charge(&message);
        match &outcome {
            Ok(Outcome::Done) => {
                tally.handled_one(order, attempt);
            }
            Ok(_) => tally.failed_one(order, true),
            Err(_) => tally.failed_one(order, attempt >= ATTEMPTS),
        }
        ready(outcome)
    }
}
