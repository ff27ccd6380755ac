//! What can be wrong with a connection string.

use std::error::Error;

/// A connection string, or a file it names, that can't be used.
///
/// The message says what is wrong and what to do about it. It never contains the password, nor any
/// piece of the string that could be part of one.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct DsnError {
    message: String,
    source: Option<Box<dyn Error + Send + Sync>>,
}

impl DsnError {
    pub(super) fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), source: None }
    }

    pub(super) fn with_source(
        message: impl Into<String>,
        source: impl Into<Box<dyn Error + Send + Sync>>,
    ) -> Self {
        Self { message: message.into(), source: Some(source.into()) }
    }
}
