//! What happens to the workers, at random.

use std::time::{Duration, Instant};

use fastrand::Rng;
use sqlstreams::CancellationToken;

use super::groups::LEASE;
use super::workers::{TICK, Workers};

/// The pause between two disturbances, in milliseconds.
const PAUSE: std::ops::Range<u64> = 100..800;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Disturbance {
    Kill,
    FreezeShortly,
    FreezeBeyondLease,
    Restart,
}

/// Disturbances in a random order, each as often as the others, so that a short run has some of all.
#[derive(Debug)]
struct Deck {
    rng: Rng,
    left: Vec<Disturbance>,
}

impl Deck {
    fn draw(&mut self) -> Disturbance {
        use Disturbance::{FreezeBeyondLease, FreezeShortly, Kill, Restart};
        self.left.pop().unwrap_or_else(|| {
            let mut all = [Kill, FreezeShortly, FreezeBeyondLease, Restart];
            self.rng.shuffle(&mut all);
            let [first, rest @ ..] = all;
            self.left.extend(rest);
            first
        })
    }
}

/// Disturbs them until it is enough; afterwards all of them run.
pub(crate) async fn disturb(
    workers: &mut Workers,
    seed: u64,
    enough: &CancellationToken,
) -> anyhow::Result<()> {
    let mut deck = Deck { rng: Rng::with_seed(seed), left: Vec::new() };
    let mut next = Instant::now() + pause(&mut deck.rng);
    while !enough.is_cancelled() {
        tokio::time::sleep(TICK).await;
        workers.look_after().await?;
        if Instant::now() < next {
            continue;
        }
        next = Instant::now() + pause(&mut deck.rng);
        let running = workers.running();
        let awake = running.len();
        // Somebody has to go on with the work of the others: that it goes on is part of what is measured.
        let alone = awake == 1 && workers.count() > 1;
        let place = match awake {
            0 => deck.rng.usize(..workers.count()),
            _ => running[deck.rng.usize(..awake)],
        };
        match deck.draw() {
            Disturbance::Kill => workers.kill(place).await?,
            _ if awake == 0 || alone => {}
            Disturbance::FreezeShortly => {
                workers.freeze(place, between(&mut deck.rng, LEASE / 20, LEASE / 2));
            }
            Disturbance::FreezeBeyondLease => {
                workers.freeze(place, between(&mut deck.rng, LEASE + LEASE / 4, LEASE * 3));
            }
            Disturbance::Restart => workers.restart(place),
        }
    }
    workers.thaw_all();
    Ok(())
}

fn pause(rng: &mut Rng) -> Duration {
    Duration::from_millis(rng.u64(PAUSE))
}

fn between(rng: &mut Rng, least: Duration, most: Duration) -> Duration {
    least + (most - least).mul_f64(rng.f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_disturbance_comes_as_often_as_the_others() {
        let mut deck = Deck { rng: Rng::with_seed(1), left: Vec::new() };
        let mut drawn: Vec<_> = (0..40).map(|_| deck.draw()).collect();
        drawn.sort_unstable();
        drawn.chunk_by(|a, b| a == b).for_each(|same| assert_eq!(same.len(), 10));
        drawn.dedup();
        assert_eq!(drawn.len(), 4);
    }
}
