//! `sqlstreams down`.

use anyhow::Context as _;
use clap::Args;
use serde_json::json;
use tokio::task::spawn_blocking;

use crate::context::Context;
use crate::output::{print, print_json};

const AFTER_HELP: &str = "\
Does nothing when no server runs. The data stays: the next `sqlstreams up` has it again.

Examples:
  sqlstreams down
  sqlstreams down --up-dir ./pg";

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct DownArgs {}

pub(crate) async fn run(_args: DownArgs, context: &Context) -> anyhow::Result<()> {
    let kept = context.kept()?;
    let dir = kept.dir().to_path_buf();
    let stopped = spawn_blocking(move || kept.progress(&Context::say_line).down())
        .await
        .context("the task that stops PostgreSQL ended early")??;
    match stopped {
        Some(stopped) if context.json() => {
            print_json(&json!({"stopped": true, "pid": stopped.pid, "data_dir": stopped.data_dir}))
        }
        None if context.json() => print_json(&json!({"stopped": false})),
        Some(stopped) => print(format_args!(
            "stopped PostgreSQL (process {}); its data stays in {}",
            stopped.pid,
            stopped.data_dir.display()
        )),
        None => print(format_args!("no PostgreSQL of `sqlstreams up` runs in {}", dir.display())),
    }
}
