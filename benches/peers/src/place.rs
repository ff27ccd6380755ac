//! Where everything runs: the folder of this run, the private PostgreSQL, and what scripts/bench-peers installed.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context as _, Result, bail};
use sqlstreams_dev::Cluster;
use tempfile::TempDir;
use tokio_postgres::NoTls;

/// Settings of the private PostgreSQL beside its defaults, for all that run on it.
///
/// The log is large enough that no checkpoint falls into a measurement, but those that are asked for between them.
const SETTINGS: &[(&str, &str)] = &[
    ("max_wal_size", "16GB"),
    ("checkpoint_timeout", "30min"),
    ("shared_buffers", "512MB"),
    ("max_connections", "300"),
];

/// Shared by all peers of a run.
pub(crate) struct Place {
    // Before the folder that it is in.
    pub(crate) cluster: Cluster,
    folder: TempDir,
    tools: PathBuf,
}

impl Place {
    /// Starts PostgreSQL below `base`, or below the system's temporary folder. Blocks.
    pub(crate) fn open(base: Option<&Path>, tools: PathBuf) -> Result<Arc<Self>> {
        let mut builder = tempfile::Builder::new();
        // PostgreSQL may run under another account.
        builder.prefix("bench-peers-").permissions(std::fs::Permissions::from_mode(0o755));
        let folder = match base {
            Some(base) => builder.tempdir_in(base),
            None => builder.tempdir(),
        };
        let folder = folder.context("could not make a folder for this run")?;
        let mut cluster = Cluster::builder().base_dir(folder.path());
        for (name, value) in SETTINGS {
            cluster = cluster.setting(*name, *value);
        }
        Ok(Arc::new(Self { cluster: cluster.start()?, folder, tools }))
    }

    /// A new folder for a peer.
    pub(crate) fn folder(&self, name: &str) -> Result<PathBuf> {
        let folder = self.folder.path().join(name);
        std::fs::create_dir_all(&folder).with_context(|| format!("could not make {folder:?}"))?;
        Ok(folder)
    }

    /// A program or file that scripts/bench-peers unpacked, or else that the system has.
    pub(crate) fn tool(&self, path: &str) -> Result<PathBuf> {
        let places = [self.tools.join("root").join(path), Path::new("/").join(path)];
        match places.into_iter().find(|place| place.exists()) {
            Some(place) => Ok(place),
            None => bail!("/{path} is not installed; {}", self.why_not_installed()),
        }
    }

    /// A program in the Python environment that it made.
    pub(crate) fn python_tool(&self, name: &str) -> Result<PathBuf> {
        let place = self.tools.join("venv/bin").join(name);
        if !place.exists() {
            bail!("{name} is not installed; {}", self.why_not_installed());
        }
        Ok(place)
    }

    fn why_not_installed(&self) -> String {
        let failed = std::fs::read_to_string(self.tools.join("failed")).unwrap_or_default();
        match failed.trim() {
            "" => "scripts/bench-peers installs it".to_owned(),
            failed => failed.lines().collect::<Vec<_>>().join("; "),
        }
    }

    /// A command that finds the unpacked libraries, with a plain environment.
    pub(crate) fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        let root = self.tools.join("root/usr/lib");
        let libraries = format!("{}-linux-gnu", std::env::consts::ARCH);
        if program.starts_with(&self.tools) {
            command.env("LD_LIBRARY_PATH", root.join(libraries));
        }
        command
    }

    /// Makes a database for a peer, and returns its URL.
    pub(crate) async fn database(&self, name: &str) -> Result<String> {
        let db = connect(&self.cluster.url("postgres")).await?;
        db.batch_execute(&format!("DROP DATABASE IF EXISTS {name} WITH (FORCE)")).await?;
        db.batch_execute(&format!("CREATE DATABASE {name}")).await?;
        Ok(self.cluster.url(name))
    }

    pub(crate) fn postgres_pid(&self) -> Result<u32> {
        self.cluster.pid().context("PostgreSQL has ended")
    }
}

/// A plain connection.
pub(crate) async fn connect(url: &str) -> Result<tokio_postgres::Client> {
    let (client, connection) =
        tokio_postgres::connect(url, NoTls).await.context("could not connect to PostgreSQL")?;
    tokio::spawn(async move {
        // Whoever uses the client hears of it.
        let _ = connection.await;
    });
    Ok(client)
}

/// So many of them.
pub(crate) async fn connect_many(url: &str, count: u64) -> Result<Vec<tokio_postgres::Client>> {
    futures_util::future::try_join_all((0..count).map(|_| connect(url))).await
}
