//! What the tests share.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use tokio_postgres::NoTls;

/// Runs a query that gives one text, on a connection of its own.
pub(crate) fn query(url: &str, sql: &str) -> Result<String, tokio_postgres::Error> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime starts");
    runtime.block_on(async {
        let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
        let connection = tokio::spawn(connection);
        let mut text = String::new();
        for message in client.simple_query(sql).await? {
            if let tokio_postgres::SimpleQueryMessage::Row(row) = message {
                text.push_str(row.get(0).unwrap_or("NULL"));
            }
        }
        drop(client);
        let _ = connection.await;
        Ok(text)
    })
}

/// Whether a process exists that isn't a zombie.
pub(crate) fn is_alive(pid: u32) -> bool {
    let output =
        Command::new("ps").args(["-o", "stat=", "-p", &pid.to_string()]).output().expect("ps runs");
    let state = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    !state.is_empty() && !state.starts_with('Z')
}

/// Waits until something holds, at most 20 s.
pub(crate) fn eventually(what: &str, holds: impl Fn() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < Duration::from_secs(20), "never: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The folder that goes with a cluster.
pub(crate) fn folder_of(data_dir: &Path) -> &Path {
    data_dir.parent().expect("a data folder is inside another")
}
