//! A run: each peer in turn, round by round beside SQLStreams.

use std::collections::HashMap;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use serde::Serialize;

use crate::measure::{Measured, Scenario, measure};
use crate::messages::Messages;
use crate::peer::Peer;
use crate::peers::Which;
use crate::place::{Place, connect};

/// How much is measured.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Plan {
    pub(crate) payload_bytes: Vec<usize>,
    pub(crate) rounds: u32,
    /// About how long a measurement takes.
    pub(crate) seconds: f64,
    /// The most messages of one.
    pub(crate) messages: u64,
}

/// The fewest messages of a measurement.
const FEWEST: u64 = 256;
/// How many messages warm a peer up. The first time they grow until they take so long that they tell a rate.
const WARM_UP: u64 = 512;
const TELLING: f64 = 0.1;
/// So few may be slow because of a latency alone, unless it takes this long.
const FEW: u64 = 4_096;
const SLOW: f64 = 0.5;

/// The figures of a peer and those of SQLStreams beside it, in rounds.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Pair {
    pub(crate) scenario: Scenario,
    pub(crate) payload_bytes: usize,
    pub(crate) peer: Vec<Measured>,
    pub(crate) sqlstreams: Vec<Measured>,
}

/// What became of a peer.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Outcome {
    pub(crate) peer: Which,
    pub(crate) title: &'static str,
    pub(crate) settings: Vec<String>,
    pub(crate) pairs: Vec<Pair>,
    /// Why it has no figures, or not all.
    pub(crate) not_run: Option<String>,
}

/// A peer in a run, with what is known of its speed.
struct Contestant {
    peer: Box<dyn Peer>,
    /// Messages a second, by scenario and payload size.
    rates: HashMap<(Scenario, usize), f64>,
}

/// Measures one peer beside SQLStreams. What is measured before something fails is kept.
pub(crate) async fn run(
    which: Which,
    place: &Arc<Place>,
    plan: &Plan,
    next: &mut u64,
    say: &dyn Fn(&str),
) -> Outcome {
    let mut result = Outcome {
        peer: which,
        title: which.title(),
        settings: Vec::new(),
        pairs: Vec::new(),
        not_run: None,
    };
    if let Err(error) = measure_all(which, place, plan, next, &mut result, say).await {
        result.not_run = Some(format!("{error:#}"));
    }
    result
}

async fn measure_all(
    which: Which,
    place: &Arc<Place>,
    plan: &Plan,
    next: &mut u64,
    result: &mut Outcome,
    say: &dyn Fn(&str),
) -> Result<()> {
    say("starting");
    let mut peer = Contestant::new(which.open(place.clone()).await?);
    result.settings = peer.peer.settings();
    let mut ours = Contestant::new(Which::Sqlstreams.open(place.clone()).await?);
    for &bytes in &plan.payload_bytes {
        let messages = Messages::of_size(bytes);
        let first = result.pairs.len();
        let pairs = Scenario::ALL.map(|scenario| Pair {
            scenario,
            payload_bytes: bytes,
            peer: Vec::new(),
            sqlstreams: Vec::new(),
        });
        result.pairs.extend(pairs);
        for round in 0..plan.rounds {
            say(&format!("{bytes} bytes, round {} of {}", round + 1, plan.rounds));
            let figures = ours.round(place, plan, &messages, next).await.context("SQLStreams")?;
            for (scenario, measured) in figures {
                result.pairs[first + place_of(scenario)].sqlstreams.push(measured);
            }
            let figures = peer.round(place, plan, &messages, next).await?;
            for (scenario, measured) in figures {
                result.pairs[first + place_of(scenario)].peer.push(measured);
            }
        }
    }
    ours.peer.close().await?;
    peer.peer.close().await
}

fn place_of(scenario: Scenario) -> usize {
    Scenario::ALL.iter().position(|&other| other == scenario).unwrap_or_default()
}

impl Contestant {
    fn new(peer: Box<dyn Peer>) -> Self {
        Self { peer, rates: HashMap::new() }
    }

    /// All scenarios once, on a queue of their own.
    async fn round(
        &mut self,
        place: &Place,
        plan: &Plan,
        messages: &Messages,
        next: &mut u64,
    ) -> Result<Vec<(Scenario, Measured)>> {
        self.peer.fresh().await.context("could not make a queue")?;
        let done = self.scenarios(place, plan, messages, next).await;
        let rested = self.peer.rest().await.context("could not remove a queue");
        let done = done?;
        rested?;
        Ok(done)
    }

    async fn scenarios(
        &mut self,
        place: &Place,
        plan: &Plan,
        messages: &Messages,
        next: &mut u64,
    ) -> Result<Vec<(Scenario, Measured)>> {
        let mut take = |count: u64| {
            let numbers = *next..*next + count;
            *next = numbers.end;
            messages.numbered(numbers)
        };
        let first = self.rate(Scenario::Produce, messages).is_none();
        for scenario in [Scenario::Produce, Scenario::Send, Scenario::Pipeline] {
            let mut count = WARM_UP.min(plan.messages);
            loop {
                let some = take(count);
                let mut took = self.measure(scenario, &some).await?.seconds;
                if scenario != Scenario::Pipeline {
                    took += self.measure(Scenario::Consume, &some).await?.seconds;
                }
                let tells = took > SLOW || (took > TELLING && count >= FEW);
                if !first || tells || count == plan.messages {
                    break;
                }
                count = (count * 8).min(plan.messages);
            }
        }
        // Between the measurements of a round there is none: who writes pages anew pays once.
        connect(&place.cluster.url("postgres")).await?.batch_execute("CHECKPOINT").await?;

        let produced = take(self.count(plan, messages, &[Scenario::Produce, Scenario::Consume]));
        let produce = self.measure(Scenario::Produce, &produced).await?;
        let consume = self.measure(Scenario::Consume, &produced).await?;
        let sent = take(self.count(plan, messages, &[Scenario::Send]));
        let send = self.measure(Scenario::Send, &sent).await?;
        // Not a figure, but what was sent has to come, too.
        self.measure_alone(Scenario::Consume, &sent).await?;
        let piped = take(self.count(plan, messages, &[Scenario::Pipeline]));
        let pipeline = self.measure(Scenario::Pipeline, &piped).await?;
        Ok(vec![
            (Scenario::Produce, produce),
            (Scenario::Send, send),
            (Scenario::Consume, consume),
            (Scenario::Pipeline, pipeline),
        ])
    }

    /// How many messages the slowest of these scenarios gets through in the time there is.
    fn count(&self, plan: &Plan, messages: &Messages, scenarios: &[Scenario]) -> u64 {
        let rate = |&scenario: &Scenario| {
            let rate = self.rate(scenario, messages)?;
            if scenario != Scenario::Pipeline {
                return Some(rate);
            }
            // The little that warms it up may be slow because of a latency.
            let produce = self.rate(Scenario::Produce, messages)?;
            let consume = self.rate(Scenario::Consume, messages)?;
            Some(rate.max(1.0 / (1.0 / produce + 1.0 / consume)))
        };
        let rates = scenarios.iter().filter_map(rate);
        let count = (rates.fold(f64::INFINITY, f64::min) * plan.seconds) as u64;
        count.clamp(FEWEST.min(plan.messages), plan.messages)
    }

    fn rate(&self, scenario: Scenario, messages: &Messages) -> Option<f64> {
        self.rates.get(&(scenario, messages.bytes())).copied()
    }

    async fn measure(&mut self, scenario: Scenario, messages: &Messages) -> Result<Measured> {
        let measured = self.measure_alone(scenario, messages).await?;
        let rate = self.rates.entry((scenario, messages.bytes())).or_default();
        // Small ones, those of later warm-ups, tell less than it takes.
        if *rate == 0.0 || measured.seconds > TELLING || measured.messages_per_second > *rate {
            *rate = measured.messages_per_second;
        }
        Ok(measured)
    }

    async fn measure_alone(&self, scenario: Scenario, messages: &Messages) -> Result<Measured> {
        measure(self.peer.as_ref(), scenario, messages).await
    }
}
