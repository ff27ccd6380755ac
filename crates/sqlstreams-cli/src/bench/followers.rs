//! Groups that follow a stream, in this process, with handlers that do nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::Context as _;
use sqlstreams::{CancellationToken, Consumed, Delivery, Group};
use tokio::task::JoinSet;

/// A consumer for each of some groups. They end with this value.
pub(crate) struct Followers {
    stop: CancellationToken,
    handled: Arc<AtomicU64>,
    consumers: JoinSet<sqlstreams::Result<Consumed>>,
}

impl Followers {
    /// `concurrency`: handlers of each at once.
    pub(crate) fn start(groups: &[Group<String>], concurrency: u16) -> Self {
        let (stop, handled) = (CancellationToken::new(), Arc::new(AtomicU64::new(0)));
        let mut consumers = JoinSet::new();
        for group in groups {
            let consumer = group.consumer().concurrency(concurrency.into()).stop_on(stop.clone());
            let counted = handled.clone();
            consumers.spawn(consumer.run(move |_: Delivery<String>| {
                counted.fetch_add(1, Ordering::Relaxed);
                std::future::ready(())
            }));
        }
        Self { stop, handled, consumers }
    }

    /// How many messages they have handled, all together.
    pub(crate) fn handled(&self) -> u64 {
        self.handled.load(Ordering::Relaxed)
    }

    /// Ends them in good order.
    pub(crate) async fn stop(mut self) -> anyhow::Result<()> {
        self.stop.cancel();
        while let Some(ended) = self.consumers.join_next().await {
            ended?.context("a consumer ended early")?;
        }
        Ok(())
    }
}

/// Goes through the stream once with each group, all at once. Returns how many messages were handled, by all together.
pub(crate) async fn go_through(groups: &[Group<String>], concurrency: u16) -> anyhow::Result<u64> {
    let mut consumers = JoinSet::new();
    for group in groups {
        let consumer = group.consumer().concurrency(concurrency.into()).until_caught_up();
        consumers.spawn(consumer.run(|_: Delivery<String>| std::future::ready(())));
    }
    let mut handled = 0;
    while let Some(ended) = consumers.join_next().await {
        handled += ended?.context("a consumer ended early")?.handled;
    }
    Ok(handled)
}
