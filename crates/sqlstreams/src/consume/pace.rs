//! How much a consumer holds: about what it finishes in a second, so that a slow handler leaves the rest to others and a
//! fast one moves thousands per round trip.

use std::time::{Duration, Instant};

/// The most messages held, whatever the speed.
const MOST_MESSAGES: usize = 20_000;
/// About the most payload held, in bytes.
const MOST_BYTES: usize = 64 * 1024 * 1024;
/// How often the target is reckoned anew.
const PERIOD: Duration = Duration::from_millis(200);

/// What was finished in so long says it all.
const LONG: Duration = Duration::from_secs(1);

/// The number of messages to hold, adapted to what is finished.
#[derive(Debug)]
pub(crate) struct Pace {
    target: usize,
    least: usize,
    finished: usize,
    since: Instant,
    /// Whether workers had nothing to do since the last reckoning.
    starved: bool,
    message_bytes: f64,
}

impl Pace {
    pub(crate) fn new(concurrency: usize, now: Instant) -> Self {
        Self {
            target: concurrency.clamp(1, MOST_MESSAGES),
            least: concurrency,
            finished: 0,
            since: now,
            starved: false,
            message_bytes: 1024.0,
        }
    }

    /// Messages came in, with so many bytes of payload.
    pub(crate) fn received(&mut self, messages: usize, bytes: usize) {
        if messages > 0 {
            self.message_bytes += (bytes as f64 / messages as f64 - self.message_bytes) * 0.3;
            self.bound();
        }
    }

    /// Messages were finished since the last call; `idle`: workers have nothing left to do.
    pub(crate) fn finished(&mut self, messages: usize, idle: bool, now: Instant) {
        self.finished += messages;
        let elapsed = now.saturating_duration_since(self.since);
        if idle && self.finished * 2 >= self.target {
            // Most of what was held is done already: more could have been.
            self.target *= 2;
        } else if elapsed >= PERIOD {
            // Towards a second's work. Workers that had nothing to do say nothing about their speed.
            let rate = self.finished as f64 / elapsed.as_secs_f64();
            if !(self.starved || idle) || rate as usize > self.target {
                self.target = match elapsed >= LONG {
                    true => rate as usize,
                    false => (self.target + rate as usize) / 2,
                };
            }
        } else {
            self.starved |= idle;
            return;
        }
        self.bound();
        (self.finished, self.since, self.starved) = (0, now, false);
    }

    /// Not less than runs at once, not more than fits.
    fn bound(&mut self) {
        let fitting = (MOST_BYTES as f64 / self.message_bytes.max(1.0)) as usize;
        self.target = self.target.max(self.least).min(MOST_MESSAGES.min(fitting).max(1));
    }

    /// How many to claim while `held` are held: nothing until half of the target is free. In a group that has a limit, as
    /// many as run at once: what waits here could run elsewhere.
    pub(crate) fn room(&self, held: usize, limited: bool) -> usize {
        if limited {
            return self.least.min(self.target).saturating_sub(held);
        }
        let free = self.target.saturating_sub(held);
        if free * 2 >= self.target { free } else { 0 }
    }

    /// The same in an ordered group, where `excess` of those held are of lanes that hold more than their share: they do not use up the
    /// room of others. But of what there is beyond that, which is as much again, a call takes half: it may be for a lane that comes to hold
    /// too many.
    pub(crate) fn room_beside(&self, held: usize, excess: usize) -> usize {
        let beyond = (self.target * 2).saturating_sub(held);
        self.room(held.saturating_sub(excess), false).min(beyond).min((beyond / 2).max(self.least))
    }

    /// About how many to hold.
    pub(crate) fn target(&self) -> usize {
        self.target
    }

    /// How many of those that wait may be of one lane before the others get room beside them.
    pub(crate) fn share(&self) -> usize {
        (self.target / 4).max(1)
    }

    /// How many of those held had better be left to others: none as long as it is not far too many.
    pub(crate) fn surplus(&self, held: usize) -> usize {
        let enough = self.target.max(self.least);
        if held > enough * 2 + self.least { held - enough } else { 0 }
    }

    /// About the most bytes to fetch at once.
    pub(crate) fn fetch_bytes(&self) -> i64 {
        (MOST_BYTES / 8) as i64
    }

    /// So many messages are about as many bytes, if they are as large as those before.
    pub(crate) fn fitting(&self) -> usize {
        ((MOST_BYTES / 8) as f64 / self.message_bytes.max(1.0)).max(1.0) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_handler_holds_no_more_than_it_runs() {
        let start = Instant::now();
        let mut pace = Pace::new(16, start);
        for second in 1..20 {
            pace.finished(16, false, start + Duration::from_secs(second));
        }
        assert_eq!(pace.room(0, false), 16);
        assert_eq!(pace.room(9, false), 0);
    }

    #[test]
    fn a_fast_handler_soon_holds_thousands() {
        let start = Instant::now();
        let mut pace = Pace::new(16, start);
        for round in 1..20 {
            pace.finished(pace.room(0, false), true, start + Duration::from_millis(round * 5));
        }
        assert_eq!(pace.room(0, false), MOST_MESSAGES);
    }

    #[test]
    fn results_that_come_one_by_one_do_not_hold_it_down() {
        let start = Instant::now();
        let mut pace = Pace::new(16, start);
        let mut now = start;
        for _ in 0..15 {
            for _ in 0..pace.room(0, false) {
                now += Duration::from_micros(20);
                pace.finished(1, true, now);
            }
        }
        assert!(pace.room(0, false) > 5_000, "{}", pace.room(0, false));
    }

    #[test]
    fn what_a_handler_that_has_become_slow_cannot_do_soon_is_surplus() {
        let start = Instant::now();
        let mut pace = Pace::new(16, start);
        for round in 1..20 {
            pace.finished(pace.room(0, false), true, start + Duration::from_millis(round * 5));
        }
        assert_eq!(pace.surplus(MOST_MESSAGES), 0);
        pace.finished(0, false, start + Duration::from_secs(10));
        assert_eq!(pace.surplus(MOST_MESSAGES), MOST_MESSAGES - 16);
    }

    #[test]
    fn large_payloads_bound_it() {
        let start = Instant::now();
        let mut pace = Pace::new(4, start);
        for round in 1..40 {
            pace.received(10, 10 * 16 * 1024 * 1024);
            pace.finished(pace.room(0, false), true, start + Duration::from_millis(round * 5));
        }
        assert_eq!(pace.room(0, false), 4);
    }
}
