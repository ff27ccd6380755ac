//! Consuming a part of a log.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use sqlstreams::{CancellationToken, Delivery, Start, Stream};

/// The milliseconds that it takes a new group to consume so many messages from this id on.
pub(crate) async fn consume(
    stream: &Stream<i64>,
    group: &str,
    first: i64,
    messages: u64,
) -> anyhow::Result<f64> {
    let group = stream.group(group).start(Start::Id(first)).create().await?;
    let (handled, took) = (AtomicU64::new(0), Arc::new(OnceLock::<Duration>::new()));
    let stop = CancellationToken::new();
    let consumer = group.consumer().until_caught_up().stop_on(stop.clone());
    let begun = Instant::now();
    let enough = took.clone();
    let consumed = consumer.run(move |_: Delivery<i64>| {
        if handled.fetch_add(1, Ordering::Relaxed) + 1 == messages {
            enough.get_or_init(|| begun.elapsed());
            stop.cancel();
        }
        async {}
    });
    consumed.await?;
    group.drop_group().await?;
    let took = took.get().context("the log ended too early")?;
    Ok(took.as_secs_f64() * 1e3)
}
