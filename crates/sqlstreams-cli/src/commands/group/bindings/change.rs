//! `sqlstreams group bindings set`, `add` and `remove`.

use clap::Args;
use sqlstreams::Binding;

use super::tell;
use crate::commands::open_group;
use crate::context::Context;
use crate::values;

const SET_HELP: &str = "\
The new bindings hold for messages that no consumer has claimed yet. Setting the same again changes
nothing. A malformed binding is refused, and nothing is changed.

Examples:
  sqlstreams group bindings set orders receipts 'orders.*.created' 'refunds.#'
  sqlstreams group bindings set orders audit --none";

const CHANGE_HELP: &str = "\
A binding is a pattern, or JSON with a pattern, conditions on headers, or both. Adding one that is
there, or removing one that is not, changes nothing. The last one is not removed: without any, the
group would receive everything; `group bindings set … --none` says that.

Examples:
  sqlstreams group bindings add orders receipts 'orders.*.created'
  sqlstreams group bindings remove orders mail '{\"pattern\": \"orders.#\", \"headers\": {\"region\": \"eu\"}}'";

#[derive(Debug, Args)]
#[command(after_help = SET_HELP)]
pub(super) struct SetArgs {
    /// The stream
    stream: String,
    /// The group
    group: String,
    /// Patterns, or JSON
    #[arg(value_name = "BINDING", value_parser = values::binding, required_unless_present = "none")]
    bindings: Vec<Binding>,
    /// No bindings: the group receives everything
    #[arg(long, conflicts_with = "bindings")]
    none: bool,
}

#[derive(Debug, Args)]
#[command(after_help = CHANGE_HELP)]
pub(super) struct ChangeArgs {
    /// The stream
    stream: String,
    /// The group
    group: String,
    /// A pattern, or JSON
    #[arg(value_name = "BINDING", value_parser = values::binding)]
    binding: Binding,
}

pub(super) async fn set(args: SetArgs, context: &Context) -> anyhow::Result<()> {
    let group = open_group(&context.reader().await?, &args.stream, &args.group).await?;
    let changed = group.set_bindings(args.bindings).await?;
    tell(&group, &args.stream, changed, context).await
}

pub(super) async fn add(args: ChangeArgs, context: &Context) -> anyhow::Result<()> {
    let group = open_group(&context.reader().await?, &args.stream, &args.group).await?;
    let changed = group.bind(args.binding).await?;
    tell(&group, &args.stream, changed, context).await
}

pub(super) async fn remove(args: ChangeArgs, context: &Context) -> anyhow::Result<()> {
    let group = open_group(&context.reader().await?, &args.stream, &args.group).await?;
    let changed = group.unbind(args.binding).await?;
    tell(&group, &args.stream, changed, context).await
}
