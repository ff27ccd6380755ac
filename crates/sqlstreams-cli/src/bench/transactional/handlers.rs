//! Handlers that write in the transaction that settles their message.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use sqlstreams::{CancellationToken, Outgoing, Stream};
use tokio_postgres::types::Type;

/// The group that handles.
const GROUP: &str = "bench";

/// Commits a second of so many handlers at once, which have a backlog of so many new messages.
pub(super) async fn measure(
    stream: &Stream<i64>,
    insert: &str,
    at_once: usize,
    time: Duration,
    backlog: i64,
) -> anyhow::Result<f64> {
    let producer = stream.producer();
    let numbers: Vec<i64> = (0..backlog).collect();
    for batch in numbers.chunks(1_000) {
        producer.send_all(batch.iter().map(Outgoing::new)).await?;
    }
    let stop = CancellationToken::new();
    let ending = stop.clone();
    let insert: Arc<str> = insert.into();
    let consumer = stream.group(GROUP).consumer().concurrency(at_once).stop_on(stop);
    // From the first handler to the last one: neither connecting nor handing back belongs to it, as it does not beside.
    let span = Arc::new(Mutex::new(None::<(Instant, Instant)>));
    let seen = span.clone();
    let running = consumer.run_transactional(move |message, tx| {
        let insert = insert.clone();
        let now = Instant::now();
        let begun = seen.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert((now, now)).0;
        if now.duration_since(begun) >= time {
            ending.cancel();
        }
        let seen = seen.clone();
        async move {
            let written = tx.query_typed(&insert, &[(&message.id, Type::INT8)]).await.map(drop);
            *seen.lock().unwrap_or_else(PoisonError::into_inner) = Some((begun, Instant::now()));
            written
        }
    });
    let consumed = running.await?;
    let span = *span.lock().unwrap_or_else(PoisonError::into_inner);
    let (begun, ended) = span.context("no handler ran")?;
    Ok(consumed.handled as f64 / ended.duration_since(begun).as_secs_f64())
}
