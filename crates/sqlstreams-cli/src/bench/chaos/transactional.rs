//! The consumer whose handlers write in the transaction that settles the message.

use sqlstreams::Stream;

use super::business::Book;
use crate::signals::Signals;

/// Whether the library has such a consumer.
// MERGE: true.
pub(crate) const AVAILABLE: bool = false;

/// Consumes until it is stopped.
// MERGE: about
//     stream
//         .group(groups::TRANSACTIONAL)
//         .consumer()
//         .concurrency(4)
//         .stop_on(signals.stop)
//         .abort_on(signals.abort)
//         .run_transactional(async move |delivery, tx| {
//             book.write(tx, delivery.id, delivery.payload).await?;
//             worker::pause().await;
//             Ok(())
//         })
//         .await?;
pub(crate) async fn consume(
    stream: Stream<i64>,
    book: Book,
    signals: Signals,
) -> anyhow::Result<()> {
    let _ = (stream, book);
    signals.stop.cancelled().await;
    Ok(())
}
