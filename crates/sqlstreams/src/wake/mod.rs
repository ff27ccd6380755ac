//! How consumers learn that there is something to do, and that another consumer has died.
//!
//! Polling is the truth: one statement per process looks at all the groups it consumes, often while they are busy and about
//! once a second while they are not. Notifications only make it look at once: producers ring after their commit.
//!
//! ```text
//!   producers ── bell.rs ──► NOTIFY ──► session.rs ──► looking.rs ──► watcher.rs ──► the coordinators
//!                                    (one connection     (looks, judges  (what was seen     of the groups
//!                                      per client)        dead owners)     of each group)
//! ```

mod bell;
mod delayed;
mod looking;
mod presence;
mod session;
mod watcher;

pub(crate) use self::bell::{Bell, Turn};
pub(crate) use self::delayed::move_overdue;
pub(crate) use self::watcher::{Seen, Watch, Watcher};
