//! The machine that something was measured on.

use std::fmt;
use std::fs;

use anyhow::{Context as _, Result};
use serde::Serialize;

use crate::place::{Place, connect};

#[derive(Debug, Clone, Serialize)]
pub(crate) struct Machine {
    processor: String,
    cores: usize,
    memory_gib: u64,
    postgresql: String,
    fsync: String,
    synchronous_commit: String,
    /// Milliseconds of a bare insert and commit, the median of 50: what durability costs here.
    commit_ms: f64,
    /// The load when the run began: others' work makes figures worse than they could be.
    load: f64,
}

impl Machine {
    pub(crate) async fn look_at(place: &Place) -> Result<Self> {
        let db = connect(&place.cluster.url("postgres")).await?;
        let settings = "SELECT current_setting('fsync'), current_setting('synchronous_commit')";
        let settings = db.query_one(settings, &[]).await?;
        db.batch_execute("CREATE TABLE bare (id int)").await?;
        let mut commits = Vec::new();
        for _ in 0..50 {
            let begun = std::time::Instant::now();
            db.batch_execute("INSERT INTO bare VALUES (1)").await?;
            commits.push(begun.elapsed().as_secs_f64() * 1_000.0);
        }
        commits.sort_by(f64::total_cmp);
        let load = fs::read_to_string("/proc/loadavg").context("could not read the load")?;
        let load = load.split(' ').next().and_then(|load| load.parse().ok());
        Ok(Self {
            processor: line("/proc/cpuinfo", "model name"),
            cores: std::thread::available_parallelism()?.get(),
            memory_gib: {
                let total = line("/proc/meminfo", "MemTotal");
                let kib: u64 = total.split(' ').next().and_then(|n| n.parse().ok()).unwrap_or(0);
                (kib + (1 << 19)) >> 20
            },
            postgresql: place.cluster.programs().version().to_owned(),
            fsync: settings.get(0),
            synchronous_commit: settings.get(1),
            commit_ms: commits[commits.len() / 2],
            load: load.unwrap_or(0.0),
        })
    }
}

fn line(file: &str, name: &str) -> String {
    let text = fs::read_to_string(file).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
    line.trim_start_matches([' ', '\t', ':']).to_owned()
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { processor, cores, memory_gib, postgresql, .. } = self;
        write!(
            f,
            "{processor}, {cores} cores, {memory_gib} GiB. PostgreSQL {postgresql}, fsync {}, \
             synchronous_commit {}; a bare commit takes {:.2} ms. Load at the start: {:.1}.",
            self.fsync, self.synchronous_commit, self.commit_ms, self.load
        )
    }
}
