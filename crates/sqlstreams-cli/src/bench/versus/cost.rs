//! What a turn used up, of the server and of this process.

use std::fs;
use std::ops::AddAssign;
use std::path::Path;
use std::time::Instant;

use anyhow::Context as _;
use serde::{Serialize, Serializer};
use sqlstreams::Dsn;

/// What was used up.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Cost {
    pub(crate) messages: u64,
    pub(crate) seconds: f64,
    pub(crate) wal_bytes: u64,
    pub(crate) commits: u64,
    /// Seconds of a processor; only known of a server of this machine.
    pub(crate) server_cpu: Option<f64>,
    pub(crate) client_cpu: Option<f64>,
}

impl Cost {
    pub(crate) fn per_message(&self, amount: f64) -> f64 {
        amount / self.messages.max(1) as f64
    }
}

impl Cost {
    pub(crate) fn wal_per_message(&self) -> f64 {
        self.per_message(self.wal_bytes as f64)
    }

    pub(crate) fn commits_per_message(&self) -> f64 {
        self.per_message(self.commits as f64)
    }
}

impl AddAssign for Cost {
    fn add_assign(&mut self, other: Self) {
        let sum = |a: Option<f64>, b: Option<f64>| match (a, b) {
            (Some(a), Some(b)) => Some(a + b),
            (a, b) => a.or(b),
        };
        self.messages += other.messages;
        self.seconds += other.seconds;
        self.wal_bytes += other.wal_bytes;
        self.commits += other.commits;
        self.server_cpu = sum(self.server_cpu, other.server_cpu);
        self.client_cpu = sum(self.client_cpu, other.client_cpu);
    }
}

impl Serialize for Cost {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct PerMessage {
            messages: u64,
            wal_bytes_per_message: f64,
            commits_per_message: f64,
            server_cpu_us_per_message: Option<f64>,
            client_cpu_us_per_message: Option<f64>,
        }
        PerMessage {
            messages: self.messages,
            wal_bytes_per_message: self.wal_per_message(),
            commits_per_message: self.commits_per_message(),
            server_cpu_us_per_message: self.server_cpu.map(|s| self.per_message(s * 1e6)),
            client_cpu_us_per_message: self.client_cpu.map(|s| self.per_message(s * 1e6)),
        }
        .serialize(serializer)
    }
}

/// Reads what a turn uses up.
pub(crate) struct Meter {
    db: tokio_postgres::Client,
    /// The server's first process, where it is of this machine.
    postmaster: Option<u32>,
}

/// The readings when a turn began.
pub(crate) struct Begun {
    at: Instant,
    wal: i64,
    commits: i64,
    server_cpu: Option<f64>,
    client_cpu: Option<f64>,
}

impl Meter {
    /// `own`: the server is a private one, of this machine.
    pub(crate) async fn open(url: &str, own: bool) -> anyhow::Result<Self> {
        let db = Dsn::parse(url)?.connect().await?;
        let backend: i32 = db.query_one("SELECT pg_backend_pid()", &[]).await?.get(0);
        let stat = if own { Stat::read(backend.unsigned_abs()) } else { None };
        Ok(Self { db, postmaster: stat.map(|stat| stat.parent) })
    }

    /// Lets the server write what the turn before left to it, so that it is not this one that pays.
    pub(crate) async fn settle(&self) -> anyhow::Result<()> {
        // On a given server that may not be allowed, and would disturb others.
        if self.postmaster.is_some() {
            self.db.batch_execute("CHECKPOINT").await.context("could not make a checkpoint")?;
        }
        Ok(())
    }

    pub(crate) async fn begin(&self) -> anyhow::Result<Begun> {
        let (wal, commits) = self.counters().await?;
        Ok(Begun {
            wal,
            commits,
            server_cpu: self.server_cpu(),
            client_cpu: Stat::read(std::process::id()).map(|stat| stat.cpu),
            at: Instant::now(),
        })
    }

    pub(crate) async fn end(&self, begun: Begun, messages: u64) -> anyhow::Result<Cost> {
        let seconds = begun.at.elapsed().as_secs_f64();
        let since = |now: Option<f64>, then: Option<f64>| Some((now? - then?).max(0.0));
        let client_cpu =
            since(Stat::read(std::process::id()).map(|stat| stat.cpu), begun.client_cpu);
        let server_cpu = since(self.server_cpu(), begun.server_cpu);
        let (wal, commits) = self.counters().await?;
        Ok(Cost {
            messages,
            seconds,
            wal_bytes: (wal - begun.wal).max(0).unsigned_abs(),
            commits: (commits - begun.commits).max(0).unsigned_abs(),
            server_cpu,
            client_cpu,
        })
    }

    /// Bytes of WAL and commits that wrote something, of the whole server.
    async fn counters(&self) -> anyhow::Result<(i64, i64)> {
        let sql = "SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint, pg_snapshot_xmax(pg_current_snapshot())::text::bigint";
        let row = self.db.query_one(sql, &[]).await.context("could not read the counters")?;
        Ok((row.get(0), row.get(1)))
    }

    /// Seconds of a processor of all the server's processes, also of those that have ended.
    fn server_cpu(&self) -> Option<f64> {
        let postmaster = self.postmaster?;
        let children = fs::read_dir("/proc").ok()?.filter_map(|entry| {
            let pid = entry.ok()?.file_name().to_str()?.parse().ok()?;
            Stat::read(pid).filter(|stat| stat.parent == postmaster).map(|stat| stat.cpu)
        });
        Some(children.sum::<f64>() + Stat::read(postmaster)?.cpu)
    }
}

/// What Linux tells of a process.
struct Stat {
    parent: u32,
    /// Seconds of a processor, with those of children that have ended.
    cpu: f64,
}

impl Stat {
    fn read(pid: u32) -> Option<Self> {
        let text =
            fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat")).ok()?;
        Self::parse(&text)
    }

    fn parse(text: &str) -> Option<Self> {
        // The second field is a name in parentheses, which may hold spaces and parentheses.
        let fields: Vec<&str> = text.get(text.rfind(')')? + 1..)?.split_whitespace().collect();
        let ticks: u64 = fields.get(11..15)?.iter().filter_map(|f| f.parse::<u64>().ok()).sum();
        let per_second = rustix::param::clock_ticks_per_second();
        Some(Self { parent: fields.get(1)?.parse().ok()?, cpu: ticks as f64 / per_second as f64 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_read_whatever_its_name() {
        let text = "7 (a b) c) S 3 7 7 0 -1 4194560 1 2 3 4 100 50 25 25 20 0 1 0 5 6 7";
        let stat = Stat::parse(text).unwrap();
        assert_eq!(stat.parent, 3);
        assert_eq!(stat.cpu, 200.0 / rustix::param::clock_ticks_per_second() as f64);
        assert!(Stat::parse("").is_none());
    }

    #[test]
    fn costs_add_up() {
        let one = Cost {
            messages: 10,
            seconds: 1.0,
            wal_bytes: 100,
            commits: 2,
            server_cpu: Some(0.5),
            client_cpu: None,
        };
        let mut sum = Cost::default();
        sum += one;
        sum += one;
        assert_eq!(sum.per_message(sum.wal_bytes as f64), 10.0);
        assert_eq!(sum.server_cpu, Some(1.0));
        assert_eq!(sum.client_cpu, None);
    }
}
