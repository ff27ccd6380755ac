//! Messages that keep coming.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use sqlstreams::{CancellationToken, Producer};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::ledger::{Job, Ledger};

/// How often some are sent.
const EVERY: Duration = Duration::from_millis(5);
/// The most that are under way: beyond that the server is late, and more of them would only wait.
const UNDER_WAY: usize = 5_000;

/// Sends fresh messages at a steady rate until it is told to stop, or none is left. Ends with this value.
pub(super) struct Fresh {
    stop: CancellationToken,
    sent: Arc<AtomicU64>,
    sending: JoinSet<anyhow::Result<()>>,
}

impl Fresh {
    pub(super) fn start(
        producer: Producer<Job>,
        ledger: Arc<Ledger>,
        rate: u32,
        most: u64,
        pad: String,
    ) -> Self {
        let (stop, sent) = (CancellationToken::new(), Arc::new(AtomicU64::new(0)));
        let mut sending = JoinSet::new();
        let (told, counted) = (stop.clone(), sent.clone());
        sending.spawn(async move {
            let mut under_way = JoinSet::new();
            let (begun, mut n) = (Instant::now(), 0);
            let mut ticks = interval(EVERY);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
            while told.run_until_cancelled(ticks.tick()).await.is_some() {
                let due = (begun.elapsed().as_secs_f64() * f64::from(rate)) as u64;
                while n < due.min(most) && under_way.len() < UNDER_WAY {
                    let job = Job { fresh: true, n, sent: ledger.now(), pad: pad.clone() };
                    let (producer, counted) = (producer.clone(), counted.clone());
                    under_way.spawn(async move {
                        producer.send(&job).await?;
                        counted.fetch_add(1, Ordering::Relaxed);
                        anyhow::Ok(())
                    });
                    n += 1;
                }
                while let Some(ended) = under_way.try_join_next() {
                    ended??;
                }
            }
            while let Some(ended) = under_way.join_next().await {
                ended??;
            }
            Ok(())
        });
        Self { stop, sent, sending }
    }

    /// How many were sent.
    pub(super) async fn stop(mut self) -> anyhow::Result<u64> {
        self.stop.cancel();
        while let Some(ended) = self.sending.join_next().await {
            ended?.context("could not send fresh messages")?;
        }
        Ok(self.sent.load(Ordering::Relaxed))
    }
}
