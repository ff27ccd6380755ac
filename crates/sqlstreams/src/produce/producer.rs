//! The producer: a queue in front of a task that inserts what has gathered while the last commit was under way.

use tokio::sync::{mpsc, oneshot};

use super::insert::{self, InvalidMessage, STATEMENT_BYTES, STATEMENT_MESSAGES};
use super::receipt::Receipt;
use super::send::SendBuilder;
use crate::error::{Error, ErrorKind, Result};
use crate::message::{Encoded, Outgoing};
use crate::payload::{Codec, Json};
use crate::stream::Stream;

/// How many messages may wait for the task before callers wait for room.
const QUEUE: usize = 4_096;

/// Sends messages to a stream. Cheap to clone; clones share one queue.
///
/// Calls that run concurrently share transactions: while one commit is under way the next messages gather, so many
/// tasks that each send one message are about as fast as one that sends batches, and nobody waits for a timer. Each call
/// returns when its message is durable.
///
/// A connection that breaks, or a server that restarts or fails over, is not reported at once: what is certain not to be
/// stored is sent again for about 10 s. Where the connection breaks during the commit, the database is asked, for up to
/// a minute, whether the messages are stored, so that they are neither lost nor sent twice.
pub struct Producer<T, C = Json> {
    stream: Stream<T, C>,
    queue: mpsc::Sender<Waiting>,
}

impl<T, C> Clone for Producer<T, C> {
    fn clone(&self) -> Self {
        Self { stream: self.stream.clone(), queue: self.queue.clone() }
    }
}

impl<T, C> std::fmt::Debug for Producer<T, C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Producer").field("stream", &self.stream).finish()
    }
}

struct Waiting {
    message: Encoded,
    reply: oneshot::Sender<Result<Receipt>>,
}

impl<T: Send + 'static, C: Codec<T>> Producer<T, C> {
    pub(crate) fn new(stream: Stream<T, C>) -> Self {
        let (queue, waiting) = mpsc::channel(QUEUE);
        tokio::spawn(send_gathered(stream.clone(), waiting));
        Self { stream, queue }
    }

    /// Sends one message: await it, or add a key and headers first. Returns where it was stored once that is durable.
    ///
    /// ```no_run
    /// # async fn f(producer: sqlstreams::Producer<String>) -> sqlstreams::Result<()> {
    /// let receipt = producer.send(&"hello".to_owned()).key("greetings").await?;
    /// println!("stored as {}", receipt.id);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// A message that cannot be stored, and whatever keeps the database from storing it. After
    /// [`CommitUnknown`](ErrorKind::CommitUnknown) it may or may not be stored: the connection broke during the commit, and
    /// what became of that could not be found out. With an [idempotency key](Outgoing::idempotency_key) it can be sent again. So it may after [`Closed`](ErrorKind::Closed), when the runtime that the
    /// producer was made in shuts down. After every other error it is not stored.
    ///
    /// # Cancellation
    /// Dropped before it has waited for the first time, nothing is sent. Later, the producer goes on with the message, and
    /// nobody learns whether it was stored.
    pub fn send<'a>(&'a self, payload: &'a T) -> SendBuilder<'a, T, C> {
        SendBuilder::new(self, Outgoing::new(payload))
    }

    /// Sends a [tombstone](Outgoing::tombstone): from then on the key has no value. Otherwise as [`send`](Self::send).
    pub fn send_tombstone(&self, key: impl Into<String>) -> SendBuilder<'_, T, C> {
        SendBuilder::new(self, Outgoing::tombstone(key))
    }

    /// Sends any number of messages in one transaction: all are stored, or none. Returns where, in order.
    /// [Duplicates](Outgoing::idempotency_key) are no obstacle: their receipts say so.
    ///
    /// # Errors
    /// As [`send`](Self::send); when a message cannot be stored, [`place`](Error::place) says which.
    ///
    /// # Cancellation
    /// Dropped, all messages are stored or none: none before the commit was sent, and during the commit nobody learns which.
    /// The connection is closed.
    pub async fn send_all<'a, I>(&self, messages: I) -> Result<Vec<Receipt>>
    where
        T: 'a,
        I: IntoIterator<Item = Outgoing<'a, T>>,
    {
        let encoded = self.encode_all(messages)?;
        insert::insert(&self.stream.inner, &encoded).await
    }

    /// Which of these messages the stream cannot store, and why. Stores nothing.
    ///
    /// # Errors
    /// The database cannot be asked.
    pub async fn find_invalid<'a, I>(&self, messages: I) -> Result<Vec<InvalidMessage>>
    where
        T: 'a,
        I: IntoIterator<Item = Outgoing<'a, T>>,
    {
        let mut places = Vec::new();
        let mut encoded = Vec::new();
        let mut invalid = Vec::new();
        for (place, message) in messages.into_iter().enumerate() {
            match message.encode::<C>(self.stream.inner.payload_type, self.stream.inner.compacted) {
                Ok(message) => {
                    places.push(place);
                    encoded.push(message);
                }
                Err(error) => invalid.push(InvalidMessage { place, reason: error.to_string() }),
            }
        }
        let refused = insert::invalid(&self.stream.inner, &encoded).await?;
        invalid.extend(refused.into_iter().map(|m| InvalidMessage { place: places[m.place], ..m }));
        invalid.sort_by_key(|m| m.place);
        Ok(invalid)
    }

    pub(crate) async fn enqueue(&self, message: Outgoing<'_, T>) -> Result<Receipt> {
        let closed = || Error::new(ErrorKind::Closed, "the producer's task has ended");
        let message =
            message.encode::<C>(self.stream.inner.payload_type, self.stream.inner.compacted)?;
        if message.expected.is_some() {
            // By itself: where it conflicts, others' messages must not fail with it.
            let receipts = insert::insert(&self.stream.inner, &[message]).await?;
            let receipt = receipts.first().copied();
            return receipt.ok_or_else(|| Error::new(ErrorKind::Database, "no id came back"));
        }
        let (reply, answer) = oneshot::channel();
        self.queue.send(Waiting { message, reply }).await.map_err(|_| closed())?;
        answer.await.map_err(|_| closed())?
    }

    fn encode_all<'a, I>(&self, messages: I) -> Result<Vec<Encoded>>
    where
        T: 'a,
        I: IntoIterator<Item = Outgoing<'a, T>>,
    {
        let (payload_type, compacted) =
            (self.stream.inner.payload_type, self.stream.inner.compacted);
        let mut messages = messages.into_iter();
        let mut encoded = Vec::with_capacity(messages.size_hint().0);
        while let Some(message) = messages.next() {
            let place = encoded.len();
            match message.encode::<C>(payload_type, compacted) {
                Ok(message) => encoded.push(message),
                // One by itself is no batch.
                Err(error) if place == 0 && messages.next().is_none() => {
                    return Err(error.at_place(0));
                }
                Err(error) => {
                    return Err(Error::new(
                        error.kind(),
                        format!("message {}: {error}", place + 1),
                    )
                    .with_hint("Nothing of the batch was stored.")
                    .with_source(error)
                    .at_place(place));
                }
            }
        }
        Ok(encoded)
    }
}

/// Ends when the last producer is gone and everything is answered.
async fn send_gathered<T, C>(stream: Stream<T, C>, mut waiting: mpsc::Receiver<Waiting>) {
    while let Some(first) = waiting.recv().await {
        let mut bytes = first.message.bytes();
        let (mut messages, mut replies) = (vec![first.message], vec![first.reply]);
        while messages.len() < STATEMENT_MESSAGES && bytes < STATEMENT_BYTES {
            let Ok(next) = waiting.try_recv() else { break };
            bytes += next.message.bytes();
            messages.push(next.message);
            replies.push(next.reply);
        }
        send_batch(&stream, messages, replies).await;
    }
}

/// Callers know nothing of each other, so messages that are refused are taken out and the others are sent without them.
async fn send_batch<T, C>(
    stream: &Stream<T, C>,
    mut messages: Vec<Encoded>,
    mut replies: Vec<oneshot::Sender<Result<Receipt>>>,
) {
    while !messages.is_empty() {
        let error = match insert::insert_unchecked(&stream.inner, &messages).await {
            Ok(receipts) => {
                for (receipt, reply) in receipts.into_iter().zip(replies) {
                    // A caller that went away does not want to know.
                    let _ = reply.send(Ok(receipt));
                }
                return;
            }
            Err(error) => error,
        };
        let invalid = match error.may_be_a_message() {
            true => insert::invalid(&stream.inner, &messages).await,
            false => Ok(Vec::new()),
        };
        match invalid {
            Ok(invalid) if !invalid.is_empty() => {
                // From the back, so that the places before stay what they are.
                for refused in invalid.iter().rev() {
                    messages.remove(refused.place);
                    let _ = replies.remove(refused.place).send(Err(insert::at_fault(refused, 1)));
                }
            }
            _ => return fail_all(error, replies),
        }
    }
}

/// The same error for everyone; only one can have its source.
fn fail_all(error: Error, replies: Vec<oneshot::Sender<Result<Receipt>>>) {
    let copies: Vec<Error> = replies.iter().skip(1).map(|_| error.without_source()).collect();
    for (reply, error) in replies.into_iter().zip(std::iter::once(error).chain(copies)) {
        let _ = reply.send(Err(error));
    }
}
