//! `sqlstreams dead show`.

use std::time::SystemTime;

use clap::Args;
use serde_json::Value;

use crate::calendar;
use crate::commands::{open_group, open_stream};
use crate::context::Context;
use crate::failure::Failure;
use crate::output::{print, print_json, printable, short_time, thousands, time};
use crate::payload;

const AFTER_HELP: &str = "\
Examples:
  sqlstreams dead show orders 1042 --group receipts
  sqlstreams dead show orders 1042 --group receipts --json | jq .payload";

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct ShowArgs {
    /// The stream
    stream: String,
    /// The id of the message
    #[arg(value_parser = clap::value_parser!(i64).range(1..))]
    id: i64,
    /// The group
    #[arg(long, short, value_name = "GROUP")]
    group: String,
}

pub(crate) async fn run(args: ShowArgs, context: &Context) -> anyhow::Result<()> {
    let client = context.reader().await?;
    let group = open_group(&client, &args.stream, &args.group).await?;
    let found = group.dead_letters(args.id - 1, 1).await?.pop();
    let Some(letter) = found.filter(|letter| letter.message_id == args.id) else {
        return Err(not_dead(&group, &args).await?.into());
    };
    let stream = open_stream(&client, &args.stream).await?;
    let message = stream.read(&[args.id]).await?.pop();
    if context.json() {
        let mut document = super::to_json(&letter);
        document["history"] = history(letter.history, time);
        if let Some(message) = message {
            document["produced_at"] = time(message.produced_at).into();
            document["routing_key"] = message.routing_key.into();
            document["headers"] = message.headers.into();
            document["payload"] = payload::to_value(&message.payload, stream.payload_type());
        }
        return print_json(&document);
    }
    let or_none = |text: Option<&str>| printable(text.unwrap_or("none"), 1_000);
    print(format_args!(
        "message {} of stream {}, a dead letter of group {}\n  key           {}\n  attempts      {}, redriven {} times\n  first failed  {}\n  died          {}",
        args.id,
        printable(&args.stream, 200),
        printable(&args.group, 200),
        or_none(letter.key.as_deref()),
        letter.attempts,
        letter.redrives,
        short_time(letter.first_failed_at),
        letter.dead_at.map(short_time).unwrap_or_default(),
    ))?;
    print(format_args!("\nerror\n{}", indented(letter.last_error.as_deref().unwrap_or("none"))))?;
    let history = history(letter.history, short_time);
    let attempts: Vec<String> = history.as_array().into_iter().flatten().map(entry).collect();
    if !attempts.is_empty() {
        print(format_args!("\nhistory\n{}", attempts.join("\n")))?;
    }
    match message {
        Some(message) => print(format_args!(
            "\npayload, {} bytes, produced {}\n{}",
            thousands(message.payload.len() as u64),
            short_time(message.produced_at),
            indented(&payload::to_text(&message.payload, stream.payload_type()))
        )),
        None => print("\npayload: the message is no longer in the log"),
    }
}

/// What is there instead of the dead letter that was asked for.
async fn not_dead(
    group: &sqlstreams::Group<Vec<u8>, sqlstreams::Bytes>,
    args: &ShowArgs,
) -> sqlstreams::Result<Failure> {
    let what = format!("message {} is no dead letter of group {:?}", args.id, args.group);
    let failure = Failure::not_found("unknown_dead_letter", what);
    let other = group.exceptions(None, args.id - 1, 1).await?.pop();
    if let Some(other) = other.filter(|other| other.message_id == args.id) {
        return Ok(failure
            .hint(format!("It failed {} times and is {:?} now.", other.attempts, other.state)));
    }
    let some: Vec<String> =
        group.dead_letters(0, 10).await?.iter().map(|l| l.message_id.to_string()).collect();
    Ok(failure.hint(match some.is_empty() {
        true => "The group has no dead letters.".to_owned(),
        false => format!("Dead letters of the group: {}.", some.join(", ")),
    }))
}

/// With its times as everything else has them: PostgreSQL spells them in its own way.
fn history(mut history: Value, spelled: fn(SystemTime) -> String) -> Value {
    for attempt in history.as_array_mut().into_iter().flatten() {
        if let Some(at) = attempt["at"].as_str().and_then(calendar::parse) {
            attempt["at"] = spelled(at).into();
        }
    }
    history
}

fn entry(attempt: &Value) -> String {
    let field = |name: &str| match &attempt[name] {
        Value::String(text) => text.clone(),
        Value::Null => String::new(),
        other => other.to_string(),
    };
    format!(
        "  {}  attempt {}  {}  {}",
        field("at"),
        field("attempt"),
        field("outcome"),
        printable(&field("error"), 100)
    )
}

/// Several lines, made harmless and set in.
fn indented(text: &str) -> String {
    let lines: Vec<String> =
        text.lines().map(|line| format!("  {}", printable(line, usize::MAX))).collect();
    lines.join("\n")
}
