//! The first step: orders are produced while two groups read them.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use sqlstreams::{
    CancellationToken, Delivery, Group as ConsumerGroup, IntoOutcome, Outgoing, Stream,
};
use tokio::task::JoinSet;

use super::bars::Line;
use super::facts::{Group, Pace, Produced};
use super::orders::Order;
use super::payments::Payments;
use super::stage::{PAYMENTS, RECEIPTS, Stage, beside, payments_handler, receipts_handler};
use super::tally::Tally;
use super::trouble::Trouble;

/// Tasks that produce at once.
const PRODUCERS: u64 = 2;
/// Orders to a transaction.
const BATCH: u64 = 500;

/// What the later steps go on with.
pub(crate) struct Live {
    pub(crate) produced: Produced,
    pub(crate) groups: Vec<Group>,
    pub(crate) receipts: Arc<Tally>,
    pub(crate) payments: Arc<Tally>,
}

pub(crate) async fn run(stage: &mut Stage) -> anyhow::Result<Live> {
    let orders = stage.orders;
    let produced = Arc::new(AtomicU64::new(0));
    let receipts = Arc::new(Tally::of(orders));
    let payments = Arc::new(Tally::of(orders));
    let started = Instant::now();

    let work = async {
        let on_receipt = receipts_handler(&receipts);
        let on_payment = payments_handler(&payments, Payments::with_bugs());
        tokio::try_join!(
            beside(produce(stage.stream.clone(), orders, produced.clone(), started)),
            beside(consume(stage.receipts.clone(), on_receipt, receipts.clone(), started)),
            beside(consume(stage.payments.clone(), on_payment, payments.clone(), started)),
        )
    };
    let lines = [
        Line { name: "produced", count: &produced, total: orders },
        Line { name: RECEIPTS, count: receipts.finished(), total: orders },
        Line { name: PAYMENTS, count: payments.finished(), total: orders },
    ];
    let (produce_time, receipts_time, payments_time) = stage.bars.watch(&lines, work).await?;

    // Where a lease was lost, which takes a very slow machine, something may be left over.
    let on_receipt = receipts_handler(&receipts);
    stage.receipts.consumer().until_caught_up().run(on_receipt).await?;
    let on_payment = payments_handler(&payments, Payments::with_bugs());
    stage.payments.consumer().until_caught_up().run(on_payment).await?;

    let log = stage.tables.log().await?;
    let count = i64::try_from(orders)?;
    stage.checks.equal("orders produced", produced.load(Ordering::Relaxed), orders)?;
    stage.checks.equal("messages in the log", log.rows, count)?;

    let troubles: Vec<Trouble> = (1..=orders).filter_map(Trouble::of).collect();
    let recovering = |at| troubles.iter().filter(|t| t.recovers_at() == Some(at)).count() as u64;
    let dying = troubles.iter().filter(|t| t.recovers_at().is_none()).count() as u64;
    let groups = vec![
        group(stage, RECEIPTS, &receipts, receipts_time, 0).await?,
        group(stage, PAYMENTS, &payments, payments_time, dying).await?,
    ];
    stage.checks.equal("orders that failed in receipts", receipts.failed_attempts(), 0)?;
    stage.checks.equal(
        "payments that recovered at the second and third attempt",
        payments.recovered(),
        [recovering(2), recovering(3)],
    )?;

    Ok(Live {
        produced: Produced {
            pace: Pace::new(orders, produce_time),
            mean_payload_bytes: log.payload_bytes as f64 / log.rows as f64,
        },
        groups,
        receipts,
        payments,
    })
}

/// Produces the orders 1 to `last`, and says how long that took.
async fn produce(
    stream: Stream<Order>,
    last: u64,
    produced: Arc<AtomicU64>,
    started: Instant,
) -> anyhow::Result<Duration> {
    let next = Arc::new(AtomicU64::new(1));
    let producer = stream.producer();
    let mut tasks = JoinSet::new();
    for _ in 0..PRODUCERS {
        let (next, producer, produced) = (next.clone(), producer.clone(), produced.clone());
        tasks.spawn(async move {
            loop {
                let first = next.fetch_add(BATCH, Ordering::Relaxed);
                if first > last {
                    return anyhow::Ok(());
                }
                let orders: Vec<Order> =
                    (first..=last.min(first + BATCH - 1)).map(Order::numbered).collect();
                let messages = orders.iter().map(|order| Outgoing::new(order).key(&order.customer));
                let receipts = producer.send_all(messages).await?;
                produced.fetch_add(receipts.len() as u64, Ordering::Relaxed);
            }
        });
    }
    while let Some(ended) = tasks.join_next().await {
        ended??;
    }
    Ok(started.elapsed())
}

/// Consumes until the tally is complete, and says how long that took.
async fn consume<H, F>(
    group: ConsumerGroup<Order>,
    handler: H,
    tally: Arc<Tally>,
    started: Instant,
) -> anyhow::Result<Duration>
where
    H: Fn(Delivery<Order>) -> F + Send + Sync + 'static,
    F: Future<Output: IntoOutcome> + Send + 'static,
{
    let stop = CancellationToken::new();
    let run = async { anyhow::Ok(group.consumer().stop_on(stop.clone()).run(handler).await?) };
    let complete = async {
        tally.complete().await;
        stop.cancel();
        Ok(started.elapsed())
    };
    let (_, time) = tokio::try_join!(run, complete)?;
    Ok(time)
}

/// What became of a group, checked.
async fn group(
    stage: &mut Stage,
    name: &'static str,
    tally: &Tally,
    time: Duration,
    dying: u64,
) -> anyhow::Result<Group> {
    let orders = stage.orders;
    let consumer_group = if name == RECEIPTS { &stage.receipts } else { &stage.payments };
    let status = consumer_group.status().await?;
    let state_rows = stage.tables.state_rows(consumer_group.id()).await?;
    let [second, later] = tally.recovered();
    let checks = &mut stage.checks;
    let what = |what: &str| format!("{name}: {what}");
    checks.equal(&what("orders handled"), tally.handled(), orders - dying)?;
    checks.equal(&what("orders given up"), tally.given_up(), dying)?;
    checks.equal(&what("dead letters"), status.dead, i64::try_from(dying)?)?;
    checks.equal(&what("exceptions still to be tried"), status.ready + status.inflight, 0)?;
    checks.equal(&what("position"), status.resolved, status.head)?;
    checks.equal(&what("cursor rows"), state_rows.cursor, 1)?;
    checks.equal(&what("lease rows"), state_rows.leases, 0)?;
    checks.equal(&what("exception rows"), state_rows.exceptions, i64::try_from(dying)?)?;
    Ok(Group {
        group: name,
        pace: Pace::new(orders, time),
        handled: tally.handled(),
        recovered_at_second_attempt: second,
        recovered_later: later,
        failed_attempts: tally.failed_attempts(),
        dead: tally.given_up(),
        repeated: tally.repeated(),
        state_rows,
    })
}
