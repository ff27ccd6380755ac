//! The peers, a file each.

mod graphile_worker;
mod job_table;
mod nats;
mod pgmq;
mod pgq;
mod pgqueuer;
mod rabbitmq;
mod redis;
mod sql;
mod sqlstreams;

use std::sync::Arc;

use anyhow::Result;
use clap::ValueEnum;
use serde::Serialize;

use crate::peer::Peer;
use crate::place::Place;

/// A peer by name, in the order of the report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Which {
    /// SQLStreams itself, beside itself: what the harness adds
    Sqlstreams,
    /// SQLStreams with a handler of batches
    SqlstreamsBatches,
    /// A job table with SKIP LOCKED
    JobTable,
    Pgmq,
    Pgq,
    GraphileWorker,
    /// A queue in Python
    Pgqueuer,
    /// Redis Streams, appendfsync always
    Redis,
    /// NATS JetStream on files, sync_interval always
    NatsSync,
    /// NATS JetStream on files, default sync_interval
    NatsDefault,
    /// A RabbitMQ quorum queue with confirms
    Rabbitmq,
}

impl Which {
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Sqlstreams => "SQLStreams",
            Self::SqlstreamsBatches => "SQLStreams, batches handled",
            Self::JobTable => "job table",
            Self::Pgmq => "pgmq",
            Self::Pgq => "PgQ",
            Self::GraphileWorker => "graphile_worker",
            Self::Pgqueuer => "pgqueuer",
            Self::Redis => "Redis Streams, fsync always",
            Self::NatsSync => "JetStream, sync always",
            Self::NatsDefault => "JetStream, default sync",
            Self::Rabbitmq => "RabbitMQ quorum queue",
        }
    }

    /// Starts what it needs.
    pub(crate) async fn open(self, place: Arc<Place>) -> Result<Box<dyn Peer>> {
        match self {
            Self::Sqlstreams => sqlstreams::open(place, sqlstreams::Handler::Single).await,
            Self::SqlstreamsBatches => sqlstreams::open(place, sqlstreams::Handler::Batches).await,
            Self::JobTable => job_table::open(place).await,
            Self::Pgmq => pgmq::open(place).await,
            Self::Pgq => pgq::open(place).await,
            Self::GraphileWorker => graphile_worker::open(place).await,
            Self::Pgqueuer => pgqueuer::open(place).await,
            Self::Redis => redis::open(place).await,
            Self::NatsSync => nats::open(place, nats::Sync::Always).await,
            Self::NatsDefault => nats::open(place, nats::Sync::Default).await,
            Self::Rabbitmq => rabbitmq::open(place).await,
        }
    }
}
