//! `sqlstreams demo`.

use clap::Args;

use crate::context::Context;

#[derive(Debug, Args)]
pub(crate) struct DemoArgs {}

pub(crate) async fn run(_args: DemoArgs, _context: &Context) -> anyhow::Result<()> {
    anyhow::bail!("not there yet")
}
