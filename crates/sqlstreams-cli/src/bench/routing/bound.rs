//! A group with a binding, and one consumer.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use anyhow::Context as _;
use sqlstreams::{CancellationToken, Stream};

/// Ids a second from the first message that matches, id 1, to the last one, and how many there were.
pub(super) async fn measure(
    stream: &Stream<i64>,
    group: &str,
    pattern: &str,
    last: i64,
) -> anyhow::Result<(f64, u64)> {
    let stop = CancellationToken::new();
    let ending = stop.clone();
    let span = Arc::new(Mutex::new((None, None)));
    let seen = span.clone();
    let consumer = stream.group(group).bind(pattern).consumer().concurrency(1).stop_on(stop);
    let consumed = consumer
        .run(move |message| {
            let mut span = seen.lock().unwrap_or_else(PoisonError::into_inner);
            span.0.get_or_insert_with(Instant::now);
            if message.id == last {
                span.1 = Some(Instant::now());
                ending.cancel();
            }
            std::future::ready(())
        })
        .await?;
    let (begun, ended) = *span.lock().unwrap_or_else(PoisonError::into_inner);
    let elapsed = ended.zip(begun).map(|(ended, begun): (Instant, Instant)| ended - begun);
    let elapsed = elapsed.context("the last message did not arrive")?;
    Ok((last as f64 / elapsed.as_secs_f64(), consumed.handled))
}
