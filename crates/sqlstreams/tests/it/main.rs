//! The crate against real PostgreSQL: one private cluster for the whole run, a database for each test.

#![allow(clippy::unwrap_used, clippy::expect_used)] // A panic is how a test reports.

mod consume;
mod fence;
mod fence_restart;
mod late_commits;
mod plain;
mod produce;
mod support;
mod unrelated;
