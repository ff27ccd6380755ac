//! Producing: into a transaction of our own, batched under load, or into the caller's.

mod attempt;
mod commit;
mod connection;
mod executor;
mod insert;
mod producer;
mod send;

pub use self::executor::Executor;
pub use self::insert::{InvalidMessage, Receipt};
pub use self::producer::Producer;
pub use self::send::{SendBuilder, SendInBuilder};
