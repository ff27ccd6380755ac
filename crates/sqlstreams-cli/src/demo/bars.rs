//! Progress bars on stderr, where somebody looks.

use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::output::thousands;
use crate::terminal;

/// How often they are drawn.
const TICK: Duration = Duration::from_millis(80);

/// Draws bars, or nothing.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bars {
    pub(crate) shown: bool,
}

/// Something that is counted while it goes on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Line<'a> {
    pub(crate) name: &'static str,
    pub(crate) count: &'a AtomicU64,
    pub(crate) total: u64,
}

impl Bars {
    /// Shows how far the counts are while the work goes on; afterwards there is nothing left to see.
    pub(crate) async fn watch<T>(self, lines: &[Line<'_>], work: impl Future<Output = T>) -> T {
        if !self.shown {
            return work.await;
        }
        let drawn = Drawn::new(lines);
        tokio::pin!(work);
        let mut ticks = tokio::time::interval(TICK);
        loop {
            tokio::select! {
                done = &mut work => return done,
                _ = ticks.tick() => drawn.update(lines),
            }
        }
    }
}

/// Bars on the screen. Dropped, also by an interruption, they are wiped off.
struct Drawn {
    all: MultiProgress,
    bars: Vec<ProgressBar>,
    started: Instant,
}

impl Drawn {
    fn new(lines: &[Line<'_>]) -> Self {
        let all = MultiProgress::with_draw_target(ProgressDrawTarget::stderr());
        let bars = lines
            .iter()
            .map(|line| {
                let bar = all.add(ProgressBar::new(line.total));
                bar.set_style(style());
                bar.set_prefix(line.name);
                bar
            })
            .collect();
        Self { all, bars, started: Instant::now() }
    }

    fn update(&self, lines: &[Line<'_>]) {
        for (bar, line) in self.bars.iter().zip(lines) {
            let count = line.count.load(Ordering::Relaxed);
            let rate = count as f64 / self.started.elapsed().as_secs_f64().max(0.001);
            bar.set_message(format!("{}/s", thousands(rate as u64)));
            bar.set_position(count);
        }
    }
}

impl Drop for Drawn {
    fn drop(&mut self) {
        for bar in &self.bars {
            bar.finish_and_clear();
        }
        // A terminal that is gone needs no wiping.
        let _ = self.all.clear();
    }
}

fn style() -> ProgressStyle {
    let bar = if terminal::stderr_is_coloured() { "{bar:32.green/dim}" } else { "{bar:32}" };
    ProgressStyle::with_template(&format!("   {{prefix:<9}} {bar} {{human_pos:>10}} {{msg:>11}}"))
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars("━╸─")
}
