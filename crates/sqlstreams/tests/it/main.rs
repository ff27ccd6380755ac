//! The crate against real PostgreSQL: one private cluster for the whole run, a database for each test.

#![allow(clippy::unwrap_used, clippy::expect_used)] // A panic is how a test reports.
#![allow(unreachable_pub)] // Nothing here is reachable from outside.

mod ambiguous;
mod batches;
mod consume;
mod crash;
mod delivery;
mod economics;
mod exactly_once;
mod exceptions;
mod fence;
mod fence_restart;
mod flow;
mod groups;
mod horizon;
mod isolation;
mod late_commits;
mod places;
mod plain;
mod produce;
mod proxy;
mod retry;
mod rotation;
mod schema;
mod support;
mod tokens;
mod transactions;
mod unrelated;
