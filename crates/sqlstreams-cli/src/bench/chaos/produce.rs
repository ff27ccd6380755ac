//! The producer, which nobody disturbs: it remembers what it was told is stored.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use sqlstreams::{Outgoing, Stream};
use tokio::task::JoinSet;

use crate::progress::Progress;

/// What was produced.
#[derive(Debug, Default)]
pub(crate) struct Produced {
    /// The payload of each message whose receipt came, by its id.
    pub(crate) acknowledged: BTreeMap<i64, i64>,
    /// Calls that failed.
    pub(crate) refused: u64,
}

/// Messages sent at once.
const BATCH: usize = 500;

/// The key of a message among so many.
pub(crate) fn key(payload: i64, keys: u32) -> i64 {
    payload % i64::from(keys)
}

/// Produces so many messages as fast as it goes. Payloads count from 1.
pub(crate) async fn produce_all(
    stream: &Stream<i64>,
    messages: u32,
    keys: u32,
) -> anyhow::Result<Produced> {
    let producer = stream.producer();
    let mut produced = Produced::default();
    let payloads: Vec<i64> = (1..=i64::from(messages)).collect();
    for batch in payloads.chunks(BATCH) {
        let messages = batch.iter().map(|n| Outgoing::new(n).key(key(*n, keys).to_string()));
        match producer.send_all(messages).await {
            Ok(receipts) => {
                let ids = receipts.iter().map(|receipt| receipt.id);
                produced.acknowledged.extend(ids.zip(batch.iter().copied()));
            }
            Err(_) => produced.refused += 1,
        }
    }
    Ok(produced)
}

/// Produces at a steady rate until that time. Payloads count from 1.
pub(crate) async fn produce(
    stream: &Stream<i64>,
    rate: u32,
    keys: u32,
    until: Instant,
    progress: &Progress,
) -> anyhow::Result<Produced> {
    let producer = stream.producer();
    let mut produced = Produced::default();
    let mut sends = JoinSet::new();
    let mut ticks = tokio::time::interval(Duration::from_secs(1) / rate);
    let begin = Instant::now();
    let mut payload = 0_i64;
    loop {
        tokio::select! {
            _ = ticks.tick() => {
                if Instant::now() >= until {
                    break;
                }
                payload += 1;
                let producer = producer.clone();
                let key = key(payload, keys).to_string();
                sends.spawn(async move { (payload, producer.send(&payload).key(key).await) });
                progress.update(
                    begin.elapsed().as_millis().try_into().unwrap_or(u64::MAX),
                    payload.unsigned_abs(),
                );
            }
            Some(sent) = sends.join_next() => produced.note(sent.context("a send vanished")?),
        }
    }
    while let Some(sent) = sends.join_next().await {
        produced.note(sent.context("a send vanished")?);
    }
    Ok(produced)
}

impl Produced {
    fn note(&mut self, (payload, sent): (i64, sqlstreams::Result<sqlstreams::Receipt>)) {
        match sent {
            Ok(receipt) => {
                self.acknowledged.insert(receipt.id, payload);
            }
            Err(_) => self.refused += 1,
        }
    }

    /// The last id that is known to be stored.
    pub(crate) fn last(&self) -> i64 {
        self.acknowledged.last_key_value().map_or(0, |(id, _)| *id)
    }
}
