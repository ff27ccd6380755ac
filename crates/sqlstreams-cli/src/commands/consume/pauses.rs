//! Saying that the group is paused: without that, a consumer that waits looks like one that hangs.

use std::time::Duration;

use serde_json::json;
use sqlstreams::{Activity, Health};

use crate::output::shell_word;
use crate::progress::Progress;
use crate::terminal::DIM;

/// How soon it is told.
const LOOK: Duration = Duration::from_millis(250);

/// Whose pauses they are.
pub(super) struct Names {
    pub(super) stream: String,
    pub(super) group: String,
}

/// Tells of each pause and of its end, on stderr.
pub(super) async fn tell(health: Health, names: Names, progress: Progress, json: bool) {
    let mut interval = tokio::time::interval(LOOK);
    let mut told = false;
    loop {
        interval.tick().await;
        let paused = match health.snapshot().activity {
            Activity::Paused => true,
            Activity::Claiming => false,
            // Neither tells.
            _ => continue,
        };
        if paused != told {
            told = paused;
            progress.say(&line(&names, paused, json));
        }
    }
}

fn line(names: &Names, paused: bool, json: bool) -> String {
    let Names { stream, group } = names;
    let said = match (paused, json) {
        (_, true) => {
            let what = if paused { "paused" } else { "resumed" };
            return json!({ what: { "stream": stream, "group": group } }).to_string();
        }
        (true, _) => format!(
            "group {group:?} is paused; `sqlstreams group resume {} {}` goes on",
            shell_word(stream),
            shell_word(group)
        ),
        (false, _) => format!("group {group:?} goes on"),
    };
    format!("{DIM}{said}{DIM:#}")
}
