//! Runs the built program against a private cluster, one for the whole run, with a database per test.

mod consume;
mod databases;
mod dead;
mod exec;
mod help;
mod kept;
mod names;
mod produce;
mod signals;
mod streams;
mod support;
