//! The demo's own doubts: a fact that does not hold ends it.

use std::fmt::Debug;

use crate::failure::Failure;

/// Counts what was compared.
#[derive(Debug, Default)]
pub(crate) struct Checks {
    held: u64,
}

impl Checks {
    /// Compares what was found with what has to be.
    pub(crate) fn equal<T: PartialEq + Debug>(
        &mut self,
        what: &str,
        found: T,
        expected: T,
    ) -> Result<(), Failure> {
        if found != expected {
            return Err(Failure::failed(
                "demo_check_failed",
                format!("this does not add up: {what}: found {found:?}, expected {expected:?}"),
            )
            .hint("that is a defect of SQLStreams, please report it with this line"));
        }
        self.held += 1;
        Ok(())
    }

    /// How many held.
    pub(crate) fn held(&self) -> u64 {
        self.held
    }
}
