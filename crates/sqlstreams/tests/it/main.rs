//! The crate against real PostgreSQL: one private cluster for the whole run, a database for each test.

mod consume;
mod produce;
mod support;
