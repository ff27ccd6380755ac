//! Running handlers: decode, call, catch panics and timeouts, commit; whatever kind of handler it is.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use tokio_util::sync::CancellationToken;

use super::delivery::{Context, Deadline, Delivery, Names};
use super::health::Health;
use super::held::Source;
use super::protocol::Protocol;
use super::transaction::{Committed, Open, Transaction, is_of_handler};
use super::workers::{Finished, Job};
use crate::backoff::{Backoff, jittered};
use crate::error::Result;
use crate::message::{Message, RawMessage};
use crate::outcome::{IntoOutcome, IntoOutcomes, Outcome, Verdict};
use crate::payload::Codec;
use crate::reason::describe;

/// The pause after a transaction could not be begun, growing from the first to the second.
const TROUBLE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));
/// How long to wait for a transaction before saying so.
const PATIENCE: Duration = Duration::from_secs(30);
/// A message that was put off so often is not spared the attempt any more if the connection breaks under its handler: perhaps
/// the handler breaks it.
const SPARED: u32 = 3;
/// The pause after the connection broke, for a message that was never put off before.
const AGAIN: Duration = Duration::from_millis(250);

type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Handles the jobs it is given together, and says how each ended. Handlers that take a transaction get the one that is open, if
/// there is one; with `more` jobs to come, the runner may leave another one open.
pub(crate) type Runner = Arc<dyn Fn(Vec<Job>, Option<Open>, bool) -> BoxFuture<Ran> + Send + Sync>;

/// What a runner leaves.
pub(crate) type Ran = (Vec<Finished>, Option<Open>);

/// A handler of any kind: one outcome for each delivery.
pub(crate) type Handler<T> =
    Arc<dyn Fn(Vec<Delivery<T>>, Option<Transaction>) -> BoxFuture<Vec<Outcome>> + Send + Sync>;

pub(crate) fn single<T, H, F>(handler: H) -> Handler<T>
where
    T: Send + 'static,
    H: Fn(Delivery<T>) -> F + Send + Sync + 'static,
    F: Future<Output: IntoOutcome> + Send + 'static,
{
    Arc::new(move |mut deliveries, _| match deliveries.pop() {
        Some(delivery) => {
            let run = handler(delivery);
            Box::pin(async move { vec![run.await.into_outcome()] })
        }
        None => Box::pin(async { Vec::new() }),
    })
}

pub(crate) fn batch<T, H, F>(handler: H) -> Handler<T>
where
    T: Send + 'static,
    H: Fn(Vec<Delivery<T>>) -> F + Send + Sync + 'static,
    F: Future<Output: IntoOutcomes> + Send + 'static,
{
    Arc::new(move |deliveries, _| {
        let count = deliveries.len();
        let run = handler(deliveries);
        Box::pin(async move { run.await.into_outcomes(count) })
    })
}

pub(crate) fn transactional<T, H, F>(handler: H) -> Handler<T>
where
    T: Send + 'static,
    H: Fn(Delivery<T>, Transaction) -> F + Send + Sync + 'static,
    F: Future<Output: IntoOutcome> + Send + 'static,
{
    Arc::new(move |mut deliveries, transaction| match (deliveries.pop(), transaction) {
        (Some(delivery), Some(transaction)) => {
            let run = handler(delivery, transaction);
            Box::pin(async move { vec![run.await.into_outcome()] })
        }
        _ => Box::pin(async { Vec::new() }),
    })
}

pub(crate) fn transactional_batch<T, H, F>(handler: H) -> Handler<T>
where
    T: Send + 'static,
    H: Fn(Vec<Delivery<T>>, Transaction) -> F + Send + Sync + 'static,
    F: Future<Output: IntoOutcomes> + Send + 'static,
{
    Arc::new(move |deliveries, transaction| match transaction {
        Some(transaction) => {
            let count = deliveries.len();
            let run = handler(deliveries, transaction);
            Box::pin(async move { run.await.into_outcomes(count) })
        }
        None => Box::pin(async { Vec::new() }),
    })
}

/// What all runs of a consumer's handler have in common.
struct Run<T> {
    protocol: Protocol,
    names: Arc<Names>,
    timeout: Option<Duration>,
    /// Those that take a transaction.
    transactions: Option<Waits>,
    handler: Handler<T>,
}

/// What handlers wait with for their transactions.
pub(crate) struct Waits {
    pub(crate) stop: CancellationToken,
    pub(crate) health: Health,
}

/// A message that is being handled.
struct Running {
    source: Source,
    id: i64,
    delays: u32,
}

/// How a call of the handler ended.
enum Ended {
    Returned,
    Panicked,
    TimedOut,
}

/// The runner for a handler of `T`s that are read by codec `C`.
pub(crate) fn runner<T, C>(
    protocol: Protocol,
    names: Names,
    timeout: Option<Duration>,
    transactions: Option<Waits>,
    handler: Handler<T>,
) -> Runner
where
    T: Send + 'static,
    C: Codec<T>,
{
    let run = Arc::new(Run { protocol, names: Arc::new(names), timeout, transactions, handler });
    Arc::new(move |jobs, open, more| {
        let run = run.clone();
        Box::pin(async move { run.run::<C>(jobs, open, more).await })
    })
}

impl<T: Send + 'static> Run<T> {
    async fn run<C: Codec<T>>(&self, jobs: Vec<Job>, open: Option<Open>, more: bool) -> Ran {
        let deadline = self.timeout.map(|limit| Arc::new(Deadline::after(limit)));
        let mut finished = Vec::with_capacity(jobs.len());
        let mut running = Vec::with_capacity(jobs.len());
        let mut deliveries = Vec::with_capacity(jobs.len());
        // They may come from several leases; a batch goes on as long as one of them does.
        let over = jobs.first().map(|job| job.term.over().clone()).unwrap_or_default();
        // Before it is told whether messages have expired: it may take a while.
        let open = match (open.filter(|open| !open.is_closed()), &self.transactions) {
            (None, Some(waits)) if jobs.iter().any(|job| job.message.passed_over().is_none()) => {
                self.begin(waits, &over).await
            }
            (open, _) => Ok(open),
        };
        for Job { source, message, history, term } in jobs {
            let id = message.id;
            if let Some(verdict) = message.passed_over() {
                finished.push(Finished { source, id, verdict, key: None });
                continue;
            }
            let expires = message.expires;
            match decode::<T, C>(message) {
                Ok(message) => {
                    let context = Context::new(
                        self.names.clone(),
                        history,
                        term.over().clone(),
                        deadline.clone(),
                        expires,
                    );
                    deliveries.push(Delivery::new(message, context));
                    running.push(Running { source, id, delays: history.delays });
                }
                Err(reason) => {
                    finished.push(Finished {
                        source,
                        id,
                        verdict: Outcome::Dead(reason).into(),
                        key: None,
                    });
                }
            }
        }
        if running.is_empty() {
            return (finished, open.unwrap_or_default());
        }
        let (verdicts, open) = match &self.transactions {
            None => {
                let (outcomes, _) = self.call(deliveries, None, deadline).await;
                (outcomes.into_iter().map(Verdict::from).collect(), None)
            }
            Some(_) => {
                self.call_in_transaction(deliveries, &running, deadline, &over, open, more).await
            }
        };
        finished.extend(running.into_iter().zip(verdicts).map(
            |(Running { source, id, .. }, verdict)| Finished { source, id, verdict, key: None },
        ));
        (finished, open)
    }

    /// One outcome for each delivery, whatever the handler does.
    async fn call(
        &self,
        deliveries: Vec<Delivery<T>>,
        transaction: Option<Transaction>,
        deadline: Option<Arc<Deadline>>,
    ) -> (Vec<Outcome>, Ended) {
        let count = deliveries.len();
        // The call itself may panic as well as the future it makes.
        let run = AssertUnwindSafe(async { (self.handler)(deliveries, transaction).await });
        let run = run.catch_unwind();
        let ended = match &deadline {
            None => run.await,
            Some(deadline) => tokio::select! {
                biased;
                ended = run => ended,
                () = deadline.passed() => {
                    let error = format!("the handler took longer than {:?}", deadline.limit());
                    return (vec![Outcome::Retry(error); count], Ended::TimedOut);
                }
            },
        };
        match ended {
            Ok(outcomes) => (outcomes, Ended::Returned),
            Err(panic) => {
                let error = format!("the handler panicked: {}", panic_text(&*panic));
                (vec![Outcome::Retry(error); count], Ended::Panicked)
            }
        }
    }

    /// A transaction, as soon as there is a connection; `None` when the messages are not ours any more before that, or the
    /// consumer stops.
    async fn begin(&self, waits: &Waits, over: &CancellationToken) -> Result<Option<Open>> {
        let mut backoff = Backoff::new(TROUBLE);
        // Seen by others until there is a transaction.
        let mut trouble = None;
        loop {
            let error = {
                let mut begin = pin!(Open::begin(&self.protocol));
                loop {
                    tokio::select! {
                        begun = &mut begin => match begun {
                            Err(error) if error.is_retryable() => break error,
                            begun => return begun.map(Some),
                        },
                        () = over.cancelled() => return Ok(None),
                        () = waits.stop.cancelled() => return Ok(None),
                        () = tokio::time::sleep(PATIENCE), if trouble.is_none() => {
                            let text = format!("no connection came free for a handler within {PATIENCE:?}");
                            tracing::warn!("{text}; do others keep their transactions for so long?");
                            trouble = Some(waits.health.handlers_wait(text));
                        }
                    }
                }
            };
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                "no transaction for a handler; trying again"
            );
            trouble = Some(waits.health.handlers_wait(error.to_string()));
            tokio::select! {
                () = over.cancelled() => return Ok(None),
                () = waits.stop.cancelled() => return Ok(None),
                () = tokio::time::sleep(backoff.pause()) => {}
            }
        }
    }

    async fn call_in_transaction(
        &self,
        deliveries: Vec<Delivery<T>>,
        running: &[Running],
        deadline: Option<Arc<Deadline>>,
        over: &CancellationToken,
        open: Result<Option<Open>>,
        more: bool,
    ) -> (Vec<Verdict>, Option<Open>) {
        let all = |verdict: Verdict| (vec![verdict; running.len()], None);
        let mut open = match open {
            Ok(Some(open)) => open,
            Ok(None) => return all(Verdict::cancelled()),
            Err(error) => return all(Outcome::Retry(describe(&error)).into()),
        };
        // Waiting for a connection was not the handler's time.
        if let (Some(deadline), Some(limit)) = (&deadline, self.timeout) {
            deadline.restart(limit);
        }
        let (outcomes, ended) = self.call(deliveries, open.transaction(), deadline).await;
        let handled = || running.iter().zip(&outcomes).filter(|(_, o)| **o == Outcome::Done);
        if handled().next().is_none() {
            let broken = match ended {
                Ended::Returned => open.roll_back().await,
                // What it was about is lost, and with it the connection, as it may have left anything there.
                Ended::Panicked => open.look_for_breakage(),
                Ended::TimedOut => Ok(()),
            };
            let spared = broken.is_err_and(|error| !is_of_handler(&error));
            let verdicts = running.iter().zip(outcomes).map(|(message, outcome)| match outcome {
                Outcome::Retry(error) | Outcome::RetryAfter(error, _) if spared => {
                    message.again(error)
                }
                outcome => outcome.into(),
            });
            return (verdicts.collect(), None);
        }
        let mut messages: Vec<(Source, Vec<i64>)> = Vec::new();
        for (Running { source, id, .. }, _) in handled() {
            match messages.iter_mut().find(|(s, _)| s == source) {
                Some((_, ids)) => ids.push(*id),
                None => messages.push((*source, vec![*id])),
            }
        }
        let (committed, open) = open.commit(&self.protocol, &messages, over, more).await;
        let verdicts = running
            .iter()
            .zip(outcomes)
            .map(|(message, outcome)| match (&committed, outcome) {
                (Committed::Yes, Outcome::Done) => Verdict::settled(),
                (Committed::Before, Outcome::Done) => Verdict::settled_before(),
                // It was one transaction: had it committed, nothing would be unsettled.
                (Committed::Unsettled(ids, _), Outcome::Done) if !ids.contains(&message.id) => {
                    Verdict::settled_before()
                }
                (Committed::Unsettled(_, error) | Committed::Broken(error), Outcome::Done) => {
                    message.again(describe(error))
                }
                (Committed::Lost, _) => Verdict::cancelled(),
                (Committed::No(error), Outcome::Done) => Outcome::Retry(describe(error)).into(),
                (_, outcome) => outcome.into(),
            })
            .collect();
        (verdicts, open)
    }
}

impl Running {
    /// As if it had not been run, for a while: its connection broke.
    fn again(&self, error: String) -> Verdict {
        match self.delays < SPARED {
            true => Outcome::Delay(jittered(AGAIN * 2_u32.pow(self.delays))).into(),
            false => Outcome::Retry(error).into(),
        }
    }
}

/// A codec is the user's code, too, and may panic.
fn decode<T, C: Codec<T>>(raw: RawMessage) -> Result<Message<T>, String> {
    match std::panic::catch_unwind(AssertUnwindSafe(|| raw.decode::<T, C>())) {
        Ok(decoded) => decoded,
        Err(panic) => Err(format!("decoding the payload panicked: {}", panic_text(&*panic))),
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    match (panic.downcast_ref::<&str>(), panic.downcast_ref::<String>()) {
        (Some(text), _) => text,
        (_, Some(text)) => text,
        _ => "no text",
    }
}
