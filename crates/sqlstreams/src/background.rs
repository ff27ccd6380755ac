//! The thread on which the crate does its own work: connections, heartbeats, polls. Handlers run on the caller's runtime, so
//! however busy or blocked that is, leases are renewed.

use tokio::runtime::{Builder, Handle, Runtime};

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
}

impl Drop for Background {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}
