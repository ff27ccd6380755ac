//! `sqlstreams group bindings …`.

mod change;
mod history;
mod list;
mod test;

use clap::{Args, Subcommand};
use serde_json::{Value, json};
use sqlstreams::{Binding, Bytes, Group};

use crate::context::Context;
use crate::output::{counted, print, print_json, thousands};

const AFTER_HELP: &str = "\
Bindings say which messages of the stream are for the group: those that match any of them, or all
if there is none. A binding is a pattern over routing keys, where * stands for exactly one word
between dots and # for any number of words, or JSON with a pattern, conditions on headers, or both.
A message without a routing key is matched by # alone. Changes hold for what no consumer has
claimed yet; what was claimed before, exceptions and dead letters are not affected.

Examples:
  sqlstreams group bindings orders receipts
  sqlstreams group bindings set orders receipts 'orders.*.created' 'refunds.#'
  sqlstreams group bindings add orders receipts '{\"headers\": {\"region\": \"eu\"}}'
  sqlstreams group bindings remove orders receipts 'refunds.#'
  sqlstreams group bindings history orders receipts
  sqlstreams group bindings test orders --routing-key orders.eu.created";

/// List the bindings of a group, or change, explain or test them
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP, args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct BindingsArgs {
    #[command(subcommand)]
    command: Option<BindingsCommand>,
    /// The stream
    #[arg(required = true)]
    stream: Option<String>,
    /// The group
    #[arg(required = true)]
    group: Option<String>,
}

#[derive(Debug, Subcommand)]
enum BindingsCommand {
    /// Replace all bindings of a group at once
    Set(change::SetArgs),
    /// Add a binding
    Add(change::ChangeArgs),
    /// Take a binding away
    Remove(change::ChangeArgs),
    /// Show who changed the bindings, when, to what, and from which id on
    History(history::HistoryArgs),
    /// Show which groups of a stream a message would reach, and by which binding
    Test(test::TestArgs),
}

pub(crate) async fn run(args: BindingsArgs, context: &Context) -> anyhow::Result<()> {
    match args.command {
        Some(BindingsCommand::Set(args)) => change::set(args, context).await,
        Some(BindingsCommand::Add(args)) => change::add(args, context).await,
        Some(BindingsCommand::Remove(args)) => change::remove(args, context).await,
        Some(BindingsCommand::History(args)) => history::run(args, context).await,
        Some(BindingsCommand::Test(args)) => test::run(args, context).await,
        None => {
            let (stream, group) = (args.stream.unwrap_or_default(), args.group.unwrap_or_default());
            list::run(&stream, &group, context).await
        }
    }
}

pub(super) fn to_json(binding: &Binding) -> Value {
    let headers = binding.header_conditions();
    json!({
        "pattern": binding.pattern(),
        "headers": if headers.is_empty() { Value::Null } else { headers.clone().into() },
    })
}

/// Tells what the bindings are after a change, or that there was none.
async fn tell(
    group: &Group<Vec<u8>, Bytes>,
    stream: &str,
    changed: bool,
    context: &Context,
) -> anyhow::Result<()> {
    let bindings = group.bindings().await?;
    // The change, or what came after it.
    let after = group.binding_history().await?.last().map_or(0, |set| set.after_id);
    if context.json() {
        return print_json(&json!({
            "stream": stream,
            "group": group.name(),
            "changed": changed,
            "after_id": after,
            "bindings": Value::from_iter(bindings.iter().map(to_json)),
        }));
    }
    let (name, count) = (group.name(), counted(bindings.len() as u64, "binding"));
    let all = if bindings.is_empty() { ", so it receives everything" } else { "" };
    match changed {
        false => print(format_args!(
            "nothing to change: group {name:?} of stream {stream:?} has {count}{all}"
        )),
        true => print(format_args!(
            "group {name:?} of stream {stream:?} has {count}{all}, for ids above {}",
            thousands(after)
        )),
    }
}
