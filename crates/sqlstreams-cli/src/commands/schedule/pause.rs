//! `sqlstreams schedule pause` and `sqlstreams schedule resume`.

use clap::Args;

use crate::context::Context;
use crate::output::{print, print_json};

const AFTER_HELP: &str = "\
What goes by while a schedule is paused is not missed: nothing makes up for it. `schedule run` works
all the same. Doing it twice is harmless.

Examples:
  sqlstreams schedule pause nightly
  sqlstreams schedule resume nightly";

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct PauseArgs {
    /// The schedule
    name: String,
}

pub(crate) async fn pause(args: PauseArgs, context: &Context) -> anyhow::Result<()> {
    set(args, true, context).await
}

pub(crate) async fn resume(args: PauseArgs, context: &Context) -> anyhow::Result<()> {
    set(args, false, context).await
}

async fn set(args: PauseArgs, paused: bool, context: &Context) -> anyhow::Result<()> {
    let schedule = super::open(&context.reader().await?, &args.name).await?;
    match paused {
        true => schedule.pause().await?,
        false => schedule.resume().await?,
    };
    let info = schedule.info().await?;
    if context.json() {
        return print_json(&super::to_json(&info));
    }
    match paused {
        true => print(format_args!("paused schedule {:?}", info.name)),
        false => {
            let next = super::or_dash(info.next_fire);
            print(format_args!("resumed schedule {:?}, next at {next}", info.name))
        }
    }
}
