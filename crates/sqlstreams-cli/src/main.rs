//! The sqlstreams command.
fn main() {}
