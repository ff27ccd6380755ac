//! `sqlstreams group seek`.

use clap::Args;
use serde_json::json;
use sqlstreams::{Sought, Start};

use crate::commands::open_group;
use crate::context::Context;
use crate::failure::Failure;
use crate::output::{counted, print, print_json, thousands};
use crate::values;

const AFTER_HELP: &str = "\
The group goes on at the new place; consumers that run follow within a second. Every lease ends:
what handlers still say of what they have in hand is refused. Messages from the new place on are
handed out, those that were handled as well, and their attempts begin anew. Messages before it that
were never handed out are passed over. Those before it that were begun, in hand or waiting for
another attempt, are finished as before, unless they are dropped. Dead letters stay dead letters,
unless those from the new place on are to be repeated.

Without --yes it is only told what would happen; --preview says the same and succeeds. To hand out a
range once more and leave the group where it is, see `group replay`.

Examples:
  sqlstreams group seek orders receipts '2h ago' --preview
  sqlstreams group seek orders receipts 2026-03-01T12:00:00Z --yes
  sqlstreams group seek orders receipts latest --drop-unfinished --yes";

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct SeekArgs {
    /// The stream
    stream: String,
    /// The group
    group: String,
    /// Where it goes on: beginning, latest, an id, a time (UTC without an offset), or '2h ago'
    #[arg(value_name = "WHERE", value_parser = values::start, allow_hyphen_values = true)]
    to: Start,
    /// Give up what was begun and not finished before the new place, and replays
    #[arg(long)]
    drop_unfinished: bool,
    /// Hand out dead letters from the new place on again, too
    #[arg(long)]
    repeat_dead: bool,
    /// Only tell what would happen
    #[arg(long, conflicts_with = "yes")]
    preview: bool,
    /// Do it
    #[arg(long)]
    yes: bool,
}

pub(crate) async fn run(args: SeekArgs, context: &Context) -> anyhow::Result<()> {
    let group = open_group(&context.reader().await?, &args.stream, &args.group).await?;
    let mut seek = group.seek(args.to);
    if args.drop_unfinished {
        seek = seek.drop_unfinished();
    }
    if args.repeat_dead {
        seek = seek.repeat_dead();
    }
    let sought = match args.yes {
        true => seek.run().await?,
        false => seek.preview().await?,
    };
    let what = describe(&sought, &args);
    if !args.yes && !args.preview {
        let place = format!("this would move group {:?} to after id {}", args.group, sought.after);
        return Err(Failure::usage("not_confirmed", format!("{place}: {}", what.join("; ")))
            .hint("Nothing has changed; repeat the command with --yes to do it.")
            .into());
    }
    if context.json() {
        return print_json(&json!({
            "stream": args.stream,
            "group": args.group,
            "moved": args.yes,
            "before": sought.before,
            "after": sought.after,
            "repeated": sought.repeated,
            "skipped": sought.skipped,
            "ended_leases": sought.ended_leases,
            "unfinished": sought.unfinished,
            "restarted": sought.restarted,
            "dead": sought.dead,
        }));
    }
    let done = if args.yes { "moved" } else { "would move" };
    print(format_args!(
        "{done} group {:?} of stream {:?} from after id {} to after id {}",
        args.group,
        args.stream,
        thousands(sought.before),
        thousands(sought.after)
    ))?;
    what.iter().try_for_each(|line| print(format_args!("  {line}")))
}

/// What it means, a line each.
fn describe(sought: &Sought, args: &SeekArgs) -> Vec<String> {
    let count = |n: i64, noun: &str| counted(n.unsigned_abs(), noun);
    let unfinished = if args.drop_unfinished { "dropped" } else { "finished as before" };
    let dead = if args.repeat_dead { "handed out again" } else { "left out" };
    let lines = [
        (sought.repeated, format!("up to {} again", count(sought.repeated, "message"))),
        (sought.skipped, format!("up to {} skipped", count(sought.skipped, "message"))),
        (sought.ended_leases, format!("{} ended", count(sought.ended_leases, "lease"))),
        (
            sought.unfinished,
            format!("{} before it, begun: {unfinished}", count(sought.unfinished, "message")),
        ),
        (
            sought.restarted,
            format!(
                "{} waiting for another attempt: begun anew",
                count(sought.restarted, "message")
            ),
        ),
        (sought.dead, format!("{}: {dead}", count(sought.dead, "dead letter"))),
    ];
    let mut lines: Vec<String> =
        lines.into_iter().filter(|(n, _)| *n > 0).map(|(_, line)| line).collect();
    if lines.is_empty() {
        lines.push("nothing is handed out again, nothing is skipped".to_owned());
    }
    lines
}
