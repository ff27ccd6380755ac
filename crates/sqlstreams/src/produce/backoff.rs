//! How long to wait before trying again.

use std::time::Duration;

const FIRST: Duration = Duration::from_millis(10);
const LONGEST: Duration = Duration::from_millis(500);

/// Pauses that double, each shortened at random so that those who failed together do not come back together.
#[derive(Debug)]
pub(super) struct Backoff(Duration);

impl Backoff {
    pub(super) fn new() -> Self {
        Self(FIRST)
    }

    pub(super) async fn wait(&mut self) {
        let pause = self.0.mul_f64(0.5 + fastrand::f64() / 2.0);
        self.0 = (self.0 * 2).min(LONGEST);
        tokio::time::sleep(pause).await;
    }
}
