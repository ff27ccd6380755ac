//! The thread on which the crate does its own work: connections, heartbeats, polls. Handlers run on the caller's runtime, so
//! however busy or blocked that is, leases are renewed.

use std::future::Future;
use std::pin::Pin;

use deadpool_postgres::Connect;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::task::JoinHandle;
use tokio_postgres::Config;

use crate::connect::Connector;
use crate::error::{Error, ErrorKind, Result};

/// A runtime with one thread. Dropped, its tasks end without being waited for, so it may be dropped anywhere.
#[derive(Debug)]
pub(crate) struct Background(Option<Runtime>);

impl Background {
    pub(crate) fn start() -> Result<Self> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("sqlstreams")
            .enable_all()
            .build()
            .map_err(|e| {
                Error::new(ErrorKind::InvalidConfig, "the client's thread cannot be started")
                    .with_source(e)
            })?;
        Ok(Self(Some(runtime)))
    }

    pub(crate) fn handle(&self) -> &Handle {
        match &self.0 {
            Some(runtime) => runtime.handle(),
            None => unreachable!("the runtime is only taken when this is dropped"),
        }
    }

    /// Connects for a pool such that the connections live on this thread.
    pub(crate) fn connector(&self, connector: Connector) -> OnBackground {
        OnBackground { connector, handle: self.handle().clone() }
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// Opens connections whose sockets and tasks belong to the background thread, whoever asks for them.
#[derive(Clone)]
pub(crate) struct OnBackground {
    connector: Connector,
    handle: Handle,
}

type Connected = (tokio_postgres::Client, JoinHandle<()>);

impl Connect for OnBackground {
    /// Ignores the configuration, which describes only the first host.
    fn connect(
        &self,
        _config: &Config,
    ) -> Pin<Box<dyn Future<Output = Result<Connected, tokio_postgres::Error>> + Send + '_>> {
        let connector = self.connector.clone();
        let connecting = self.handle.spawn(async move { connector.connect().await });
        Box::pin(async move {
            // The task ends early only with the runtime, that is, with the client.
            connecting.await.unwrap_or_else(|_| Err(tokio_postgres::Error::__private_api_timeout()))
        })
    }
}
