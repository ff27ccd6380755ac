//! The crate against real PostgreSQL: one private cluster for the whole run, a database for each test.

#![allow(clippy::unwrap_used, clippy::expect_used)] // A panic is how a test reports.
#![allow(unreachable_pub)] // Nothing here is reachable from outside.

mod ambiguous;
mod batches;
mod binding_limits;
mod binding_versions;
mod bindings;
mod child;
mod compacted;
mod compaction;
mod connections;
mod consume;
mod crash;
mod defaults;
mod delayed;
mod delivery;
mod dropped;
mod economics;
mod exactly_once;
mod exceptions;
mod expiry;
mod fair;
mod fair_places;
mod fence;
mod fence_restart;
mod flow;
mod frozen;
mod groups;
mod handlers;
mod horizon;
mod idempotency;
mod idle;
mod ids;
mod isolation;
mod journal;
mod late_commits;
mod leases;
mod names;
mod ordered;
mod owners;
mod places;
mod plain;
mod pool;
mod pooler;
mod produce;
mod proxy;
mod reference;
mod restarts;
mod retry;
mod rotation;
mod routing;
mod running;
mod scene;
mod schema;
mod shutdown;
mod support;
mod surplus;
mod tokens;
mod transactions;
mod unrelated;

mod wake;
