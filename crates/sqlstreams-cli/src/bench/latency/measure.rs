//! The measurement: sends, handles, and puts the times together.

use std::collections::HashMap;
use std::future::ready;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use sqlstreams::{Group, Producer};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::ping::Ping;
use super::plan::Plan;
use super::sender::{self, Event};
use crate::bench::spread::Spread;
use crate::failure::Failure;
use crate::progress::Progress;

/// When nothing has happened for so long, what is missing does not come any more.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often progress is shown.
const TICK: Duration = Duration::from_millis(125);

/// The times of the messages that count.
#[derive(Debug)]
pub(crate) struct Measured {
    /// From when a message was due to its receipt.
    pub(crate) commit: Spread,
    /// From when a message was due to the beginning of its handler.
    pub(crate) handler: Spread,
    /// The latter less the former, message by message.
    pub(crate) difference: Spread,
    /// From when a message was due to the call that sent it: how late the benchmark itself was.
    pub(crate) lateness: Spread,
}

/// What is known of a message that is not through yet.
#[derive(Debug, Default)]
struct Times {
    committed: Option<Instant>,
    handled: Option<Instant>,
}

/// `begin` in the plan is now.
pub(crate) async fn measure(
    plan: Plan,
    bytes: usize,
    producer: Producer<Ping>,
    group: Group<Ping>,
    progress: &Progress,
) -> anyhow::Result<Measured> {
    let (events, mut coming) = mpsc::unbounded_channel();
    // Ends with this future, when that is dropped.
    let mut consumer = JoinSet::new();
    let handled = events.clone();
    consumer.spawn(async move {
        let handler = group.consumer().run(move |message| {
            let _ = handled.send(Event::Handled { n: message.payload.n, at: Instant::now() });
            ready(())
        });
        handler.await
    });
    sender::start(plan, bytes, producer, events);

    let mut measured = Measured {
        commit: Spread::new()?,
        handler: Spread::new()?,
        difference: Spread::new()?,
        lateness: Spread::new()?,
    };
    let mut waiting = HashMap::<u64, Times>::new();
    let (mut through, mut shown) = (0, Instant::now());
    while through < plan.total {
        let event = tokio::select! {
            event = coming.recv() => event.context("nobody sends any more")?,
            ended = consumer.join_next() => {
                ended.context("the consumer vanished")?.context("the consumer ended early")??;
                anyhow::bail!("the consumer ended early");
            }
            () = tokio::time::sleep(PATIENCE) => return Err(missing(plan.total - through)),
        };
        let n = match event {
            Event::Committed { n, sent, at } => {
                waiting.entry(n).or_default().committed = Some(at);
                if n >= plan.warm_up {
                    measured.lateness.record(nanos(plan.due(n), sent));
                }
                n
            }
            Event::Handled { n, at } => {
                // Should a lease run out, the message comes again: the first time counts.
                waiting.entry(n).or_default().handled.get_or_insert(at);
                n
            }
            Event::Refused(error) => return Err(error.into()),
        };
        if let Some(&Times { committed: Some(committed), handled: Some(handled) }) = waiting.get(&n)
        {
            waiting.remove(&n);
            through += 1;
            if n >= plan.warm_up {
                measured.commit.record(nanos(plan.due(n), committed));
                measured.handler.record(nanos(plan.due(n), handled));
                measured.difference.record(nanos(committed, handled));
            }
        }
        if shown.elapsed() >= TICK {
            progress.update(through, through);
            shown = Instant::now();
        }
    }
    Ok(measured)
}

/// From one time to another, which may be the earlier one.
fn nanos(from: Instant, to: Instant) -> i128 {
    let forth = to.saturating_duration_since(from).as_nanos().cast_signed();
    forth - from.saturating_duration_since(to).as_nanos().cast_signed()
}

fn missing(count: u64) -> anyhow::Error {
    Failure::failed(
        "messages_missing",
        format!("{count} messages did not come through, and nothing happened for {PATIENCE:?}"),
    )
    .hint("Should the server be too slow for this, try a lower --rate.")
    .into()
}
