//! Things that are measured beside each other, in turns: a limit that the server itself sets, and what SQLStreams makes of it.
//!
//! A machine that slows down for a while slows both; so what counts is the ratio of two that took the same turn.

pub(crate) mod bare;
mod cost;
mod families;
mod pace;
mod table;
mod verdict;

use std::time::Duration;

use serde::Serialize;
use tokio::task::JoinSet;

pub(crate) use self::cost::{Cost, Meter};
pub(crate) use self::families::{Family, families, print_families};
pub(crate) use self::pace::Pace;
pub(crate) use self::table::{number, print_contest, print_found, print_verdict};
pub(crate) use self::verdict::{Kind, Verdict};
use super::spread::{Percentiles, Spread};
use crate::context::Context;

/// What one of them was found to do.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Line {
    pub(crate) name: String,
    /// Messages a second: the middle one of all turns, the lowest and the highest.
    pub(crate) per_second: f64,
    pub(crate) lowest: f64,
    pub(crate) highest: f64,
    /// What a message costs, over all turns.
    #[serde(flatten)]
    pub(crate) cost: Cost,
    /// How long its commits took, in milliseconds; none of one that is not timed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) commit_ms: Option<Percentiles>,
    /// Each turn's rate.
    #[serde(skip)]
    turns: Vec<f64>,
}

/// What one of them did in its turn.
#[derive(Debug, Default)]
pub(crate) struct Moved {
    pub(crate) messages: u64,
    /// How long that took, where the turn took longer: it had to begin and to end.
    pub(crate) took: Option<Duration>,
    /// How long its commits took.
    pub(crate) commits: Option<Spread>,
}

impl Moved {
    /// What all tasks did together: how many messages, and how long each commit took.
    pub(crate) async fn sum(
        mut tasks: JoinSet<anyhow::Result<(u64, Spread)>>,
    ) -> anyhow::Result<Self> {
        let (mut messages, mut commits) = (0, Spread::new()?);
        while let Some(ended) = tasks.join_next().await {
            let (more, times) = ended??;
            messages += more;
            commits.merge(&times);
        }
        Ok(Self { messages, took: None, commits: Some(commits) })
    }
}

impl From<u64> for Moved {
    fn from(messages: u64) -> Self {
        Self { messages, ..Self::default() }
    }
}

impl Line {
    /// One with the rates of its turns, in the order of the turns.
    pub(crate) fn new(name: &str, turns: Vec<f64>, cost: Cost, commits: Option<&Spread>) -> Self {
        let mut sorted = turns.clone();
        sorted.sort_by(f64::total_cmp);
        Self {
            name: name.to_owned(),
            per_second: middle(&sorted),
            lowest: sorted.first().copied().unwrap_or_default(),
            highest: sorted.last().copied().unwrap_or_default(),
            cost,
            commit_ms: commits.map(Spread::percentiles),
            turns,
        }
    }
}

/// Lets each of `names` take its turn, `rounds` times, after one that is not counted. `run` is given the number of the one whose turn
/// it is, and returns how many messages it moved, or more of it.
pub(crate) async fn contest<M: Into<Moved>>(
    context: &Context,
    meter: &Meter,
    rounds: u32,
    names: &[&str],
    mut run: impl AsyncFnMut(usize) -> anyhow::Result<M>,
) -> anyhow::Result<Vec<Line>> {
    let mut turns = vec![Vec::new(); names.len()];
    let mut costs = vec![Cost::default(); names.len()];
    let mut commits: Vec<Option<Spread>> = vec![None; names.len()];
    for round in 0..=rounds {
        for (number, name) in names.iter().enumerate() {
            context.say(&match round {
                0 => format!("warming up: {name}"),
                round => format!("round {round} of {rounds}: {name}"),
            });
            meter.settle().await?;
            let begun = meter.begin().await?;
            let moved: Moved = run(number).await?.into();
            let used = meter.end(begun, moved.messages).await?;
            if round > 0 {
                let seconds = moved.took.map_or(used.seconds, |took| took.as_secs_f64());
                turns[number].push(moved.messages as f64 / seconds);
                costs[number] += used;
                match (&mut commits[number], moved.commits) {
                    (Some(sum), Some(more)) => sum.merge(&more),
                    (sum, more) => *sum = sum.take().or(more),
                }
            }
        }
    }
    let found = names.iter().zip(turns).zip(costs.into_iter().zip(&commits));
    Ok(found
        .map(|((name, turns), (cost, commits))| Line::new(name, turns, cost, commits.as_ref()))
        .collect())
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
    what: &str,
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
    Verdict::new(what, Kind::Ratio, middle(&ratios), target)
}
