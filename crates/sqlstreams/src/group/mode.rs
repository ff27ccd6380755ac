//! How a group hands out its messages.

use crate::error::{Error, ErrorKind, Result};
use crate::name::shorten;

/// How a group hands out its messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Mode {
    /// As many at once as there are handlers. The default.
    #[default]
    Parallel,
    /// Messages of one key one at a time, in id order, whatever fails or dies; other keys never wait for that. While one is to be
    /// tried again, those of its key behind it wait. Messages without a key are parallel.
    Ordered,
    /// As many at once as there are handlers, but where very many of one key wait, those of other keys do not wait behind them: the
    /// key is the tenant. Messages without a key are spread as if each were another's.
    Fair,
}

impl Mode {
    /// Its name in the database and on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Parallel => "parallel",
            Self::Ordered => "ordered",
            Self::Fair => "fair",
        }
    }
}

impl std::fmt::Display for Mode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

impl std::str::FromStr for Mode {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let modes = [Self::Parallel, Self::Ordered, Self::Fair];
        modes.into_iter().find(|mode| mode.as_str() == name).ok_or_else(|| {
            let text = format!("unknown mode {}", shorten(name));
            Error::new(ErrorKind::InvalidArgument, text)
                .with_hint("Choose parallel, ordered or fair.")
        })
    }
}
