//! What a benchmark has the producers send and the consumers do, as options and in the facts.

use clap::Args;
use serde::Serialize;

use crate::values;

/// How batches are sent.
#[derive(Debug, Clone, Copy, Args, Serialize)]
pub(crate) struct Sending {
    /// Connections that insert at once
    #[arg(long, value_name = "N", default_value_t = 2,
          value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) connections: u16,
    /// Messages per transaction
    #[arg(long, value_name = "N", default_value = "250", value_parser = values::at_least_one)]
    pub(crate) batch: usize,
}

/// What messages are.
#[derive(Debug, Clone, Copy, Args, Serialize)]
pub(crate) struct Payloads {
    /// Bytes per payload
    #[arg(long, value_name = "N", default_value_t = 1_000,
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) bytes: u32,
}

/// How a group is consumed.
#[derive(Debug, Clone, Copy, Args, Serialize)]
pub(crate) struct Handling {
    /// Handlers of a group that run at once
    #[arg(long, value_name = "N", default_value_t = 16,
          value_parser = clap::value_parser!(u16).range(1..=10_000))]
    pub(crate) concurrency: u16,
}

impl Payloads {
    /// One of them.
    pub(crate) fn payload(&self) -> String {
        "x".repeat(self.bytes as usize)
    }
}
