//! `sqlstreams schedule next`.

use std::time::SystemTime;

use clap::Args;
use jiff::Timestamp;
use jiff::tz::TimeZone;
use serde_json::{Value, json};
use sqlstreams::Timetable;

use crate::context::Context;
use crate::output::{print, print_json, print_table, short_time, table, time};
use crate::values;

const AFTER_HELP: &str = "\
LOCAL is what clocks in the schedule's time zone show then. With --cron no database is asked.

Examples:
  sqlstreams schedule next nightly
  sqlstreams schedule next --cron '30 2 * * *' --zone Europe/Berlin --after 2026-03-27
  sqlstreams schedule next --cron '*/10 8-18 * * mon-fri' --count 100";

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct NextArgs {
    /// The schedule
    #[arg(required_unless_present = "cron", conflicts_with = "cron")]
    name: Option<String>,
    /// A cron expression instead of a schedule
    #[arg(long, value_name = "EXPRESSION")]
    cron: Option<String>,
    /// The time zone of the expression
    #[arg(long, value_name = "ZONE", requires = "cron")]
    zone: Option<String>,
    /// How many times
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    count: u32,
    /// Those after this time instead of now
    #[arg(long, value_name = "TIME", value_parser = values::time)]
    after: Option<SystemTime>,
}

pub(crate) async fn run(args: NextArgs, context: &Context) -> anyhow::Result<()> {
    let (timetable, zone) = match (&args.name, &args.cron) {
        (Some(name), _) => {
            let info = super::open(&context.reader().await?, name).await?.info().await?;
            (info.timetable()?, info.zone)
        }
        (None, cron) => {
            let zone = args.zone.unwrap_or_else(|| "UTC".to_owned());
            (Timetable::cron(cron.as_deref().unwrap_or_default(), &zone)?, zone)
        }
    };
    let local = |at: SystemTime| {
        let zone = TimeZone::get(&zone).unwrap_or(TimeZone::UTC);
        let at = Timestamp::try_from(at).unwrap_or_default().to_zoned_datetime(zone);
        at.strftime("%Y-%m-%d %H:%M:%S %Z").to_string()
    };
    let first = timetable.next_after(args.after.unwrap_or_else(SystemTime::now));
    let times = std::iter::successors(first, |at| timetable.next_after(*at));
    let times: Vec<SystemTime> = times.take(args.count as usize).collect();
    if context.json() {
        let rows = times.iter().map(|at| json!({"time": time(*at), "local": local(*at)}));
        return print_json(&Value::from_iter(rows));
    }
    if times.is_empty() {
        return print("no more times come");
    }
    let mut rows = table(&["TIME", "LOCAL"]);
    for at in times {
        rows.add_row([short_time(at), local(at)]);
    }
    print_table(&rows)
}
