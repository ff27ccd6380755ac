//! The consumer whose handlers write in the transaction that settles the message.

use sqlstreams::Stream;

use super::business::Book;
use super::groups::TRANSACTIONAL;
use super::worker::{BoxedError, consumer, fails, pause};
use crate::signals::Signals;

/// Consumes until it is stopped.
pub(crate) async fn consume(
    stream: &Stream<i64>,
    book: Book,
    failures: u8,
    signals: &Signals,
) -> anyhow::Result<()> {
    let consumer = consumer(stream, TRANSACTIONAL, signals);
    let handler = consumer.run_transactional(move |message, transaction| {
        let book = book.clone();
        let fails = fails(&message, failures);
        async move {
            book.write(&transaction, message.id, message.payload, fails).await?;
            pause().await;
            // What it has written goes with that.
            if fails { Err("on purpose".into()) } else { Ok::<_, BoxedError>(()) }
        }
    });
    handler.await?;
    Ok(())
}
