//! Private clusters.
