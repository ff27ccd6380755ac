//! The crate against real PostgreSQL: one private cluster for the whole run, a database for each test.

#![allow(clippy::unwrap_used, clippy::expect_used)] // A panic is how a test reports.

mod consume;
mod exceptions;
mod fence;
mod fence_restart;
mod groups;
mod isolation;
mod late_commits;
mod plain;
mod produce;
mod retry;
mod rotation;
mod support;
mod tokens;
mod unrelated;
