//! Progress on stderr.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::context::Context;
use crate::output::thousands;

/// A line on stderr that says how far something is and how fast it goes; nothing where nobody would see it.
#[derive(Debug, Clone)]
pub(crate) struct Progress {
    bar: ProgressBar,
    started: Instant,
    noun: &'static str,
}

impl Progress {
    /// `total` in whatever [`update`](Self::update) counts `done` in; `None` if nobody knows it.
    pub(crate) fn new(context: &Context, total: Option<u64>, noun: &'static str) -> Self {
        let target = match context.shows_progress() {
            true => ProgressDrawTarget::stderr_with_hz(8),
            false => ProgressDrawTarget::hidden(),
        };
        let bar = ProgressBar::with_draw_target(total, target);
        let template = match total {
            Some(_) => "{bar:28} {percent:>3} %  {msg}",
            None => "{spinner} {msg}",
        };
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(125));
        Self { bar, started: Instant::now(), noun }
    }

    /// Shows nothing after all, where it would get in the way of something else at the terminal.
    pub(crate) fn hidden_if(self, hide: bool) -> Self {
        if hide {
            self.bar.set_draw_target(ProgressDrawTarget::hidden());
        }
        self
    }

    /// `done` of the total, and `count` things.
    pub(crate) fn update(&self, done: u64, count: u64) {
        if self.bar.is_hidden() {
            return;
        }
        self.bar.set_position(done);
        self.bar.set_message(format!(
            "{} {}, {}/s",
            thousands(count),
            self.noun,
            thousands(self.rate(count))
        ));
    }

    /// So many a second since the beginning.
    pub(crate) fn rate(&self, count: u64) -> u64 {
        (count as f64 / self.seconds().max(0.001)) as u64
    }

    /// Seconds since the beginning.
    pub(crate) fn seconds(&self) -> f64 {
        self.started.elapsed().as_secs_f64()
    }

    /// Prints a line above, which stays.
    pub(crate) fn say(&self, line: &str) {
        self.bar.suspend(|| anstream::eprintln!("{line}"));
    }

    /// Wipes the line.
    pub(crate) fn clear(&self) {
        self.bar.finish_and_clear();
    }
}
