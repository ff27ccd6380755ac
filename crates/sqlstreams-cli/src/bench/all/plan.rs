//! What `bench all` runs: each member by the command line that runs it by itself.

use anyhow::Context as _;
use clap::{Args, Command, ValueEnum};

/// They run in this order. The last makes very many streams, which nobody is to find behind it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Member {
    Produce,
    Consume,
    Pipeline,
    Latency,
    Fanout,
    Ordered,
    Failures,
    Horizon,
    Growth,
    Idle,
}

impl Member {
    pub(super) fn name(self) -> String {
        format!("{self:?}").to_lowercase()
    }

    /// Its name and options.
    pub(super) fn line(self, quick: bool) -> String {
        let options = match self {
            _ if !quick => "",
            Self::Produce => " --quick --rounds 2 --turn 500ms",
            Self::Consume => " --quick --rounds 2 --messages 150000",
            Self::Pipeline => " --quick --rounds 2 --turn 700ms",
            Self::Latency => " --quick --for 3s",
            Self::Fanout => " --quick --rounds 2 --turn 500ms --messages 8000",
            Self::Ordered => " --quick",
            Self::Failures => " --quick",
            Self::Horizon => " --quick --for 3s",
            Self::Growth => " --messages 300000 --small 100000",
            Self::Idle => " --quick --streams 15 --settle 30s",
        };
        self.name() + options
    }

    /// The options as the member's own command reads them.
    pub(super) fn args<A: Args>(self, quick: bool) -> anyhow::Result<A> {
        let command = A::augment_args(Command::new("bench").color(clap::ColorChoice::Never));
        let line = self.line(quick);
        let matches = command.try_get_matches_from(line.split_whitespace());
        let matches = matches.with_context(|| format!("`bench {line}` makes no sense"))?;
        Ok(A::from_arg_matches(&matches)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::BenchCommand;

    #[test]
    fn every_command_line_is_one_of_bench() {
        #[derive(Debug, clap::Parser)]
        struct Bench {
            #[command(subcommand)]
            command: BenchCommand,
        }
        use clap::Parser as _;
        for member in Member::value_variants() {
            for quick in [false, true] {
                let line = member.line(quick);
                let words = ["bench"].into_iter().chain(line.split_whitespace());
                let bench = Bench::try_parse_from(words);
                let bench = bench.unwrap_or_else(|error| panic!("{line}: {error}"));
                let told = format!("{:?}", bench.command);
                assert!(told.starts_with(&format!("{member:?}(")), "{line}: {told}");
            }
        }
    }
}
