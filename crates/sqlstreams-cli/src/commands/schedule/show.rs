//! `sqlstreams schedule show`.

use clap::Args;
use serde_json::Value;

use crate::context::Context;
use crate::output::{print, print_json, printable, short_time, span, thousands};

const AFTER_HELP: &str = "\
Times are UTC. `schedule next` previews the next ones as the clocks of the zone show them.

Examples:
  sqlstreams schedule show nightly
  sqlstreams schedule show nightly --json | jq -r .next_fire";

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct ShowArgs {
    /// The schedule
    name: String,
}

pub(crate) async fn run(args: ShowArgs, context: &Context) -> anyhow::Result<()> {
    let info = super::open(&context.reader().await?, &args.name).await?.info().await?;
    if context.json() {
        return print_json(&super::to_json(&info));
    }
    let state = match (info.retry_at, info.failures) {
        (Some(retry), times @ 1..) => {
            format!("{} {times} times, tried again at {}", info.state, short_time(retry))
        }
        _ => info.state.to_string(),
    };
    print(format_args!("schedule {:?} of stream {:?}: {state}", info.name, info.stream))?;
    print(format_args!("times    {} ({})", printable(&super::times(&info), 200), info.zone))?;
    print(format_args!("next     {}", super::or_dash(info.next_fire)))?;
    let last = match (info.last_fire, info.last_message, info.last_at) {
        (Some(time), Some(id), Some(at)) => {
            format!("{}, message {id}, at {}", short_time(time), short_time(at))
        }
        (Some(time), None, _) => format!("{}, skipped", short_time(time)),
        _ => "-".to_owned(),
    };
    print(format_args!("last     {last}"))?;
    let produced = thousands(info.produced);
    print(format_args!("produced {produced}, missed {}", thousands(info.not_produced)))?;
    let most = match info.missed {
        sqlstreams::Missed::All => format!(", {} at most", info.catch_up),
        _ => String::new(),
    };
    print(format_args!(
        "missed   {}{most}; later than {}",
        info.missed.as_str(),
        span(info.grace)
    ))?;
    let payload = info.payload.as_deref().map_or("tombstone".to_owned(), |p| printable(p, 200));
    print(format_args!("payload  {payload}"))?;
    for (name, value) in [("key", &info.key), ("routing", &info.routing_key)] {
        if let Some(value) = value {
            print(format_args!("{name:<8} {}", printable(value, 200)))?;
        }
    }
    if !info.headers.is_empty() {
        let headers = Value::Object(info.headers.clone()).to_string();
        print(format_args!("headers  {}", printable(&headers, 200)))?;
    }
    if let Some(time) = info.expires_in {
        print(format_args!("expires  after {}", span(time)))?;
    }
    if let (Some(error), Some(at)) = (&info.last_error, info.failed_at) {
        print(format_args!("failed   {}: {}", short_time(at), printable(error, 500)))?;
    }
    Ok(())
}
