//! One measurement: a peer, a scenario, so many messages.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use serde::Serialize;

use crate::cpu;
use crate::messages::{Messages, Seen};
use crate::peer::Peer;
use crate::place::connect;

/// When so much longer than planned has passed, what is missing does not come any more.
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Scenario {
    Produce,
    Send,
    Consume,
    Pipeline,
}

impl Scenario {
    pub(crate) const ALL: [Self; 4] = [Self::Produce, Self::Send, Self::Consume, Self::Pipeline];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Produce => "produce",
            Self::Send => "send",
            Self::Consume => "consume",
            Self::Pipeline => "pipeline",
        }
    }
}

/// What a measurement found.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Measured {
    pub(crate) messages: u64,
    pub(crate) seconds: f64,
    pub(crate) messages_per_second: f64,
    /// Of server and client together.
    pub(crate) cpu_seconds_per_million: f64,
    pub(crate) server_cpu_seconds: f64,
    pub(crate) client_cpu_seconds: f64,
    /// Of a peer on PostgreSQL.
    pub(crate) wal_bytes_per_message: Option<f64>,
    /// Received more than once.
    pub(crate) repeated: u64,
}

/// Runs a scenario. For [`Scenario::Consume`] these messages are stored already.
pub(crate) async fn measure(
    peer: &dyn Peer,
    scenario: Scenario,
    messages: &Messages,
) -> Result<Measured> {
    let processes = peer.processes();
    let wal = match &processes.postgres {
        Some(url) => Some(connect(url).await?),
        None => None,
    };
    let written = async || match &wal {
        Some(db) => {
            let sql = "SELECT (pg_current_wal_insert_lsn() - '0/0')::float8";
            anyhow::Ok(db.query_one(sql, &[]).await?.get::<_, f64>(0))
        }
        None => Ok(0.0),
    };
    let cpu = || {
        let server = cpu::seconds(&processes.server)?;
        anyhow::Ok((server, cpu::own_seconds()? + cpu::seconds(&processes.client)?))
    };

    let seen = Seen::of(messages);
    let wal_before = written().await?;
    let cpu_before = cpu()?;
    let begun = Instant::now();
    let work = async {
        match scenario {
            Scenario::Produce => peer.produce(messages.clone()).await,
            Scenario::Send => peer.send(messages.clone()).await,
            Scenario::Consume => peer.consume(seen.clone()).await,
            Scenario::Pipeline => {
                let consume = peer.consume(seen.clone());
                tokio::try_join!(peer.produce(messages.clone()), consume).map(drop)
            }
        }
    };
    let done = tokio::time::timeout(PATIENCE, work).await;
    let seconds = begun.elapsed().as_secs_f64();
    let cpu_after = cpu()?;
    let wal_after = written().await?;

    let receives = matches!(scenario, Scenario::Consume | Scenario::Pipeline);
    let missing = if receives { seen.left() } else { 0 };
    match done {
        Ok(done) => done.with_context(|| format!("could not {}", scenario.name()))?,
        Err(_) => bail!("{} not done after {PATIENCE:?}, {missing} not received", scenario.name()),
    }
    if missing > 0 {
        bail!("{missing} of {} messages were lost", messages.count());
    }
    let count = messages.count() as f64;
    let (server, client) = (cpu_after.0 - cpu_before.0, cpu_after.1 - cpu_before.1);
    Ok(Measured {
        messages: messages.count(),
        seconds,
        messages_per_second: count / seconds,
        cpu_seconds_per_million: (server + client) * 1e6 / count,
        server_cpu_seconds: server,
        client_cpu_seconds: client,
        wal_bytes_per_message: wal.is_some().then_some((wal_after - wal_before) / count),
        repeated: seen.repeated(),
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use async_trait::async_trait;

    use super::*;
    use crate::peer::Processes;

    /// A peer that delivers the messages from `from` on, the first of them twice, and says that it is done.
    struct Fake {
        from: u64,
    }

    #[async_trait]
    impl Peer for Fake {
        fn settings(&self) -> Vec<String> {
            Vec::new()
        }

        fn processes(&self) -> Processes {
            Processes::default()
        }

        async fn fresh(&mut self) -> Result<()> {
            Ok(())
        }

        async fn rest(&mut self) -> Result<()> {
            Ok(())
        }

        async fn produce(&self, _: Messages) -> Result<()> {
            Ok(())
        }

        async fn send(&self, _: Messages) -> Result<()> {
            bail!("it is closed")
        }

        async fn consume(&self, seen: Arc<Seen>) -> Result<()> {
            seen.number(self.from);
            for number in self.from..seen.numbers().end {
                seen.number(number);
            }
            Ok(())
        }
    }

    #[tokio::test]
    async fn whoever_loses_a_message_has_no_figures() {
        let messages = Messages::of_size(100).numbered(10..20);
        for scenario in [Scenario::Consume, Scenario::Pipeline] {
            let whole = measure(&Fake { from: 10 }, scenario, &messages).await.unwrap();
            assert_eq!((whole.messages, whole.repeated), (10, 1));
            let error = measure(&Fake { from: 11 }, scenario, &messages).await.unwrap_err();
            assert_eq!(error.to_string(), "1 of 10 messages were lost");
        }
        let error = measure(&Fake { from: 10 }, Scenario::Send, &messages).await.unwrap_err();
        assert_eq!(format!("{error:#}"), "could not send: it is closed");
    }
}
