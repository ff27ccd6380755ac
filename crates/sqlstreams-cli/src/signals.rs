//! Ctrl-C and SIGTERM.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use sqlstreams::CancellationToken;
use tokio::signal::unix::{SignalKind, signal};

/// How long the second signal leaves for handing messages back.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// What signals ask for.
#[derive(Debug, Clone)]
pub(crate) struct Signals {
    /// Finish what runs and stop: the first signal.
    pub(crate) stop: CancellationToken,
    /// Drop what runs and stop: the second signal, which ends the process soon after in any case.
    pub(crate) abort: CancellationToken,
    caught: Arc<AtomicU8>,
}

impl Signals {
    /// From here on the first signal does not end the process by itself; the second does.
    pub(crate) fn catch() -> io::Result<Self> {
        Self::catch_and_leave(Duration::ZERO)
    }

    /// The same, with a moment after the second signal for ending handlers and handing their messages back.
    pub(crate) fn catch_for_handlers() -> io::Result<Self> {
        Self::catch_and_leave(LAST_WORDS)
    }

    fn catch_and_leave(last_words: Duration) -> io::Result<Self> {
        let signals = Self {
            stop: CancellationToken::new(),
            abort: CancellationToken::new(),
            caught: Arc::new(AtomicU8::new(0)),
        };
        let (mut interrupt, mut terminate) =
            (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
        let told = signals.clone();
        tokio::spawn(async move {
            let mut next = async || {
                tokio::select! {
                    _ = interrupt.recv() => 2,
                    _ = terminate.recv() => 15,
                }
            };
            let first = next().await;
            told.caught.store(first, Ordering::Relaxed);
            told.stop.cancel();
            next().await;
            told.abort.cancel();
            tokio::select! {
                _ = next() => {}
                () = tokio::time::sleep(last_words) => {}
            }
            std::process::exit(128 + i32::from(first));
        });
        Ok(signals)
    }

    /// The exit code that tells of the signal caught, if one was: 130 for Ctrl-C, 143 for SIGTERM.
    pub(crate) fn exit_code(&self) -> Option<u8> {
        match self.caught.load(Ordering::Relaxed) {
            0 => None,
            signal => Some(128 + signal),
        }
    }
}
