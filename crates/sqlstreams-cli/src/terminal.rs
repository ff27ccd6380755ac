//! What goes to the terminal besides results: logs, and lines that say what is happening.

use std::io::{self, IsTerminal};

use anstyle::{AnsiColor, Style};
use tracing_subscriber::EnvFilter;

pub(crate) const DIM: Style = Style::new().dimmed();
pub(crate) const ERROR: Style = AnsiColor::Red.on_default().bold();
pub(crate) const HINT: Style = AnsiColor::Cyan.on_default().bold();

/// Whether stderr is a terminal that shows more than lines: where progress bars go.
pub(crate) fn stderr_is_live() -> bool {
    io::stderr().is_terminal() && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

/// Whether stderr takes colours: a terminal, and nobody asked for none (`NO_COLOR`).
pub(crate) fn stderr_is_coloured() -> bool {
    anstream::AutoStream::choice(&io::stderr()) != anstream::ColorChoice::Never
}

/// Logs go to stderr: warnings by default, more with `-v`, and whatever `RUST_LOG` says before that.
pub(crate) fn init_tracing(verbosity: u8) {
    let default = match verbosity {
        // What the libraries beneath say of lost connections, sqlstreams says in its own words.
        0 => "error,sqlstreams=warn",
        1 => "warn,sqlstreams=info",
        2 => "info,sqlstreams=debug",
        _ => "trace",
    };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default));
    let logs = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(stderr_is_coloured())
        .with_target(verbosity > 1)
        .compact();
    match verbosity {
        0 => logs.without_time().init(),
        _ => logs.init(),
    }
}
