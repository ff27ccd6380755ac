//! How long messages of many keys take to their handlers, beside one key that has very many, or that fails all the time.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use serde::Serialize;
use sqlstreams::{CancellationToken, Client, Delivery, Outgoing, RetryPolicy, Start};

use crate::bench::place::Place;
use crate::context::Context;

/// How many messages the one key has that waits, and how long its handler takes.
const BACKLOG: usize = 100_000;
const QUICK_BACKLOG: usize = 10_000;
const HANDLER: Duration = Duration::from_millis(10);
/// How many messages of other keys come, one every so often.
const OTHERS: u32 = 1_000;
const QUICK_OTHERS: u32 = 200;
const EVERY: Duration = Duration::from_millis(5);
const KEY: &str = "one";
/// How soon a message that fails is tried again.
const BACKOFF: Duration = Duration::from_millis(100);

/// What is beside them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Beside {
    Nothing,
    Backlog,
    Failing,
}

/// From their producer to a handler, in milliseconds.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Times {
    pub(super) p50: f64,
    pub(super) p95: f64,
    /// Those that were not handled: their keys are in one lane with that one.
    pub(super) waiting: u32,
}

pub(super) async fn times(
    context: &Context,
    place: &Place<String>,
    beside: Beside,
    quick: bool,
) -> anyhow::Result<Times> {
    let (backlog, others) = if quick { (QUICK_BACKLOG, QUICK_OTHERS) } else { (BACKLOG, OTHERS) };
    let name = format!("{beside:?}");
    let retry = RetryPolicy::attempts(1_000_000).backoff(BACKOFF, 1.0, BACKOFF);
    let group = place.stream.group(&name).ordered().retry(retry).start(Start::Latest);
    group.create().await?;
    let producer = place.stream.producer();
    if beside != Beside::Nothing {
        for _ in 0..backlog / 5_000 {
            let empty = String::new();
            let batch = std::iter::repeat_n(&empty, 5_000).map(|p| Outgoing::new(p).key(KEY));
            producer.send_all(batch).await?;
        }
    }
    let client = Client::builder(&place.url).schema(context.schema()).migrate(false);
    let client = client.pool_size(4).connect().await?;
    let stream = client.stream::<String>(place.stream.name()).open().await?;
    let (begun, stop) = (Instant::now(), CancellationToken::new());
    let taken: Arc<Mutex<Vec<f64>>> = Arc::default();
    let noted = taken.clone();
    let consumer = stream.group(&name).consumer().stop_on(stop.clone());
    let consumer = consumer.shutdown_timeout(Duration::ZERO);
    let consuming = tokio::spawn(consumer.run(move |message: Delivery<String>| {
        let noted = noted.clone();
        async move {
            if message.key.as_deref() == Some(KEY) {
                tokio::time::sleep(HANDLER).await;
                return if beside == Beside::Failing { Err("on purpose") } else { Ok(()) };
            }
            if let Ok(sent) = message.payload.parse::<u64>() {
                let late = begun.elapsed().saturating_sub(Duration::from_micros(sent));
                let mut noted = noted.lock().unwrap_or_else(PoisonError::into_inner);
                noted.push(late.as_secs_f64() * 1_000.0);
            }
            Ok(())
        }
    }));
    tokio::time::sleep(Duration::from_secs(if quick { 1 } else { 2 })).await;
    for n in 0..others {
        let sent = (begun.elapsed().as_micros() as u64).to_string();
        producer.send(&sent).key(format!("other {n}")).await?;
        tokio::time::sleep(EVERY).await;
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    stop.cancel();
    consuming.await.context("the consumer has panicked")??;
    let mut taken = std::mem::take(&mut *taken.lock().unwrap_or_else(PoisonError::into_inner));
    taken.sort_unstable_by(f64::total_cmp);
    let at = |part: f64| taken.get((taken.len() as f64 * part) as usize).copied().unwrap_or(0.0);
    let waiting = others.saturating_sub(u32::try_from(taken.len()).unwrap_or(others));
    Ok(Times { p50: at(0.5), p95: at(0.95), waiting })
}
