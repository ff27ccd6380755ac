//! `sqlstreams bench delay`.

use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use clap::Args;
use serde::Serialize;
use sqlstreams::{CancellationToken, Delivery, Outgoing, Stream};
use tokio::task::{JoinHandle, JoinSet};

use super::measured;
use super::place::Place;
use super::server::Server;
use crate::context::Context;
use crate::output::{print, thousands};
use crate::values;

/// What has to hold: consuming beside those that wait, by the time without; lateness; messages moved a second.
const MOST_COST: f64 = 1.2;
const MOST_LATE: Duration = Duration::from_millis(250);
const LEAST_MOVED: f64 = 20_000.0;
/// For how long the messages wait whose lateness is measured.
const DELAY: Duration = Duration::from_secs(1);
/// How long before it is due a bulk is sent, once it is.
const BEFORE: Duration = Duration::from_secs(3);
const MONTH: Duration = Duration::from_secs(30 * 24 * 3600);
/// How often it is measured what consuming costs.
const ROUNDS: u32 = 5;

const AFTER_HELP: &str = "\
What delayed messages cost: how long consuming takes beside many that wait, by what it takes without;
how late those come that are due at a steady rate; and how fast a bulk that is due at once enters the
log, also while somebody holds a snapshot. Without a database it starts a private PostgreSQL, as
durable as any. The exit code is 0 once it has measured, whether the targets hold or not: ask for
.targets_met.

Examples:
  sqlstreams bench delay
  sqlstreams bench delay --waiting 5000000 --bulk 300000
  sqlstreams bench delay --json | jq .late_p99_ms";

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct DelayArgs {
    /// Messages that are consumed to see what that costs
    #[arg(long, value_name = "N", default_value_t = 200_000,
          value_parser = clap::value_parser!(u64).range(1..))]
    messages: u64,
    /// Messages that wait meanwhile
    #[arg(long, value_name = "N", default_value_t = 100_000)]
    waiting: u64,
    /// Messages that come due per second
    #[arg(long, value_name = "N", default_value_t = 100,
          value_parser = clap::value_parser!(u32).range(1..=10_000))]
    rate: u32,
    /// For how long
    #[arg(long = "for", value_name = "DURATION", default_value = "10s",
          value_parser = values::duration)]
    time: Duration,
    /// Messages that are due at once
    #[arg(long, value_name = "N", default_value_t = 50_000)]
    bulk: u64,
}

/// What was measured: the document that `--json` prints.
#[derive(Debug, Clone, Serialize)]
struct Facts {
    sqlstreams: &'static str,
    postgresql: Server,
    messages: u64,
    waiting: u64,
    bulk: u64,
    consume_ms_without: f64,
    consume_ms_beside: f64,
    /// The second by the first.
    cost: f64,
    rate: u32,
    late_p50_ms: f64,
    late_p99_ms: f64,
    late_max_ms: f64,
    moved_per_second: f64,
    moved_per_second_under_snapshot: f64,
    targets_met: bool,
}

pub(crate) async fn run(args: DelayArgs, context: &Context) -> anyhow::Result<ExitCode> {
    let work = async |place: &mut Place<i64>| measure(&args, context, place).await;
    let facts = measured(context, "bench_delay_", &[], work, print_facts).await?;
    Ok(facts.err().unwrap_or(ExitCode::SUCCESS))
}

async fn measure(
    args: &DelayArgs,
    context: &Context,
    place: &mut Place<i64>,
) -> anyhow::Result<Facts> {
    let stream = &place.stream;
    let messages = args.messages;
    send(stream, messages, None).await?;
    context.say("consuming");
    consume(stream, "first", messages).await?;
    let without = consume(stream, "without", messages).await?;
    context.say("sending those that wait");
    send(stream, args.waiting, Some(SystemTime::now() + MONTH)).await?;
    context.say("consuming beside them");
    let beside = consume(stream, "beside", messages).await?;

    context.say("measuring how late messages come");
    let late = lateness(stream, args).await?;
    context.say("moving bulks");
    let consumer = Consumer::start(stream, "bulk").await?;
    let moved = bulk(stream, args.bulk).await?;
    place.db.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT txid_current()").await?;
    let under = bulk(stream, args.bulk).await?;
    place.db.batch_execute("COMMIT").await?;
    consumer.stop().await?;

    let at = |part: f64| late[((late.len() - 1) as f64 * part) as usize].as_secs_f64() * 1e3;
    let cost = beside / without;
    Ok(Facts {
        sqlstreams: env!("CARGO_PKG_VERSION"),
        postgresql: place.server.clone(),
        messages: args.messages,
        waiting: args.waiting,
        bulk: args.bulk,
        consume_ms_without: without,
        consume_ms_beside: beside,
        cost,
        rate: args.rate,
        late_p50_ms: at(0.5),
        late_p99_ms: at(0.99),
        late_max_ms: at(1.0),
        moved_per_second: moved,
        moved_per_second_under_snapshot: under,
        targets_met: cost <= MOST_COST
            && at(0.99) <= MOST_LATE.as_secs_f64() * 1e3
            && moved.min(under) >= LEAST_MOVED,
    })
}

/// Sends so many messages, to be delivered at a time.
async fn send(stream: &Stream<i64>, count: u64, at: Option<SystemTime>) -> anyhow::Result<()> {
    let mut senders = JoinSet::new();
    for sender in 0..4 {
        let producer = stream.producer();
        let numbers: Vec<i64> = (0..count as i64).filter(|n| n % 4 == sender).collect();
        senders.spawn(async move {
            for batch in numbers.chunks(2_000) {
                let messages = batch.iter().map(|number| match at {
                    Some(at) => Outgoing::new(number).deliver_at(at),
                    None => Outgoing::new(number),
                });
                producer.send_all(messages).await?;
            }
            anyhow::Ok(())
        });
    }
    while let Some(sent) = senders.join_next().await {
        sent??;
    }
    Ok(())
}

/// The milliseconds that it takes to consume what there is: the best of some rounds.
async fn consume(stream: &Stream<i64>, name: &str, messages: u64) -> anyhow::Result<f64> {
    let mut best = f64::INFINITY;
    for round in 0..ROUNDS {
        let group = stream.group(format!("{name}-{round}")).create().await?;
        let consumer = group.consumer().until_caught_up();
        let begun = Instant::now();
        let consumed = consumer.run(async |_: Delivery<i64>| {}).await?;
        anyhow::ensure!(consumed.handled == messages, "only {} came", consumed.handled);
        best = best.min(begun.elapsed().as_secs_f64() * 1e3);
    }
    Ok(best)
}

/// A consumer of what comes from now on, that notes how late it comes.
struct Consumer {
    begun: Instant,
    late: Arc<Mutex<Vec<Duration>>>,
    stop: CancellationToken,
    running: JoinHandle<sqlstreams::Result<sqlstreams::Consumed>>,
}

impl Consumer {
    async fn start(stream: &Stream<i64>, name: &str) -> anyhow::Result<Self> {
        let group = stream.group(name).start(sqlstreams::Start::Latest).create().await?;
        let (begun, late, stop) = (Instant::now(), Arc::default(), CancellationToken::new());
        let notes: Arc<Mutex<Vec<Duration>>> = Arc::clone(&late);
        let consumer = group.consumer().stop_on(stop.clone());
        let running = tokio::spawn(consumer.run(move |message: Delivery<i64>| {
            let due = Duration::from_micros(message.payload.unsigned_abs());
            notes
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(begun.elapsed().saturating_sub(due));
            async {}
        }));
        Ok(Self { begun, late, stop, running })
    }

    fn seen(&self) -> usize {
        self.late.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    async fn stop(self) -> anyhow::Result<Vec<Duration>> {
        self.stop.cancel();
        self.running.await??;
        Ok(std::mem::take(&mut *self.late.lock().unwrap_or_else(PoisonError::into_inner)))
    }
}

/// How late messages come, from their being due to the handler, sorted. The time to send them is part of it.
async fn lateness(stream: &Stream<i64>, args: &DelayArgs) -> anyhow::Result<Vec<Duration>> {
    let consumer = Consumer::start(stream, "late").await?;
    let producer = stream.producer();
    let count = (args.time.as_secs_f64() * f64::from(args.rate)).ceil().max(1.0) as u32;
    let mut senders = JoinSet::new();
    let mut tick = tokio::time::interval(Duration::from_secs(1) / args.rate);
    for _ in 0..count {
        tick.tick().await;
        let due = (consumer.begun.elapsed() + DELAY).as_micros() as i64;
        let producer = producer.clone();
        senders.spawn(async move { producer.send(&due).delay(DELAY).await });
    }
    while let Some(sent) = senders.join_next().await {
        sent??;
    }
    let deadline = Instant::now() + DELAY + Duration::from_secs(60);
    while consumer.seen() < count as usize {
        anyhow::ensure!(Instant::now() < deadline, "only {} of {count} came", consumer.seen());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let mut late = consumer.stop().await?;
    late.sort_unstable();
    Ok(late)
}

/// Messages a second that enter the log when so many are due at once.
async fn bulk(stream: &Stream<i64>, count: u64) -> anyhow::Result<f64> {
    let head = stream.info().await?.head;
    // As long as it takes to send them, they are not due.
    let first = Instant::now();
    send(stream, count.min(2_000), Some(SystemTime::now() + MONTH)).await?;
    let needed = first.elapsed().mul_f64(2.0 * count as f64 / count.clamp(1, 2_000) as f64);
    let due = SystemTime::now() + needed + BEFORE;
    send(stream, count, Some(due)).await?;
    anyhow::ensure!(SystemTime::now() < due, "sending took too long");
    let deadline = Instant::now() + needed + BEFORE + Duration::from_secs(120);
    while stream.info().await?.head < head + count as i64 {
        anyhow::ensure!(Instant::now() < deadline, "they have not all come");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok(count as f64 / due.elapsed().unwrap_or(Duration::from_millis(1)).as_secs_f64())
}

fn print_facts(facts: &Facts) -> anyhow::Result<()> {
    let Facts { waiting, bulk, rate, postgresql, .. } = facts;
    print(format_args!("{} waiting. {postgresql}\n", thousands(*waiting)))?;
    print(format_args!(
        "consuming {} messages  {:>8.0} ms without, {:.0} ms beside: {:.2} times as long",
        thousands(facts.messages),
        facts.consume_ms_without,
        facts.consume_ms_beside,
        facts.cost
    ))?;
    print(format_args!(
        "{rate} due a second       {:>8.0} ms late in the median, {:.0} ms p99, {:.0} ms at most",
        facts.late_p50_ms, facts.late_p99_ms, facts.late_max_ms
    ))?;
    print(format_args!(
        "{} due at once  {:>8}/s moved, {}/s under a held snapshot",
        thousands(*bulk),
        thousands(facts.moved_per_second as u64),
        thousands(facts.moved_per_second_under_snapshot as u64)
    ))?;
    let hold = if facts.targets_met { "hold" } else { "do not hold" };
    print(format_args!(
        "the targets, {MOST_COST} times, {} ms and {}/s, {hold}",
        MOST_LATE.as_millis(),
        thousands(LEAST_MOVED as u64)
    ))
}
