//! pgqueuer, which is in Python: processes of its own produce and consume (python/pgqueuer_peer.py).

use std::process::Stdio;
use std::sync::Arc;

use anyhow::{Context as _, Result, bail};
use async_trait::async_trait;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::sync::Mutex;

use crate::messages::{Messages, Seen};
use crate::peer::{Peer, Processes, SENDERS};
use crate::place::Place;

const CLIENT: &str = include_str!("../../python/pgqueuer_peer.py");

pub(crate) struct PgQueuer {
    place: Arc<Place>,
    url: String,
    version: String,
    producer: Python,
    consumer: Python,
}

pub(crate) async fn open(place: Arc<Place>) -> Result<Box<dyn Peer>> {
    let python = place.python_tool("python")?;
    let version =
        "import importlib.metadata as m; print(m.version('pgqueuer'), m.version('asyncpg'))";
    let version = Command::new(&python).args(["-c", version]).output().await?;
    let version = String::from_utf8_lossy(&version.stdout).trim().to_owned();
    let Some((pgqueuer, asyncpg)) = version.split_once(' ') else {
        bail!("pgqueuer is not installed; scripts/bench-peers installs it");
    };
    let version = format!("pgqueuer {pgqueuer}, asyncpg {asyncpg}, uvloop");
    let url = place.database("pgqueuer").await?;
    let mut command = Command::new(&python);
    command.arg("-c").arg(CLIENT).arg(&url);
    let producer = Python::start(&mut command)?;
    let consumer = Python::start(&mut command)?;
    producer.ask(json!({"do": "install"})).await?;
    Ok(Box::new(PgQueuer { place, url, version, producer, consumer }))
}

/// A process that answers requests one after the other.
struct Python {
    pid: u32,
    // Killed when dropped.
    talk: Mutex<Talk>,
}

struct Talk {
    _child: Child,
    requests: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Python {
    fn start(command: &mut Command) -> Result<Self> {
        let child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .process_group(0)
            .kill_on_drop(true)
            .spawn();
        let mut child = child.context("could not start Python")?;
        let pid = child.id().context("Python has ended")?;
        let requests = child.stdin.take().context("Python takes no requests")?;
        let answers = child.stdout.take().context("Python gives no answers")?;
        let answers = BufReader::new(answers).lines();
        Ok(Self { pid, talk: Mutex::new(Talk { _child: child, requests, answers }) })
    }

    async fn ask(&self, request: Value) -> Result<Value> {
        let mut talk = self.talk.lock().await;
        talk.requests.write_all(format!("{request}\n").as_bytes()).await?;
        let answer = talk.answers.next_line().await?.context("the Python client has ended")?;
        Ok(serde_json::from_str(&answer)?)
    }
}

fn request(what: &str, messages: &Messages) -> Value {
    let numbers = &messages.numbers;
    json!({"do": what, "first": numbers.start, "end": numbers.end, "bytes": messages.bytes()})
}

#[async_trait]
impl Peer for PgQueuer {
    fn settings(&self) -> Vec<String> {
        vec![
            format!("{}; one process produces, one consumes", self.version),
            "produce: enqueue of 500, 2 connections".into(),
            format!("send: enqueue of one from each of {SENDERS} connections"),
            "consume: a handler, batches of 500".into(),
        ]
    }

    fn processes(&self) -> Processes {
        Processes {
            server: self.place.postgres_pid().into_iter().collect(),
            client: vec![self.producer.pid, self.consumer.pid],
            postgres: Some(self.url.clone()),
        }
    }

    async fn fresh(&mut self) -> Result<()> {
        self.producer.ask(json!({"do": "fresh"})).await?;
        Ok(())
    }

    async fn rest(&mut self) -> Result<()> {
        self.producer.ask(json!({"do": "fresh"})).await?;
        Ok(())
    }

    async fn produce(&self, messages: Messages) -> Result<()> {
        self.producer.ask(request("produce", &messages)).await?;
        Ok(())
    }

    async fn send(&self, messages: Messages) -> Result<()> {
        self.producer.ask(request("send", &messages)).await?;
        Ok(())
    }

    async fn consume(&self, seen: Arc<Seen>) -> Result<()> {
        let numbers = seen.numbers();
        let request = json!({"do": "consume", "first": numbers.start, "end": numbers.end});
        let answer = self.consumer.ask(request).await?;
        let missing = answer["missing"].as_array().context("it does not say what is missing")?;
        let missing = missing.iter().filter_map(Value::as_u64).collect::<Vec<_>>();
        for number in numbers.filter(|number| !missing.contains(number)) {
            seen.number(number);
        }
        seen.add_repeated(answer["repeated"].as_u64().unwrap_or(0));
        Ok(())
    }
}
