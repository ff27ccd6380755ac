//! RabbitMQ: a quorum queue with publisher confirms.

use std::collections::VecDeque;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use async_trait::async_trait;
use futures_util::StreamExt as _;
use futures_util::future::try_join_all;
use lapin::options::{
    BasicAckOptions, BasicConsumeOptions, BasicPublishOptions, BasicQosOptions,
    ConfirmSelectOptions, QueueDeclareOptions, QueueDeleteOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Confirmation, Connection, ConnectionProperties};

use crate::messages::{Messages, Seen};
use crate::peer::{Peer, Processes, SENDERS};
use crate::place::Place;
use crate::process::{Server, free_port};

const QUEUE: &str = "bench";
/// How many messages may wait for their confirms on a channel.
const WINDOW: usize = 1_000;
const PRODUCERS: u64 = 2;
const PREFETCH: u16 = 2_000;
/// How many messages are acknowledged at once.
const ACK: usize = 500;

pub(crate) struct RabbitMq {
    // Stopped in this order.
    server: Server,
    _names: Server,
    version: String,
    connections: Vec<Connection>,
}

pub(crate) async fn open(place: Arc<Place>) -> Result<Box<dyn Peer>> {
    let erl = place.tool("usr/lib/erlang/bin/erl")?;
    let erlang = erl.ancestors().nth(2).context("Erlang has no folder")?.to_owned();
    let programs = place.tool("usr/lib/rabbitmq/lib")?;
    let home = only_folder(&programs).context("RabbitMQ has no folder")?;
    let runtime = std::fs::read_dir(&erlang)?.filter_map(Result::ok).map(|entry| entry.path());
    let runtime = runtime.filter(|path| file_name(path).starts_with("erts-")).max();
    let runtime = runtime.context("Erlang has no runtime")?.join("bin");
    let folder = place.folder("rabbitmq")?;
    let (port, names_port, distribution) = (free_port()?, free_port()?, free_port()?);

    // Its scripts expect Erlang where the package would have put it.
    let bin = place.folder("rabbitmq/bin")?;
    let script = format!(
        "#!/bin/sh\nexport ROOTDIR='{}' BINDIR='{}' EMU=beam PROGNAME=erl\nexec \"$BINDIR/erlexec\" \"$@\"\n",
        erlang.display(),
        runtime.display()
    );
    std::fs::write(bin.join("erl"), script)?;
    std::fs::set_permissions(bin.join("erl"), PermissionsExt::from_mode(0o755))?;

    // Else the server starts one that outlives it.
    let names_folder = place.folder("rabbitmq/names")?;
    let mut names = place.command(&runtime.join("epmd"));
    names.args(["-port", &names_port.to_string(), "-address", "127.0.0.1"]);
    let mut names = Server::start(&mut names, &names_folder)?;
    names.listens(names_port).await?;

    let config = format!(
        "listeners.tcp.1 = 127.0.0.1:{port}\nlog.console = true\nlog.file = false\n\
         vm_memory_high_watermark.relative = 0.6\ndisk_free_limit.absolute = 200MB\n"
    );
    std::fs::write(folder.join("rabbitmq.conf"), config)?;
    std::fs::write(folder.join("enabled_plugins"), "[].\n")?;
    let mut command = place.command(&home.join("sbin/rabbitmq-server"));
    let path = std::env::var("PATH").unwrap_or_default();
    command
        .env("PATH", format!("{}:{path}", bin.display()))
        .env("HOME", &folder)
        .env("ERL_EPMD_PORT", names_port.to_string())
        .env("RABBITMQ_HOME", &home)
        .env("RABBITMQ_NODENAME", format!("bench-{port}@localhost"))
        .env("RABBITMQ_DIST_PORT", distribution.to_string())
        .env("RABBITMQ_CONFIG_FILE", folder.join("rabbitmq.conf"))
        .env("RABBITMQ_CONF_ENV_FILE", folder.join("rabbitmq-env.conf"))
        .env("RABBITMQ_ENABLED_PLUGINS_FILE", folder.join("enabled_plugins"))
        .env("RABBITMQ_MNESIA_BASE", folder.join("mnesia"))
        .env("RABBITMQ_LOG_BASE", folder.join("logs"))
        .env("RABBITMQ_PID_FILE", folder.join("pid"));
    let mut server = Server::start(&mut command, &folder)?;
    server.listens(port).await?;
    let url = format!("amqp://guest:guest@127.0.0.1:{port}/%2f");
    let connections = (0..2).map(|_| connect(&url));
    let connections = try_join_all(connections).await.with_context(|| server.last_words())?;
    let version = file_name(&home).trim_start_matches("rabbitmq_server-").to_owned();
    Ok(Box::new(RabbitMq { server, _names: names, version, connections }))
}

/// It listens a little before it lets anybody in.
async fn connect(url: &str) -> Result<Connection> {
    let mut tries = 20;
    loop {
        match Connection::connect(url, ConnectionProperties::default()).await {
            Ok(connection) => return Ok(connection),
            Err(error) if tries == 0 => return Err(error.into()),
            Err(_) => tokio::time::sleep(Duration::from_millis(500)).await,
        }
        tries -= 1;
    }
}

fn only_folder(folder: &Path) -> Option<std::path::PathBuf> {
    let entries = std::fs::read_dir(folder).ok()?.filter_map(Result::ok).map(|entry| entry.path());
    entries.filter(|path| file_name(path).starts_with("rabbitmq_server-")).max()
}

fn file_name(path: &Path) -> &str {
    path.file_name().and_then(|name| name.to_str()).unwrap_or_default()
}

impl RabbitMq {
    /// A channel on which publishing is confirmed, of the connection that publishes.
    async fn publisher(&self) -> Result<Channel> {
        let channel = self.connections[0].create_channel().await?;
        channel.confirm_select(ConfirmSelectOptions::default()).await?;
        Ok(channel)
    }
}

/// Publishes these; so many at most wait for their confirms.
async fn publish(channel: Channel, messages: Messages, window: usize) -> Result<()> {
    let mut waiting = VecDeque::with_capacity(window);
    for number in messages.numbers.clone() {
        if waiting.len() >= window
            && let Some(oldest) = waiting.pop_front()
        {
            confirmed(oldest).await?;
        }
        let payload = messages.payload(number);
        // 2: kept on disk, which a quorum queue does anyway.
        let properties = BasicProperties::default().with_delivery_mode(2);
        let options = BasicPublishOptions::default();
        let publish =
            channel.basic_publish("".into(), QUEUE.into(), options, payload.as_bytes(), properties);
        waiting.push_back(publish.await?);
    }
    for confirm in waiting {
        confirmed(confirm).await?;
    }
    Ok(())
}

async fn confirmed(confirm: impl Future<Output = lapin::Result<Confirmation>>) -> Result<()> {
    let confirmation = confirm.await?;
    ensure!(matches!(confirmation, Confirmation::Ack(None)), "refused: {confirmation:?}");
    Ok(())
}

fn durable() -> QueueDeclareOptions {
    QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() }
}

fn quorum() -> FieldTable {
    let mut arguments = FieldTable::default();
    arguments.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
    arguments
}

#[async_trait]
impl Peer for RabbitMq {
    fn settings(&self) -> Vec<String> {
        vec![
            format!("RabbitMQ {}, one node, a quorum queue, publisher confirms", self.version),
            format!("produce: {PRODUCERS} channels with {WINDOW} unconfirmed each"),
            format!("send: publish and wait for its confirm, {SENDERS} channels of one connection"),
            format!("consume: prefetch {PREFETCH}, one ack for every {ACK}"),
        ]
    }

    fn processes(&self) -> Processes {
        Processes { server: vec![self.server.pid()], ..Processes::default() }
    }

    async fn fresh(&mut self) -> Result<()> {
        let channel = self.connections[0].create_channel().await?;
        channel.queue_declare(QUEUE.into(), durable(), quorum()).await?;
        Ok(())
    }

    async fn rest(&mut self) -> Result<()> {
        let channel = self.connections[0].create_channel().await?;
        channel.queue_delete(QUEUE.into(), QueueDeleteOptions::default()).await?;
        Ok(())
    }

    async fn produce(&self, messages: Messages) -> Result<()> {
        let parts = messages.split(PRODUCERS).into_iter().map(async |part| {
            let channel = self.publisher().await?;
            tokio::spawn(publish(channel, part, WINDOW)).await?
        });
        try_join_all(parts).await?;
        Ok(())
    }

    async fn send(&self, messages: Messages) -> Result<()> {
        let senders = messages.split(SENDERS).into_iter().map(async |part| {
            let channel = self.publisher().await?;
            tokio::spawn(publish(channel, part, 1)).await?
        });
        try_join_all(senders).await?;
        Ok(())
    }

    async fn consume(&self, seen: Arc<Seen>) -> Result<()> {
        let channel = self.connections[1].create_channel().await?;
        channel.basic_qos(PREFETCH, BasicQosOptions::default()).await?;
        let options = BasicConsumeOptions::default();
        let consumer =
            channel.basic_consume(QUEUE.into(), "reader".into(), options, FieldTable::default());
        let mut consumer = consumer.await?;
        let mut unacknowledged = 0;
        while !seen.is_complete() {
            let delivery = consumer.next().await.context("the consumer ended early")??;
            seen.payload(&delivery.data);
            unacknowledged += 1;
            if unacknowledged >= ACK || seen.is_complete() {
                delivery.acker.ack(BasicAckOptions { multiple: true }).await?;
                unacknowledged = 0;
            }
        }
        // An ack has no answer. What follows it on the same channel has.
        let options = QueueDeclareOptions { passive: true, ..durable() };
        channel.queue_declare(QUEUE.into(), options, quorum()).await?;
        channel.close(200, "done".into()).await?;
        Ok(())
    }
}
