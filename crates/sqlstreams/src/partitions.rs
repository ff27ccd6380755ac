//! Partitions of the log that are missing, made by whoever notices. As a rule maintenance (maintain/) has made them before.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::client::Client;
use crate::error::Result;
use crate::stream::StreamInner;

/// So many partitions there are beyond those that a batch needs.
const AHEAD: i64 = 3;
/// So many are made at once beside the work.
const FEW: i32 = 8;

/// Twice per partition, beside the work: makes the partitions that will be needed soon, should nobody do the maintenance. `id` is
/// one that was just produced or read. Failures are logged: a producer that runs out of partitions makes them itself.
pub(crate) fn look_after(stream: &Arc<StreamInner>, id: i64) {
    let due = stream.next_upkeep.load(Ordering::Relaxed);
    let next = id.saturating_add((stream.partition_size / 2).max(1));
    if id < due
        || stream
            .next_upkeep
            .compare_exchange(due, next, Ordering::Relaxed, Ordering::Relaxed)
            .is_err()
    {
        return;
    }
    let stream = stream.clone();
    tokio::spawn(async move {
        if let Err(error) = ensure(&stream, 0).await {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(stream = stream.name, error, "could not make partitions ahead");
        }
    });
}

/// Makes the partitions for so many messages, and those ahead; for none, those that the pace of the stream asks for. Returns how many: none where others
/// have made them, or something keeps everybody from it at present.
pub(crate) async fn ensure(stream: &StreamInner, messages: usize) -> Result<u32> {
    let needed = i64::try_from(messages).unwrap_or(i64::MAX) / stream.partition_size;
    let ahead = i32::try_from(needed.saturating_add(AHEAD)).unwrap_or(i32::MAX);
    // Those that nobody waits for a few at a time: producers wait for whoever makes the next as long as that transaction takes.
    let (ahead, most) = if messages > 0 { (Some(ahead), ahead) } else { (None, FEW) };
    make(&stream.client, stream.id, ahead, most).await
}

/// Makes a few partitions for whoever found no room: so many ahead, or those that the pace of the stream asks for.
pub(crate) async fn make_few(client: &Client, stream: i64, ahead: Option<i32>) -> Result<u32> {
    make(client, stream, ahead, FEW).await
}

async fn make(client: &Client, stream: i64, ahead: Option<i32>, most: i32) -> Result<u32> {
    let ensure = &client.inner.queries.ensure_partitions;
    let made = client.query_one(ensure, &[&stream, &ahead, &most], "make partitions").await?;
    Ok(u32::try_from(made.get::<_, i32>(0)).unwrap_or_default())
}
