//! `sqlstreams up`.

use anyhow::Context as _;
use clap::Args;
use serde_json::json;
use sqlstreams::Client;
use tokio::task::spawn_blocking;

use crate::context::Context;
use crate::output::{print, print_json};

const AFTER_HELP: &str = "\
The server runs on after this command, at an address of this machine only, until `sqlstreams down`;
its data outlives both. Other commands use it when no database is given.

Examples:
  sqlstreams up
  export DATABASE_URL=$(sqlstreams up)
  sqlstreams up --up-dir ./pg --major 17
  psql \"$(sqlstreams up --json | jq -r .url)\"";

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct UpArgs {
    /// The major version of PostgreSQL for a new cluster: 15 to 18
    #[arg(long, value_name = "N")]
    major: Option<u32>,
}

pub(crate) async fn run(args: UpArgs, context: &Context) -> anyhow::Result<()> {
    let mut kept = context.kept()?;
    if let Some(major) = args.major {
        kept = kept.major(major);
    }
    let info = spawn_blocking(move || kept.progress(&Context::say_line).up())
        .await
        .context("the task that starts PostgreSQL ended early")??;
    Client::builder(&info.url).schema(context.schema()).connect().await?;
    if context.json() {
        return print_json(&json!({
            "url": info.url,
            "port": info.port,
            "pid": info.pid,
            "major": info.major,
            "data_dir": info.data_dir,
            "log_file": info.log_file,
            "already_running": info.already_running,
        }));
    }
    let state = if info.already_running { "runs already" } else { "runs" };
    context.say(&format!(
        "PostgreSQL {} {state} (process {}, data in {}); `sqlstreams down` stops it",
        info.major,
        info.pid,
        info.data_dir.display()
    ));
    print(&info.url)
}
