//! Streams as files: what an export writes and an import reads.

mod base64;
pub(crate) mod line;
pub(crate) mod parquet;
pub(crate) mod source;
pub(crate) mod target;

use serde::{Deserialize, Serialize};

/// What a file of messages says of the stream that it is from: its first line, or its metadata.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct About {
    /// 1, until something changes that an older program would misread.
    pub(crate) format: u32,
    pub(crate) stream: String,
    pub(crate) payload_type: String,
    pub(crate) compacted: bool,
    pub(crate) partition_size: i64,
    /// The range of ids: after this one,
    pub(crate) after: i64,
    /// and up to that, both as far as was asked for.
    pub(crate) upto: i64,
}

/// The format that this program writes, and the latest that it reads.
pub(crate) const FORMAT: u32 = 1;
