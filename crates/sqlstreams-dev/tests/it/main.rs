//! Runs real servers. They start and stop in parallel, as root or as a plain
//! user. Tests that download run with `SQLSTREAMS_TEST_NPM=1` only.

mod cluster;
mod support;
