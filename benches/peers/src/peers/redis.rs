//! Redis Streams with `appendfsync always`.

use std::sync::Arc;

use anyhow::{Context as _, Result};
use async_trait::async_trait;
use futures_util::future::try_join_all;
use redis::aio::MultiplexedConnection;
use redis::streams::{StreamReadOptions, StreamReadReply};
use redis::{AsyncCommands as _, Client};

use crate::messages::{Messages, Seen};
use crate::peer::{Peer, Processes, SENDERS};
use crate::place::Place;
use crate::process::{Server, free_port};

const BATCH: usize = 500;
const READ: usize = 1_000;
const CONNECTIONS: u64 = 2;
const STREAM: &str = "bench";
const GROUP: &str = "bench";

pub(crate) struct Redis {
    server: Server,
    version: String,
    connections: Vec<MultiplexedConnection>,
}

pub(crate) async fn open(place: Arc<Place>) -> Result<Box<dyn Peer>> {
    let program = place.tool("usr/bin/redis-server")?;
    let folder = place.folder("redis")?;
    let port = free_port()?;
    let mut command = place.command(&program);
    command
        .args(["--bind", "127.0.0.1", "--port", &port.to_string(), "--save", ""])
        .args(["--appendonly", "yes", "--appendfsync", "always"])
        .args(["--auto-aof-rewrite-percentage", "0", "--daemonize", "no"])
        .arg("--dir")
        .arg(&folder);
    let mut server = Server::start(&mut command, &folder)?;
    server.listens(port).await?;
    let client = Client::open(format!("redis://127.0.0.1:{port}/"))?;
    let connections = (0..CONNECTIONS).map(|_| client.get_multiplexed_async_connection());
    let mut connections = try_join_all(connections).await?;
    let info: String = redis::cmd("INFO").arg("server").query_async(&mut connections[0]).await?;
    let version = info.lines().find_map(|line| line.strip_prefix("redis_version:"));
    let version = version.context("it does not tell its version")?.trim().to_owned();
    Ok(Box::new(Redis { server, version, connections }))
}

#[async_trait]
impl Peer for Redis {
    fn settings(&self) -> Vec<String> {
        vec![
            format!("Redis {}, appendonly, appendfsync always, no rewrites", self.version),
            format!("produce: pipelines of {BATCH} XADD over {CONNECTIONS} connections"),
            format!("send: XADD from {SENDERS} tasks that share a multiplexed connection"),
            format!(
                "consume: {CONNECTIONS} readers of a group: XACK of the last {READ} and XREADGROUP of the \
                 next in one round trip; entries are not deleted, which favours it"
            ),
        ]
    }

    fn processes(&self) -> Processes {
        Processes { server: vec![self.server.pid()], ..Processes::default() }
    }

    async fn fresh(&mut self) -> Result<()> {
        self.rest().await?;
        let () = self.connections[0].xgroup_create_mkstream(STREAM, GROUP, "0").await?;
        Ok(())
    }

    async fn rest(&mut self) -> Result<()> {
        let () = self.connections[0].del(STREAM).await?;
        Ok(())
    }

    async fn produce(&self, messages: Messages) -> Result<()> {
        let parts = messages.split(CONNECTIONS).into_iter().zip(&self.connections);
        let parts = parts.map(|(part, connection)| {
            let mut connection = connection.clone();
            tokio::spawn(async move {
                for batch in part.batches(BATCH) {
                    let mut pipe = redis::pipe();
                    for payload in &batch {
                        pipe.xadd(STREAM, "*", &[("p", payload.as_str())]).ignore();
                    }
                    let () = pipe.query_async(&mut connection).await?;
                }
                anyhow::Ok(())
            })
        });
        try_join_all(parts).await?.into_iter().collect()
    }

    async fn send(&self, messages: Messages) -> Result<()> {
        let senders = messages.split(SENDERS).into_iter().map(|part| {
            let mut connection = self.connections[0].clone();
            tokio::spawn(async move {
                for number in part.numbers.clone() {
                    let _: String =
                        connection.xadd(STREAM, "*", &[("p", part.payload(number))]).await?;
                }
                anyhow::Ok(())
            })
        });
        try_join_all(senders).await?.into_iter().collect()
    }

    async fn consume(&self, seen: Arc<Seen>) -> Result<()> {
        let readers = self.connections.iter().enumerate().map(|(reader, connection)| {
            let (connection, seen) = (connection.clone(), seen.clone());
            tokio::spawn(async move { read(connection, format!("reader-{reader}"), &seen).await })
        });
        try_join_all(readers).await?.into_iter().collect()
    }
}

async fn read(mut connection: MultiplexedConnection, name: String, seen: &Seen) -> Result<()> {
    let options = StreamReadOptions::default().group(GROUP, name).count(READ);
    let mut done = Vec::<String>::new();
    while !seen.is_complete() {
        let mut pipe = redis::pipe();
        if !done.is_empty() {
            pipe.xack(STREAM, GROUP, &done).ignore();
        }
        pipe.xread_options(&[STREAM], &[">"], &options);
        let (reply,): (Option<StreamReadReply>,) = pipe.query_async(&mut connection).await?;
        done.clear();
        for entry in reply.into_iter().flat_map(|reply| reply.keys).flat_map(|key| key.ids) {
            let payload: Vec<u8> = entry.get("p").context("an entry has no payload")?;
            seen.payload(&payload);
            done.push(entry.id);
        }
        if done.is_empty() {
            tokio::time::sleep(std::time::Duration::from_millis(2)).await;
        }
    }
    if !done.is_empty() {
        let _: u64 = connection.xack(STREAM, GROUP, &done).await?;
    }
    Ok(())
}
