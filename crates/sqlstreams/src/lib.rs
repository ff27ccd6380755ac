//! SQLStreams.
