//! Going through messages once, as a new group.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use anyhow::{Context as _, ensure};
use sqlstreams::{Delivery, Group};

use super::BIG;

/// How that went.
pub(super) struct Drained {
    /// Messages a second.
    pub(super) rate: f64,
    /// For each message that is not the big tenant's how many of that were handled before it, fewest first.
    pub(super) before: Vec<u64>,
}

/// Handles what is there, which has to be so many messages.
pub(super) async fn drain(
    group: &Group<String>,
    concurrency: u16,
    messages: u64,
) -> anyhow::Result<Drained> {
    let (big, before) = (Arc::new(AtomicU64::new(0)), Arc::new(Mutex::new(Vec::new())));
    let (counted, noted) = (big.clone(), before.clone());
    let begun = Instant::now();
    let consumer = group.consumer().concurrency(concurrency.into()).until_caught_up();
    let consumed = consumer.run(move |message: Delivery<String>| {
        if message.key.as_deref() == Some(BIG) {
            counted.fetch_add(1, Ordering::Relaxed);
        } else if let Ok(mut noted) = noted.lock() {
            noted.push(counted.load(Ordering::Relaxed));
        }
        std::future::ready(())
    });
    let handled = consumed.await.context("the consumer ended early")?.handled;
    let elapsed = begun.elapsed();
    ensure!(handled >= messages, "only {handled} messages were handled");
    let mut before = before.lock().map(|mut noted| std::mem::take(&mut *noted)).unwrap_or_default();
    before.sort_unstable();
    Ok(Drained { rate: messages as f64 / elapsed.as_secs_f64(), before })
}
