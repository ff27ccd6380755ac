//! SQLStreams, through its crate, as a service would use it.

use std::future::ready;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use async_trait::async_trait;
use futures_util::future::try_join_all;
use sqlstreams::{
    CancellationToken, Client, Delivery, Group, Outcome, Outgoing, Producer, Stream, Text,
};

use crate::messages::{Messages, Seen};
use crate::peer::{Peer, Processes, SENDERS};
use crate::place::Place;

const BATCH: usize = 500;
const CONNECTIONS: u64 = 2;
const CONCURRENCY: usize = 16;

pub(crate) struct SqlStreams {
    place: Arc<Place>,
    url: String,
    handler: Handler,
    queue: Option<Queue>,
    rounds: u32,
}

/// What handles messages.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Handler {
    /// One message at a time, as most handlers do.
    Single,
    /// Up to [`BATCH`] at a time.
    Batches,
}

struct Queue {
    client: Client,
    stream: Stream<String, Text>,
    producer: Producer<String, Text>,
    group: Group<String, Text>,
}

pub(crate) async fn open(place: Arc<Place>, handler: Handler) -> Result<Box<dyn Peer>> {
    let url = place.database(&format!("sqlstreams_{handler:?}").to_lowercase()).await?;
    Ok(Box::new(SqlStreams { place, url, handler, queue: None, rounds: 0 }))
}

impl SqlStreams {
    fn queue(&self) -> Result<&Queue> {
        self.queue.as_ref().context("there is no stream")
    }
}

#[async_trait]
impl Peer for SqlStreams {
    fn settings(&self) -> Vec<String> {
        let consume = match self.handler {
            Handler::Single => "run, a handler of single messages".to_owned(),
            Handler::Batches => format!("run_batches, a handler of up to {BATCH} messages"),
        };
        vec![
            "a json stream with one group, all settings the defaults".into(),
            format!("produce: send_all of {BATCH} over {CONNECTIONS} connections"),
            format!("send: {SENDERS} tasks share one producer"),
            format!("consume: {consume}, concurrency {CONCURRENCY}"),
        ]
    }

    fn processes(&self) -> Processes {
        let server = self.place.postgres_pid().into_iter().collect();
        Processes { server, client: Vec::new(), postgres: Some(self.url.clone()) }
    }

    async fn fresh(&mut self) -> Result<()> {
        self.rounds += 1;
        let client = Client::connect(&self.url).await?;
        let stream =
            client.stream(format!("peers_{}", self.rounds)).codec::<Text>().create().await?;
        let group = stream.group("bench").create().await?;
        let producer = stream.producer();
        self.queue = Some(Queue { client, stream, producer, group });
        Ok(())
    }

    async fn rest(&mut self) -> Result<()> {
        if let Some(Queue { client, stream, producer, group }) = self.queue.take() {
            drop((producer, group));
            stream.drop_stream().await?;
            drop(client);
        }
        Ok(())
    }

    async fn produce(&self, messages: Messages) -> Result<()> {
        let producer = &self.queue()?.producer;
        let parts = messages.split(CONNECTIONS).into_iter().map(|part| {
            let producer = producer.clone();
            tokio::spawn(async move {
                for batch in part.batches(BATCH) {
                    producer.send_all(batch.iter().map(Outgoing::new)).await?;
                }
                anyhow::Ok(())
            })
        });
        try_join_all(parts).await?.into_iter().collect()
    }

    async fn send(&self, messages: Messages) -> Result<()> {
        let producer = &self.queue()?.producer;
        let senders = messages.split(SENDERS).into_iter().map(|part| {
            let producer = producer.clone();
            tokio::spawn(async move {
                for number in part.numbers.clone() {
                    producer.send(&part.payload(number)).await?;
                }
                anyhow::Ok(())
            })
        });
        try_join_all(senders).await?.into_iter().collect()
    }

    async fn consume(&self, seen: Arc<Seen>) -> Result<()> {
        let stop = CancellationToken::new();
        let consumer =
            self.queue()?.group.consumer().concurrency(CONCURRENCY).stop_on(stop.clone());
        let enough = async {
            seen.complete().await;
            stop.cancel();
        };
        let counts = seen.clone();
        let run = async {
            match self.handler {
                Handler::Single => {
                    let handler = consumer.run(move |message: Delivery<String>| {
                        counts.payload(message.payload.as_bytes());
                        ready(Outcome::Done)
                    });
                    handler.await
                }
                Handler::Batches => {
                    let consumer = consumer.batch_size(BATCH);
                    let handler = consumer.run_batches(move |batch: Vec<Delivery<String>>| {
                        for message in &batch {
                            counts.payload(message.payload.as_bytes());
                        }
                        ready(())
                    });
                    handler.await
                }
            }
        };
        // It ends once what was handled is settled.
        let (consumed, ()) = tokio::join!(run, enough);
        consumed?;
        Ok(())
    }
}
