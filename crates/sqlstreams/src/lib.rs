//! The queue and the log fused into one system, as tables in the PostgreSQL you already run.
//!
//! A **stream** is a log: messages in the order they were inserted, kept, read again from the beginning by any number of
//! **consumer groups**. And it is a queue: when a group fails on a message, that message becomes a row of the group's
//! **exception queue**, with retries, backoff, dead letters and redrive, for this group alone. What succeeds never gets a row
//! of its own: a million clean messages cost one advancing integer per group.
//!
//! # Quick start
//!
//! ```no_run
//! use serde::{Deserialize, Serialize};
//! use sqlstreams::{Client, Delivery, Outcome};
//!
//! #[derive(Serialize, Deserialize)]
//! struct OrderPlaced {
//!     id: u64,
//!     total: f64,
//! }
//!
//! # async fn run() -> Result<(), Box<dyn std::error::Error>> {
//! // Installs its tables in schema `sqlstreams` if they are not there.
//! let client = Client::connect("postgres://app@localhost/shop").await?;
//! let orders = client.stream::<OrderPlaced>("orders").create_if_missing().await?;
//!
//! // Durable when it returns; concurrent calls share transactions.
//! let producer = orders.producer();
//! producer.send(&OrderPlaced { id: 1, total: 9.5 }).key("customer-42").await?;
//!
//! // Runs until it is stopped.
//! orders
//!     .group("receipts")
//!     .consumer()
//!     .concurrency(16)
//!     .run(async |message: Delivery<OrderPlaced>| {
//!         if message.payload.total < 0.0 {
//!             return Ok(Outcome::Dead("a negative total".into()));
//!         }
//!         send_receipt(&message.payload).await?; // an error: tried again later
//!         Ok::<_, std::io::Error>(Outcome::Done)
//!     })
//!     .await?;
//! # Ok(()) }
//! # async fn send_receipt(_: &OrderPlaced) -> std::io::Result<()> { Ok(()) }
//! ```
//!
//! # Behaviour
//!
//! **Producing** is an insert: by a [`Producer`], in a transaction of its own, or by [`Stream::send_in`], in yours, so that a
//! message exists if and only if what it tells of does.
//!
//! **Delivery.** Every committed message reaches every group at least once, in id order as far as concurrency goes, and never
//! before its transaction has committed. A message that commits late is not passed over: a group waits for transactions that
//! are writing to the same stream, and for no others.
//!
//! **Routing.** A group receives everything, or with bindings ([`GroupBuilder::bind`]) what they match: patterns over routing
//! keys and conditions on headers. They change forward only: what was claimed is judged as before.
//!
//! **Failure.** An error, a panic or a timeout of a handler is a failed attempt: the message is tried again after a backoff,
//! up to the group's `max_attempts`, then it is a dead letter, which an operator redrives or discards
//! ([`Group::redrive`], [`Group::discard`]). Meanwhile the group goes on with the messages after it.
//!
//! **Crashes.** A consumer's messages are leased, 15 s by default, and the lease is renewed while the consumer lives. When it
//! dies, another takes over what was unfinished: within about a second where the death of a process can be seen, if it has run
//! for 5 s itself. After a crash of the *server*, some messages that were handled just before may be handled again; nothing
//! that was acknowledged as sent is lost. A producer whose connection breaks during a commit asks whether that got through, and
//! sends again only what did not.
//!
//! **PostgreSQL** 15 or newer with UTF-8, no extension, no superuser. Works through poolers in transaction mode.
//!
//! # Errors
//!
//! One type, [`Error`]: [`kind`](Error::kind) to match on, a stable [`code`](Error::code), what happened, and a
//! [`hint`](Error::hint) at what to do.

mod background;
mod backoff;
mod binding;
mod client;
mod compacted;
mod connect;
mod consume;
mod dead;
mod delayed;
mod doctor;
mod error;
mod group;
mod import;
mod maintain;
mod message;
mod migrate;
mod moment;
mod name;
mod outcome;
mod partitions;
mod payload;
mod pool;
mod produce;
mod queries;
mod read;
mod reason;
mod reclaim;
mod retention;
mod schedule;
mod schema;
mod stream;
#[cfg(test)]
mod supervision;
mod wake;

pub use binding::{Binding, BindingSet, Reached};
pub use client::{Client, ClientBuilder};
pub use compacted::{Compacted, CurrentPage};
pub use connect::{Dsn, DsnError};
pub use consume::{
    Activity, Budget, Consumed, ConsumerBuilder, Context, Delivery, Health, HealthSnapshot,
    Transaction,
};
pub use dead::Exception;
pub use delayed::Delayed;
pub use doctor::{Doctor, Finding, Severity};
pub use error::{Error, ErrorKind, Result};
pub use group::{
    Group, GroupBuilder, GroupStatus, Mode, Replay, ReplayStatus, Replaying, RetryPolicy, Seek,
    Sought, Start,
};
pub use import::{Import, Imported};
pub use maintain::{
    Maintained, Maintenance, MaintenanceStatus, StepFailure, StepRun, StepStatus, StreamHold,
};
pub use message::{
    Headers, MAX_IDEMPOTENCY_KEY_BYTES, MAX_KEY_BYTES, MAX_ROUTING_KEY_BYTES, Message, Outgoing,
};
pub use migrate::MigrationReport;
pub use name::MAX_NAME_BYTES;
pub use outcome::{IntoOutcome, IntoOutcomes, MAX_ERROR_BYTES, Outcome};
pub use payload::{Bytes, Codec, Json, Lenient, MAX_PAYLOAD_BYTES, PayloadType, Text, Undecodable};
pub use produce::{
    Duplicate, Executor, InvalidMessage, Producer, Receipt, SendBuilder, SendInBuilder,
};
pub use read::{LogPage, Record};
pub use reclaim::{Left, Reclaimed};
pub use retention::{HoldReason, Retained, Retention, RetentionBusy, RetentionHold};
pub use schedule::{
    Fired, Missed, RunKind, Schedule, ScheduleBuilder, ScheduleInfo, ScheduleRun, ScheduleState,
    Timetable,
};
pub use stream::{Stream, StreamBuilder, StreamInfo};
pub use tokio_util::sync::CancellationToken;

/// The pages' examples, compiled with the tests.
#[cfg(doctest)]
mod pages {
    #[doc = include_str!("../../../README.md")]
    struct Readme;
    #[doc = include_str!("../../../docs/ordering.md")]
    struct Ordering;
    #[doc = include_str!("../../../docs/routing.md")]
    struct Routing;
    #[doc = include_str!("../../../docs/delayed.md")]
    struct Delayed;
    #[doc = include_str!("../../../docs/expiry.md")]
    struct Expiry;
    #[doc = include_str!("../../../docs/idempotency.md")]
    struct Idempotency;
    #[doc = include_str!("../../../docs/compaction.md")]
    struct Compaction;
    #[doc = include_str!("../../../docs/fairness.md")]
    struct Fairness;
    #[doc = include_str!("../../../docs/retention.md")]
    struct Retention;
    #[doc = include_str!("../../../docs/maintenance.md")]
    struct Maintenance;
    #[doc = include_str!("../../../docs/schedules.md")]
    struct Schedules;
    #[doc = include_str!("../../../docs/replay.md")]
    struct Replay;
    #[doc = include_str!("../../../docs/export.md")]
    struct Export;
    #[doc = include_str!("../../../docs/backup.md")]
    struct Backup;
}
