//! Runs the built program against a private cluster, one for the whole run, with a database per test.

#![allow(clippy::unwrap_used, clippy::expect_used)] // A panic is how a test reports.

mod bench;
mod bindings;
mod compacted;
mod consume;
mod databases;
mod dead;
mod delayed;
mod demo;
mod docs;
mod doctor;
mod exec;
mod help;
mod kept;
mod maintain;
mod names;
mod produce;
mod replay;
mod schedules;
mod settings;
mod signals;
mod streams;
mod support;
mod transfer;
mod transfer_refused;
