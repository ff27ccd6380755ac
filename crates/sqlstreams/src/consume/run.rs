//! Starting a consumer: its group, its workers on the caller's runtime, and the coordinator and the keeper on the
//! client's own thread.

use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::mpsc;

use super::coordinator::{Coordinator, Parts, TROUBLE};
use super::delivery::Names;
use super::gate::Gate;
use super::handler::{Handler, Waits, runner};
use super::health::{Activity, Health};
use super::keeper::{Holding, Keeper};
use super::ordered::Ordered;
use super::protocol::Protocol;
use super::tally::Tally;
use super::workers::{Queue, Work, Workers};
use super::{Consumed, Settings};
use crate::backoff::Backoff;
use crate::client::within;
use crate::error::{Error, ErrorKind, Result};
use crate::group::{Group, GroupBuilder, Mode};
use crate::maintain::Duty;
use crate::payload::Codec;
use crate::wake::{Watcher, move_overdue};

/// How long it may take to look at the group, or to make it.
const OPEN: Duration = Duration::from_secs(30);

pub(super) async fn run<T, C>(
    group: GroupBuilder<T, C>,
    mut settings: Settings,
    handler: Handler<T>,
) -> Result<Consumed>
where
    T: Send + 'static,
    C: Codec<T>,
{
    // Dropped with this future, they stop the consumer, which drops its handlers and hands back what it holds.
    (settings.stop, settings.abort) = (settings.stop.child_token(), settings.abort.child_token());
    let _dropped = (settings.abort.clone().drop_guard(), settings.stop.clone().drop_guard());
    // The caller's: where handlers may use what they are used to.
    let runtime = Handle::current();
    let health = settings.health.clone();
    let client = group.client().clone();
    let stopped = Stopped(health);
    let consuming = client.inner.background.handle().spawn(async move {
        let _stopped = stopped;
        let duty = Duty::join(group.client());
        let consumed = consume(group, settings, handler, runtime).await;
        duty.end().await;
        consumed
    });
    consuming.await.unwrap_or_else(|e| {
        Err(Error::new(ErrorKind::Closed, "the consumer's task has panicked").with_source(e))
    })
}

/// Says so when the consumer has ended, however that came about.
struct Stopped(Health);

impl Drop for Stopped {
    fn drop(&mut self) {
        self.0.update(|health| (health.activity, health.in_flight) = (Activity::Stopped, 0));
    }
}

/// Consumes, and begins again where the group's mode was changed meanwhile.
async fn consume<T, C>(
    mut group: GroupBuilder<T, C>,
    settings: Settings,
    handler: Handler<T>,
    runtime: Handle,
) -> Result<Consumed>
where
    T: Send + 'static,
    C: Codec<T>,
{
    loop {
        let consumed =
            consume_in_mode(group.clone(), settings.clone(), handler.clone(), runtime.clone());
        match consumed.await {
            Err(error) if error.kind() == ErrorKind::WrongMode => {
                tracing::info!(%error, "the mode of a group was changed; consuming it as it is now");
                // Not as it was wanted when the consumer was made.
                group = group.in_any_mode();
            }
            ended => return ended,
        }
    }
}

async fn consume_in_mode<T, C>(
    group: GroupBuilder<T, C>,
    settings: Settings,
    handler: Handler<T>,
    runtime: Handle,
) -> Result<Consumed>
where
    T: Send + 'static,
    C: Codec<T>,
{
    let Some((group, mode, goal)) = open(group, &settings).await? else {
        return Ok(Consumed::default());
    };
    let stream = group.stream.inner.clone();
    let names = Names { stream: stream.name.clone(), group: group.name.clone() };
    let protocol = Protocol { stream: stream.clone(), group: group.id };
    let watch = Watcher::watch(&stream.client, stream.id, group.id);
    tokio::select! {
        () = stream.client.inner.watcher.known() => {}
        () = settings.stop.cancelled() => {}
    }

    let _connections =
        settings.transactional.then(|| stream.client.inner.pool.reserve(settings.concurrency));
    let gate = (mode == Mode::Ordered).then(Gate::default);
    let (queue, holding) = (Arc::new(Queue::new(gate)), Arc::new(Holding::default()));
    // Unbounded, yet never longer than what the consumer holds.
    let (finished, results) = mpsc::unbounded_channel();
    let waits = || Waits { stop: settings.stop.clone(), health: settings.health.clone() };
    let transactions = settings.transactional.then(waits);
    let runner = runner::<T, C>(protocol.clone(), names, settings.timeout, transactions, handler);
    let budget = settings.budget.as_ref().map(|budget| budget.0.clone());
    let work = Work { runner, batch: settings.batch_size, budget, finished };
    let workers = Workers::start(settings.concurrency, &runtime, &queue, work);
    let tally = Tally::start(protocol.clone(), settings.health.clone());
    if mode == Mode::Ordered {
        let ordered = Ordered::new(protocol, settings, workers, queue, results, watch);
        let ended = ordered.run(goal).await;
        tally.end().await;
        return ended;
    }
    let keeper = Keeper {
        protocol: protocol.clone(),
        holding: holding.clone(),
        queue: queue.clone(),
        life: stream.client.inner.watcher.life(),
    };
    let keeper = tokio::spawn(keeper.run());
    let parts = Parts { protocol, settings, workers, queue, results, holding, keeper, watch };
    let ended = Coordinator::new(parts).run(goal).await;
    tally.end().await;
    ended
}

/// The group, and up to where it is to be consumed. Waits for a database that is down; `None` when stopped meanwhile.
async fn open<T, C: Codec<T>>(
    group: GroupBuilder<T, C>,
    settings: &Settings,
) -> Result<Option<(Group<T, C>, Mode, Option<i64>)>> {
    let mut trouble = Backoff::new(TROUBLE);
    loop {
        let error = match within(OPEN, try_open(group.clone(), settings), "open the group").await {
            Ok(Err(error)) if error.is_retryable() => error,
            Ok(opened) => return opened.map(Some),
            Err(silence) => {
                group.client().forget_idle_connections();
                silence
            }
        };
        let pause = trouble.pause();
        tracing::warn!(
            error = &error as &dyn std::error::Error,
            "a consumer cannot start yet; trying again in {pause:?}"
        );
        settings.health.trouble(Some(error.to_string()));
        tokio::select! {
            () = settings.stop.cancelled() => return Ok(None),
            () = tokio::time::sleep(pause) => {}
        }
    }
}

async fn try_open<T, C: Codec<T>>(
    group: GroupBuilder<T, C>,
    settings: &Settings,
) -> Result<(Group<T, C>, Mode, Option<i64>)> {
    let group = group.create_if_missing().await?;
    if settings.transactional {
        group.allow_transactions().await?;
    }
    let goal = match settings.until_caught_up {
        true => {
            let stream = group.stream.inner.clone();
            move_overdue(&stream.client, stream.id).await?;
            Some(Protocol { stream, group: group.id }.head().await?)
        }
        false => None,
    };
    let mode = group.mode().await?;
    Ok((group, mode, goal))
}
