//! The connections of handlers' transactions.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use deadpool_postgres::{
    Connect, Manager, ManagerConfig, Object, Pool, PoolError, QueueMode, RecyclingMethod, Runtime,
};
use tokio::task::JoinHandle;
use tokio_postgres::Config;

use crate::client::Client;
use crate::connect::{Connector, Dsn};
use crate::error::{Error, ErrorKind, Result};

/// How long to wait for a connection before saying so.
const PATIENCE: Duration = Duration::from_secs(60);

/// A pool whose connections are driven by the runtime of the handlers that use them: unlike those of the client's own thread,
/// where every answer would have to cross over. It has none until a consumer reserves some, which the client's pool has less.
#[derive(Debug)]
pub(crate) struct HandlerPool {
    pool: Pool,
    /// How many handlers may run at once.
    wanted: Mutex<usize>,
}

/// Connections for so many handlers, until it is dropped.
#[derive(Debug)]
pub(crate) struct Reserved {
    client: Client,
    handlers: usize,
}

impl HandlerPool {
    pub(crate) fn new(dsn: &Dsn, connector: Connector) -> Result<Self> {
        let manager = Manager::from_connect(
            dsn.config().clone(),
            Here(connector),
            ManagerConfig { recycling_method: RecyclingMethod::Fast },
        );
        let pool = Pool::builder(manager)
            .max_size(0)
            .queue_mode(QueueMode::Lifo)
            .runtime(Runtime::Tokio1)
            .wait_timeout(Some(PATIENCE))
            .build()
            .map_err(|e| {
                Error::new(ErrorKind::InvalidConfig, "the pool cannot be built").with_source(e)
            })?;
        Ok(Self { pool, wanted: Mutex::new(0) })
    }

    /// Reserves connections for so many handlers, as far as there are so many: one is always left for the bookkeeping. Several
    /// consumers share what they have reserved.
    pub(crate) fn reserve(client: &Client, handlers: usize) -> Reserved {
        client.inner.handler_pool.change(client, |wanted| wanted + handlers);
        Reserved { client: client.clone(), handlers }
    }

    fn change(&self, client: &Client, change: impl FnOnce(usize) -> usize) {
        let mut wanted = self.wanted.lock().unwrap_or_else(PoisonError::into_inner);
        *wanted = change(*wanted);
        let all = client.inner.pool_size;
        let reserved = (*wanted).min(all.saturating_sub(1));
        client.inner.pool.resize(all - reserved);
        self.pool.resize(reserved);
    }

    /// One of them, as soon as there is one.
    pub(crate) async fn get(client: &Client, doing: &str) -> Result<Object> {
        client.inner.handler_pool.pool.get().await.map_err(|e| match e {
            PoolError::Timeout(deadpool_postgres::TimeoutType::Wait) => {
                let text = format!("no connection came free for a handler within {PATIENCE:?}");
                Error::new(ErrorKind::Connection, text)
                    .with_hint("Do handlers keep their transactions? Such connections are lost.")
            }
            error => Error::from_pool(error, doing, &client.inner.target),
        })
    }

    /// Whether somebody waits for one.
    pub(crate) fn is_waited_for(&self) -> bool {
        self.pool.status().waiting > 0
    }

    pub(crate) fn forget_idle_connections(&self) {
        self.pool.retain(|_, _| false);
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.client.inner.handler_pool.change(&self.client, |wanted| wanted - self.handlers);
    }
}

/// Opens connections that belong to the runtime of whoever asks for them.
#[derive(Clone)]
struct Here(Connector);

type Connected = (tokio_postgres::Client, JoinHandle<()>);

impl Connect for Here {
    /// Ignores the configuration, which describes only the first host.
    fn connect(
        &self,
        _config: &Config,
    ) -> Pin<Box<dyn Future<Output = Result<Connected, tokio_postgres::Error>> + Send + '_>> {
        Box::pin(self.0.connect())
    }
}
