//! Going through the stream once, as a new group.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Instant;

use anyhow::{Context as _, ensure};
use sqlstreams::{Client, Delivery, Mode};
use tokio::task::JoinSet;

use super::OrderedArgs;
use crate::bench::place::Place;
use crate::context::Context;

/// How that went.
pub(super) struct Drained {
    /// Messages a second.
    pub(super) rate: f64,
    pub(super) out_of_order: u64,
}

pub(super) async fn drain(
    args: &OrderedArgs,
    context: &Context,
    place: &Place<String>,
    group: &str,
    mode: Mode,
) -> anyhow::Result<Drained> {
    place.stream.group(group).mode(mode).create().await?;
    let mut clients = Vec::new();
    for _ in 0..args.consumers {
        let client = Client::builder(&place.url).schema(context.schema()).migrate(false);
        clients.push(client.pool_size(4).connect().await?);
    }
    let latest: Arc<[AtomicI64]> = (0..args.keys).map(|_| AtomicI64::new(0)).collect();
    let out_of_order = Arc::new(AtomicU64::new(0));
    let begun = Instant::now();
    let mut consumers = JoinSet::new();
    for client in clients {
        let stream = client.stream::<String>(place.stream.name()).open().await?;
        let consumer = stream.group(group).consumer().concurrency(args.concurrency.into());
        let (latest, out_of_order) = (latest.clone(), out_of_order.clone());
        consumers.spawn(consumer.until_caught_up().run(move |message: Delivery<String>| {
            let key = message.key.as_deref().and_then(|key| key.parse::<usize>().ok());
            let latest = key.and_then(|key| latest.get(key));
            let before = latest.map(|latest| latest.fetch_max(message.id, Ordering::Relaxed));
            if before.is_some_and(|before| before > message.id) {
                out_of_order.fetch_add(1, Ordering::Relaxed);
            }
            std::future::ready(())
        }));
    }
    let mut handled = 0;
    while let Some(ended) = consumers.join_next().await {
        handled += ended.context("a consumer ended early")??.handled;
    }
    ensure!(handled >= u64::from(args.messages()), "only {handled} messages were handled");
    Ok(Drained {
        rate: f64::from(args.messages()) / begun.elapsed().as_secs_f64(),
        out_of_order: out_of_order.load(Ordering::Relaxed),
    })
}
