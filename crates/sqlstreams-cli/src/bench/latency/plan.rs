//! When each message is due.

use std::time::{Duration, Instant};

/// Messages at a steady rate, the first of which are not counted.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Plan {
    /// The first message's time.
    pub(crate) begin: Instant,
    /// Messages a second.
    pub(crate) rate: u32,
    /// How many messages warm everything up.
    pub(crate) warm_up: u64,
    /// How many there are in all.
    pub(crate) total: u64,
}

impl Plan {
    pub(crate) fn new(begin: Instant, rate: u32, warm_up: Duration, time: Duration) -> Self {
        let messages = |time: Duration| (time.as_secs_f64() * f64::from(rate)).ceil() as u64;
        let warm_up = messages(warm_up);
        Self { begin, rate, warm_up, total: warm_up + messages(time).max(1) }
    }

    /// When a message is to be sent; the first has the number 0.
    pub(crate) fn due(&self, n: u64) -> Instant {
        self.begin + Duration::from_secs_f64(n as f64 / f64::from(self.rate))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_due_at_equal_distances() {
        let begin = Instant::now();
        let plan = Plan::new(begin, 500, Duration::from_secs(2), Duration::from_secs(30));
        assert_eq!((plan.warm_up, plan.total), (1_000, 16_000));
        assert_eq!(plan.due(0), begin);
        assert_eq!(plan.due(3), begin + Duration::from_millis(6));
    }
}
