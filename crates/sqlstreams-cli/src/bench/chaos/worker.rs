//! The process that is killed and frozen: a consumer of each group.

use std::io;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use sqlstreams::{Client, ConsumerBuilder, Delivery, Dsn, Stream};

use super::business::{BOOKED, Book, HANDLED};
use super::groups::{ORDERED, PLAIN, TRANSACTIONAL};
use super::transactional;
use crate::bench::place::Tables;
use crate::context::Context;
use crate::failure::Failure;
use crate::signals::Signals;

/// Handlers at once.
pub(crate) const CONCURRENCY: usize = 4;

#[derive(Debug, Args)]
pub(crate) struct WorkerArgs {
    /// The stream
    #[arg(long)]
    stream: String,
    /// What the process calls itself in its rows
    #[arg(long)]
    name: String,
    /// Of a hundred messages, how many fail at first
    #[arg(long, default_value_t = 0)]
    failures: u8,
}

pub(crate) async fn run(args: WorkerArgs, context: &Context) -> anyhow::Result<ExitCode> {
    let signals = Signals::catch_for_handlers()?;
    let url = context.given_database_url().ok_or_else(|| {
        Failure::usage("no_database", "`bench chaos` starts this, and tells it the database")
    })?;
    die_with_the_parent();
    let client = Client::builder(url).schema(context.schema()).migrate(false).connect().await?;
    let stream = client.stream::<i64>(&args.stream).open().await?;
    let tables = Tables::of(context.schema(), &args.stream);
    let db = Arc::new(Dsn::parse(url)?.connect().await?);
    // Processes die here, not the server: what it has committed stays, flushed or not.
    db.batch_execute("SET synchronous_commit = off").await?;
    let book = |table, group| Book::new(&tables, table, group, &args.name);
    tokio::try_join!(
        consume(&stream, PLAIN, &args, db.clone(), book(HANDLED, PLAIN), &signals),
        consume(&stream, ORDERED, &args, db.clone(), book(HANDLED, ORDERED), &signals),
        transactional::consume(&stream, book(BOOKED, TRANSACTIONAL), args.failures, &signals),
    )?;
    Ok(ExitCode::SUCCESS)
}

/// Consumes until it is stopped; the handler writes a row by itself.
async fn consume(
    stream: &Stream<i64>,
    group: &str,
    args: &WorkerArgs,
    db: Arc<tokio_postgres::Client>,
    book: Book,
    signals: &Signals,
) -> anyhow::Result<()> {
    let failures = args.failures;
    let handler = consumer(stream, group, signals).run(move |message| {
        let (db, book) = (db.clone(), book.clone());
        let fails = fails(&message, failures);
        let (id, payload) = (message.id, message.payload);
        async move {
            book.write(&db, id, payload, fails).await?;
            pause().await;
            if fails { Err("on purpose".into()) } else { Ok::<_, BoxedError>(()) }
        }
    });
    handler.await?;
    Ok(())
}

/// A consumer that stops when it is told to.
pub(crate) fn consumer(
    stream: &Stream<i64>,
    group: &str,
    signals: &Signals,
) -> ConsumerBuilder<i64> {
    stream
        .group(group)
        .consumer()
        .concurrency(CONCURRENCY)
        .stop_on(signals.stop.clone())
        .abort_on(signals.abort.clone())
}

/// What handlers fail with.
pub(crate) type BoxedError = Box<dyn std::error::Error + Send + Sync>;

/// Whether this attempt is one of those that are to fail: the first of so many messages of a hundred.
pub(crate) fn fails(message: &Delivery<i64>, failures: u8) -> bool {
    // Not the same keys each time.
    let draw = fastrand::Rng::with_seed(message.payload.unsigned_abs()).u8(..100);
    message.attempt() == 1 && draw < failures
}

/// A moment after the row was written, so that many are hit between that and the end of their handler.
pub(crate) async fn pause() {
    tokio::time::sleep(Duration::from_millis(fastrand::u64(0..4))).await;
}

/// The other end of stdin is the parent's: it closes when the parent is gone, however that came about.
fn die_with_the_parent() {
    // A process that is frozen cannot read.
    #[cfg(target_os = "linux")]
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    std::thread::spawn(|| {
        let _ = io::copy(&mut io::stdin(), &mut io::sink());
        std::process::exit(1);
    });
}
