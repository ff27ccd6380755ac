//! How long a contest goes on.

use std::time::Duration;

use clap::Args;

use crate::values;

/// The options that say so.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct Pace {
    /// Measure briefly
    #[arg(long)]
    pub(crate) quick: bool,
    /// How often each takes its turn, after one to warm up [default: 5; with --quick 3]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000))]
    rounds: Option<u32>,
    /// How long a turn is, where it goes by time [default: 4s; with --quick 1s]
    #[arg(long, value_name = "DURATION", value_parser = values::duration)]
    turn: Option<Duration>,
}

impl Pace {
    /// How many turns count.
    pub(crate) fn rounds(&self) -> u32 {
        self.rounds.unwrap_or(if self.quick { 3 } else { 5 })
    }

    /// How long each turn of a member lasts that goes by time.
    pub(crate) fn turn(&self) -> Duration {
        self.turn.unwrap_or(Duration::from_secs(if self.quick { 1 } else { 4 }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_goes_before_quick() {
        let pace = Pace { quick: true, rounds: None, turn: None };
        assert_eq!((pace.rounds(), pace.turn()), (3, Duration::from_secs(1)));
        let turn = Some(Duration::from_millis(300));
        let pace = Pace { quick: true, rounds: Some(2), turn };
        assert_eq!((pace.rounds(), pace.turn()), (2, Duration::from_millis(300)));
        let pace = Pace { quick: false, rounds: None, turn: None };
        assert_eq!((pace.rounds(), pace.turn()), (5, Duration::from_secs(4)));
    }
}
