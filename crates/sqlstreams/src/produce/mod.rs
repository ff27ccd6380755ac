//! Producing: into a transaction of our own, batched under load, or into the caller's.

mod attempt;
mod commit;
mod connection;
mod executor;
mod insert;
mod keys;
mod producer;
mod receipt;
mod send;

pub use self::executor::Executor;
pub use self::insert::InvalidMessage;
pub(crate) use self::insert::invalid;
pub(crate) use self::keys::Keys;
pub use self::producer::Producer;
pub use self::receipt::{Duplicate, Receipt};
pub use self::send::{SendBuilder, SendInBuilder};
