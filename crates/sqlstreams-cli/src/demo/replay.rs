//! The third step: a group that comes late reads everything from the beginning.

use std::future::ready;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use sqlstreams::{Delivery, Start};

use super::bars::Line;
use super::facts::{Pace, Replay};
use super::orders::{Currency, Order};
use super::stage::{ANALYTICS, Stage, beside};
use super::tally::Tally;

/// Adds the orders up.
#[derive(Debug)]
struct Analytics {
    tally: Tally,
    /// Cents, in the order of [`Currency::ALL`].
    revenue: [AtomicU64; 2],
}

impl Analytics {
    fn add(&self, message: &Delivery<Order>) {
        let order = &message.payload;
        // An order that is handed out twice counts once.
        if self.tally.handled_one(order.id, message.attempt()) {
            let at = Currency::ALL.iter().position(|currency| *currency == order.currency);
            self.revenue[at.unwrap_or_default()].fetch_add(order.total, Ordering::Relaxed);
        }
    }
}

pub(crate) async fn run(stage: &mut Stage) -> anyhow::Result<Replay> {
    let orders = stage.orders;
    let analytics = Arc::new(Analytics { tally: Tally::of(orders), revenue: Default::default() });
    let group = stage.stream.group(ANALYTICS).start(Start::Beginning).create().await?;

    let wal_before = stage.tables.wal_position().await?;
    let started = Instant::now();
    let work = {
        let (group, analytics) = (group.clone(), analytics.clone());
        beside(async move {
            let handler = move |message| {
                analytics.add(&message);
                ready(())
            };
            Ok(group.consumer().until_caught_up().run(handler).await?)
        })
    };
    let line = Line { name: ANALYTICS, count: analytics.tally.finished(), total: orders };
    stage.bars.watch(&[line], work).await?;
    let time = started.elapsed();
    let wal_bytes = stage.tables.wal_position().await?.saturating_sub(wal_before);

    let handled = analytics.tally.handled();
    let revenue = Currency::ALL
        .iter()
        .zip(&analytics.revenue)
        .map(|(currency, cents)| (currency.code().to_owned(), cents.load(Ordering::Relaxed)))
        .filter(|(_, cents)| *cents > 0)
        .collect();
    let revenue_by_sql = stage.tables.revenue().await?;
    let state_rows = stage.tables.state_rows(group.id()).await?;
    stage.checks.equal("orders replayed", handled, orders)?;
    stage.checks.equal("revenue by the handler and by SQL", &revenue, &revenue_by_sql)?;
    stage.checks.equal("state rows of analytics", state_rows.all(), 1)?;
    Ok(Replay {
        group: ANALYTICS,
        pace: Pace::new(handled, time),
        wal_bytes,
        wal_bytes_per_message: wal_bytes as f64 / handled.max(1) as f64,
        revenue,
        revenue_by_sql,
    })
}
