//! Private PostgreSQL clusters for development, demos and tests.
mod binaries;
mod cluster;
mod error;
mod log;
mod obtain;
mod password;
mod persistent;
mod pidfile;
mod pins;
mod port;
mod server;
mod settings;
mod user;
mod watchdog;

pub use binaries::{PG_BIN_VARIABLE, Programs, SUPPORTED_MAJORS};
pub use cluster::{Builder, Cluster, StopMode};
pub use error::{Error, Result};
pub use obtain::{CACHE_VARIABLE, obtain};
pub use persistent::{Info, Persistent, Stopped};
