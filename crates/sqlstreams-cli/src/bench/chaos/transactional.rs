//! The consumer whose handlers write in the transaction that settles the message.

use sqlstreams::Stream;

use super::business::Book;
use super::groups::TRANSACTIONAL;
use super::worker::{CONCURRENCY, consumer, pause};
use crate::signals::Signals;

/// Consumes until it is stopped.
pub(crate) async fn consume(
    stream: Stream<i64>,
    book: Book,
    signals: Signals,
) -> anyhow::Result<()> {
    let consumer = consumer(&stream, TRANSACTIONAL, CONCURRENCY, &signals);
    let handler = consumer.run_transactional(move |message, transaction| {
        let book = book.clone();
        async move {
            book.write(&transaction, message.id, message.payload).await?;
            pause().await;
            Ok::<_, tokio_postgres::Error>(())
        }
    });
    handler.await?;
    Ok(())
}
