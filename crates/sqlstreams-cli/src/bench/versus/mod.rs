//! Things that are measured beside each other, in turns: a limit that the server itself sets, and what SQLStreams makes of it.
//!
//! A machine that slows down for a while slows both; so what counts is the ratio of two that took the same turn.

pub(crate) mod bare;
mod cost;
mod table;

use std::time::Duration;

use serde::Serialize;

use self::cost::Cost;
pub(crate) use self::cost::Meter;
pub(crate) use self::table::{print_contest, print_verdict};
use crate::context::Context;

/// What one of them was found to do.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Line {
    pub(crate) name: &'static str,
    /// Messages a second: the middle one of all turns, the lowest and the highest.
    pub(crate) per_second: f64,
    pub(crate) lowest: f64,
    pub(crate) highest: f64,
    /// What a message costs, over all turns.
    #[serde(flatten)]
    pub(crate) cost: Cost,
    /// Each turn's rate.
    #[serde(skip)]
    turns: Vec<f64>,
}

/// What is asked of one of them.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Verdict {
    pub(crate) what: &'static str,
    pub(crate) ratio: f64,
    pub(crate) target: f64,
    pub(crate) met: bool,
}

/// Lets each of `names` take its turn, `rounds` times, after one that is not counted. `run` is given the number of the one whose turn
/// it is, and returns how many messages it moved.
pub(crate) async fn contest(
    context: &Context,
    meter: &Meter,
    rounds: u32,
    names: &[&'static str],
    mut run: impl AsyncFnMut(usize) -> anyhow::Result<u64>,
) -> anyhow::Result<Vec<Line>> {
    let mut turns = vec![Vec::new(); names.len()];
    let mut costs = vec![Cost::default(); names.len()];
    for round in 0..=rounds {
        for (number, name) in names.iter().enumerate() {
            context.say(&match round {
                0 => format!("warming up: {name}"),
                round => format!("round {round} of {rounds}: {name}"),
            });
            meter.settle().await?;
            let begun = meter.begin().await?;
            let messages = run(number).await?;
            let used = meter.end(begun, messages).await?;
            if round > 0 {
                turns[number].push(messages as f64 / used.seconds);
                costs[number] += used;
            }
        }
    }
    Ok(names.iter().zip(turns.into_iter().zip(costs)).map(line).collect())
}

fn line((name, (turns, cost)): (&&'static str, (Vec<f64>, Cost))) -> Line {
    let mut sorted = turns.clone();
    sorted.sort_by(f64::total_cmp);
    Line {
        name,
        per_second: middle(&sorted),
        lowest: sorted.first().copied().unwrap_or_default(),
        highest: sorted.last().copied().unwrap_or_default(),
        cost,
        turns,
    }
}

fn middle(sorted: &[f64]) -> f64 {
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[n / 2],
        n => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
    }
}

/// How one did beside the best of `limits`: the middle one of the ratios of each round.
pub(crate) fn verdict(
    what: &'static str,
    lines: &[Line],
    one: usize,
    limits: &[usize],
    target: f64,
) -> Verdict {
    let best = limits
        .iter()
        .max_by(|a, b| lines[**a].per_second.total_cmp(&lines[**b].per_second))
        .map_or(one, |best| *best);
    let ratios = lines[one].turns.iter().zip(&lines[best].turns);
    let mut ratios: Vec<f64> = ratios.map(|(one, limit)| one / limit.max(1e-9)).collect();
    ratios.sort_by(f64::total_cmp);
    let ratio = middle(&ratios);
    Verdict { what, ratio, target, met: ratio >= target }
}

/// How long each turn of a member lasts that goes by time.
pub(crate) fn turn(quick: bool) -> Duration {
    Duration::from_secs(if quick { 1 } else { 4 })
}

/// How many turns count.
pub(crate) fn rounds(quick: bool) -> u32 {
    if quick { 3 } else { 5 }
}
