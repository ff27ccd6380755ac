//! graphile_worker, the crate.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use async_trait::async_trait;
use futures_util::future::try_join_all;
use graphile_worker::tokio_postgres::TokioPostgresDatabase;
use graphile_worker::{
    Database, IntoTaskHandlerResult, JobSpec, LocalQueueConfig, RawJobSpec, TaskHandler,
    WorkerContext, WorkerOptions, WorkerUtils,
};
use serde::{Deserialize, Serialize};

use super::sql;
use crate::messages::{Messages, Seen};
use crate::peer::{Peer, Processes, SENDERS};
use crate::place::{Place, connect};

const BATCH: usize = 500;
const SCHEMA: &str = "graphile_worker";
const CONCURRENCY: usize = 64;
const LOCAL: usize = 1_000;
const DELAY: Duration = Duration::from_millis(5);

pub(crate) struct GraphileWorker {
    place: Arc<Place>,
    url: String,
    database: Database,
    utils: WorkerUtils,
}

pub(crate) async fn open(place: Arc<Place>) -> Result<Box<dyn Peer>> {
    let url = place.database(SCHEMA).await?;
    let pool = TokioPostgresDatabase::from_url(&url, SENDERS as usize + 8)
        .map_err(|error| anyhow::anyhow!("{error:?}"))?;
    let database = Database::from(pool);
    let utils = WorkerUtils::new(database.clone(), SCHEMA);
    utils.migrate().await.context("could not install its schema")?;
    Ok(Box::new(GraphileWorker { place, url, database, utils }))
}

/// A job, and where its arrival is told.
#[derive(Serialize, Deserialize)]
struct Job {
    n: String,
    pad: String,
}

#[derive(Clone)]
struct Arrivals(Arc<Seen>);

impl fmt::Debug for Arrivals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Arrivals")
    }
}

impl TaskHandler for Job {
    const IDENTIFIER: &'static str = "bench";

    async fn run(self, context: WorkerContext) -> impl IntoTaskHandlerResult {
        let Some(arrivals) = context.get_ext::<Arrivals>() else {
            return Err("nobody counts".to_owned());
        };
        arrivals.0.payload(self.n.as_bytes());
        Ok(())
    }
}

#[async_trait]
impl Peer for GraphileWorker {
    fn settings(&self) -> Vec<String> {
        vec![
            "the crate 0.14.1 with its tokio-postgres driver".into(),
            format!("produce: add_raw_jobs of {BATCH}, {} connections", sql::CONNECTIONS),
            format!("send: add_raw_job from {SENDERS} tasks over as many connections"),
            format!(
                "consume: a worker, concurrency {CONCURRENCY}, local queue of {LOCAL}, completions \
                 gathered for {DELAY:?}"
            ),
        ]
    }

    fn processes(&self) -> Processes {
        let server = self.place.postgres_pid().into_iter().collect();
        Processes { server, client: Vec::new(), postgres: Some(self.url.clone()) }
    }

    async fn fresh(&mut self) -> Result<()> {
        self.rest().await
    }

    async fn rest(&mut self) -> Result<()> {
        let sql = format!("TRUNCATE {SCHEMA}._private_jobs CASCADE");
        Ok(connect(&self.url).await?.batch_execute(&sql).await?)
    }

    async fn produce(&self, messages: Messages) -> Result<()> {
        let parts = messages.split(sql::CONNECTIONS).into_iter().map(|part| {
            let utils = self.utils.clone();
            tokio::spawn(async move {
                for batch in part.batches(BATCH) {
                    let jobs = batch.iter().map(|payload| {
                        let payload = serde_json::from_str(payload)?;
                        let identifier = Job::IDENTIFIER.to_owned();
                        Ok(RawJobSpec { identifier, payload, spec: JobSpec::default() })
                    });
                    utils.add_raw_jobs(&jobs.collect::<Result<Vec<_>>>()?).await?;
                }
                anyhow::Ok(())
            })
        });
        try_join_all(parts).await?.into_iter().collect()
    }

    async fn send(&self, messages: Messages) -> Result<()> {
        let senders = messages.split(SENDERS).into_iter().map(|part| {
            let utils = self.utils.clone();
            tokio::spawn(async move {
                for number in part.numbers.clone() {
                    let job = serde_json::from_str::<serde_json::Value>(&part.payload(number))?;
                    utils.add_raw_job(Job::IDENTIFIER, job, JobSpec::default()).await?;
                }
                anyhow::Ok(())
            })
        });
        try_join_all(senders).await?.into_iter().collect()
    }

    async fn consume(&self, seen: Arc<Seen>) -> Result<()> {
        let worker = WorkerOptions::default()
            .database(self.database.clone())
            .schema(SCHEMA)
            .concurrency(CONCURRENCY)
            .poll_interval(Duration::from_millis(100))
            .complete_job_batch_delay(DELAY)
            .local_queue(LocalQueueConfig::default().with_size(LOCAL))
            .listen_os_shutdown_signals(false)
            .add_extension(Arrivals(seen.clone()))
            .define_job::<Job>()
            .init()
            .await
            .map_err(|error| anyhow::anyhow!("could not start a worker: {error:?}"))?;
        let enough = async {
            seen.complete().await;
            worker.request_shutdown();
        };
        let (ran, ()) = tokio::join!(worker.run(), enough);
        ran.map_err(|error| anyhow::anyhow!("the worker failed: {error:?}"))
    }
}
