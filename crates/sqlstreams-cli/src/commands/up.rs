//! `sqlstreams up`.

use clap::Args;

use crate::context::Context;

#[derive(Debug, Args)]
pub(crate) struct UpArgs {}

pub(crate) async fn run(_args: &UpArgs, _context: &Context) -> anyhow::Result<()> {
    anyhow::bail!("not there yet")
}
