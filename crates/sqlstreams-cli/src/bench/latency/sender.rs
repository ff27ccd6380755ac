//! Sends each message when it is due, whatever became of those before.

use std::thread;
use std::time::Instant;

use sqlstreams::Producer;
use tokio::runtime::Handle;
use tokio::sync::mpsc::UnboundedSender;

use super::ping::Ping;
use super::plan::Plan;

/// What happened to a message.
#[derive(Debug)]
pub(crate) enum Event {
    /// The call that sent it began and returned at these times.
    Committed { n: u64, sent: Instant, at: Instant },
    /// A handler began with it.
    Handled { n: u64, at: Instant },
    /// It could not be sent.
    Refused(sqlstreams::Error),
}

/// Starts sending. Ends by itself after the last message, or when nobody listens to events any more.
///
/// A thread of its own sleeps until a message is due: the runtime's timer counts in milliseconds, which is about as much as
/// there is to measure. Each call is a task, so that a slow one holds back nothing.
pub(crate) fn start(
    plan: Plan,
    bytes: usize,
    producer: Producer<Ping>,
    events: UnboundedSender<Event>,
) {
    let runtime = Handle::current();
    thread::spawn(move || {
        for n in 0..plan.total {
            thread::sleep(plan.due(n).saturating_duration_since(Instant::now()));
            if events.is_closed() {
                return;
            }
            let ping = Ping::numbered(n, bytes);
            let (producer, events) = (producer.clone(), events.clone());
            runtime.spawn(async move {
                let sent = Instant::now();
                let event = match producer.send(&ping).await {
                    Ok(_) => Event::Committed { n, sent, at: Instant::now() },
                    Err(error) => Event::Refused(error),
                };
                // Nobody listens any more when the benchmark was cut short.
                let _ = events.send(event);
            });
        }
    });
}
