//! NATS JetStream on files: synced with every write, and as it is by default.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use async_nats::HeaderMap;
use async_nats::jetstream::consumer::{AckPolicy, PullConsumer, pull};
use async_nats::jetstream::context::PublishAckFuture;
use async_nats::jetstream::{self, stream};
use async_trait::async_trait;
use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::future::try_join_all;

use crate::messages::{Messages, Seen};
use crate::peer::{Peer, Processes, SENDERS};
use crate::place::Place;
use crate::process::{Server, free_port};

const SUBJECT: &str = "bench";
const STREAM: &str = "bench";
/// The most that an atomic batch may hold.
const BATCH: usize = 1_000;
const PRODUCERS: u64 = 2;
const READ: usize = 1_000;

/// When files are synced.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Sync {
    Always,
    /// Every two minutes: what the server acknowledged may be lost with the machine.
    Default,
}

pub(crate) struct Nats {
    server: Server,
    sync: Sync,
    client: async_nats::Client,
    context: jetstream::Context,
    consumer: Option<PullConsumer>,
}

pub(crate) async fn open(place: Arc<Place>, sync: Sync) -> Result<Box<dyn Peer>> {
    let program = place.python_tool("nats-server")?;
    let folder = place.folder(&format!("nats-{sync:?}").to_lowercase())?;
    let port = free_port()?;
    let interval = match sync {
        Sync::Always => "sync_interval: always",
        Sync::Default => "",
    };
    let config = format!(
        "listen: \"127.0.0.1:{port}\"\n\
         jetstream {{ store_dir: \"{}\", max_file_store: 20GB, {interval} }}\n",
        folder.join("store").display()
    );
    std::fs::write(folder.join("config"), config).context("could not write a configuration")?;
    let mut command = place.command(&program);
    command.arg("-c").arg(folder.join("config"));
    let mut server = Server::start(&mut command, &folder)?;
    server.listens(port).await?;
    let client = async_nats::connect(format!("nats://127.0.0.1:{port}")).await?;
    let context = jetstream::new(client.clone());
    Ok(Box::new(Nats { server, sync, client, context, consumer: None }))
}

impl Nats {
    /// Publishes up to [`BATCH`] messages that are stored together or not at all.
    async fn publish_batch(&self, id: &str, batch: Vec<String>) -> Result<()> {
        let last = batch.len();
        for (place, payload) in (1..).zip(batch) {
            let mut headers = HeaderMap::new();
            headers.insert("Nats-Batch-Id", id);
            headers.insert("Nats-Batch-Sequence", place.to_string());
            let payload = Bytes::from(payload);
            if place == last {
                headers.insert("Nats-Batch-Commit", "1");
                let answer = self.client.request_with_headers(SUBJECT, headers, payload).await?;
                let answer: serde_json::Value = serde_json::from_slice(&answer.payload)?;
                ensure!(answer.get("error").is_none(), "a batch was refused: {answer}");
                ensure!(answer["count"] == last, "a batch was not stored: {answer}");
            } else {
                self.client.publish_with_headers(SUBJECT, headers, payload).await?;
            }
        }
        Ok(())
    }
}

/// Publishes one after the other; [`BATCH`] at most wait for their acks.
async fn publish(context: jetstream::Context, messages: Messages) -> Result<()> {
    let mut waiting = VecDeque::with_capacity(BATCH);
    for number in messages.numbers.clone() {
        if waiting.len() >= BATCH
            && let Some(oldest) = waiting.pop_front()
        {
            confirmed(oldest).await?;
        }
        waiting.push_back(context.publish(SUBJECT, messages.payload(number).into()).await?);
    }
    for ack in waiting {
        confirmed(ack).await?;
    }
    Ok(())
}

async fn confirmed(ack: PublishAckFuture) -> Result<()> {
    ack.await?;
    Ok(())
}

#[async_trait]
impl Peer for Nats {
    fn settings(&self) -> Vec<String> {
        let version = self.client.server_info().version;
        let sync = match self.sync {
            Sync::Always => "sync_interval always",
            Sync::Default => "the default sync_interval of 2 minutes: not durable",
        };
        let produce = match self.sync {
            Sync::Always => format!("atomic batches of {BATCH}, {PRODUCERS} under way at a time"),
            Sync::Default => format!("{PRODUCERS} tasks with {BATCH} unacknowledged messages each"),
        };
        vec![
            format!("nats-server {version}, a stream on files, {sync}"),
            format!("produce: {produce}"),
            format!("send: publish and wait for its ack, from {SENDERS} tasks over one connection"),
            format!(
                "consume: one pull consumer, batches of {READ}, one ack for all before it, of which \
                 the last is waited for; the stream keeps the messages"
            ),
        ]
    }

    fn processes(&self) -> Processes {
        Processes { server: vec![self.server.pid()], ..Processes::default() }
    }

    async fn fresh(&mut self) -> Result<()> {
        let stream = stream::Config {
            name: STREAM.to_owned(),
            subjects: vec![SUBJECT.to_owned()],
            storage: stream::StorageType::File,
            allow_atomic_publish: true,
            // Without duplicates to look for it has less to do.
            duplicate_window: Duration::from_millis(100),
            ..stream::Config::default()
        };
        let stream = self.context.create_stream(stream).await?;
        let consumer = pull::Config {
            durable_name: Some("reader".to_owned()),
            ack_policy: AckPolicy::All,
            max_ack_pending: 100_000,
            ..pull::Config::default()
        };
        self.consumer = Some(stream.create_consumer(consumer).await?);
        Ok(())
    }

    async fn rest(&mut self) -> Result<()> {
        if self.consumer.take().is_some() {
            self.context.delete_stream(STREAM).await?;
        }
        Ok(())
    }

    async fn produce(&self, messages: Messages) -> Result<()> {
        let parts = messages.split(PRODUCERS).into_iter().map(async |part| {
            if matches!(self.sync, Sync::Default) {
                return tokio::spawn(publish(self.context.clone(), part)).await?;
            }
            for (n, batch) in part.batches(BATCH).enumerate() {
                let id = format!("{}-{n}", part.numbers.start);
                self.publish_batch(&id, batch).await?;
            }
            anyhow::Ok(())
        });
        try_join_all(parts).await?;
        Ok(())
    }

    async fn send(&self, messages: Messages) -> Result<()> {
        let senders = messages.split(SENDERS).into_iter().map(|part| {
            let context = self.context.clone();
            tokio::spawn(async move {
                for number in part.numbers.clone() {
                    context.publish(SUBJECT, part.payload(number).into()).await?.await?;
                }
                anyhow::Ok(())
            })
        });
        try_join_all(senders).await?.into_iter().collect()
    }

    async fn consume(&self, seen: Arc<Seen>) -> Result<()> {
        let consumer = self.consumer.as_ref().context("there is no consumer")?;
        let mut messages = consumer.stream().max_messages_per_batch(READ).messages().await?;
        let mut unacknowledged = 0;
        while let Some(message) = messages.next().await {
            let message = message?;
            seen.payload(&message.payload);
            unacknowledged += 1;
            let acknowledge = if seen.is_complete() {
                return message.double_ack().await.map_err(|error| anyhow::anyhow!(error));
            } else {
                unacknowledged >= READ
            };
            if acknowledge {
                message.ack().await.map_err(|error| anyhow::anyhow!(error))?;
                unacknowledged = 0;
            }
        }
        anyhow::bail!("the consumer ended early")
    }
}
