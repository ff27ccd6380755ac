//! Handlers that write in the transaction that settles their message.

use std::sync::Arc;
use std::time::{Duration, Instant};

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
    let begun = Instant::now();
    let consumer = stream.group(GROUP).consumer().concurrency(at_once).stop_on(stop);
    let running = consumer.run_transactional(move |message, tx| {
        let (insert, ending) = (insert.clone(), ending.clone());
        async move {
            if begun.elapsed() >= time {
                ending.cancel();
            }
            tx.query_typed(&insert, &[(&message.id, Type::INT8)]).await.map(drop)
        }
    });
    let consumed = running.await?;
    Ok(consumed.handled as f64 / begun.elapsed().as_secs_f64())
}
