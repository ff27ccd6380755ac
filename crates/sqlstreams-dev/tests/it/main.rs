//! Runs real servers. They start and stop in parallel, as root or as a plain
//! user. Tests that download run with `SQLSTREAMS_TEST_NPM=1` only.

#![allow(clippy::expect_used, reason = "a panic in a test is its report")]

mod cluster;
mod find;
mod obtain;
mod persistent;
mod support;
mod watchdog;
