//! What went wrong, as one line, a hint and an exit code.

use std::error::Error as StdError;
use std::fmt;
use std::io::{self, Write};
use std::process::ExitCode;

use serde_json::{Map, Value, json};
use sqlstreams::ErrorKind;

use crate::output::OutputClosed;
use crate::terminal::{ERROR, HINT};

/// The command could not do what it was asked.
pub(crate) const EXIT_FAILED: u8 = 1;
/// The command line or the configuration makes no sense.
pub(crate) const EXIT_USAGE: u8 = 2;
/// A stream, group, schedule or dead letter that was named does not exist.
pub(crate) const EXIT_NOT_FOUND: u8 = 3;
/// The database cannot be reached or cannot be used.
pub(crate) const EXIT_DATABASE: u8 = 4;

/// Something that went wrong, ready for telling. Errors of the libraries become one when they are told.
#[derive(Debug, Clone)]
pub(crate) struct Failure {
    exit: u8,
    code: &'static str,
    message: String,
    hint: Option<String>,
    /// Facts for programs, beside the message.
    details: Map<String, Value>,
}

impl Failure {
    /// The command could not do what it was asked. `code` is stable, for scripts.
    pub(crate) fn failed(code: &'static str, message: impl Into<String>) -> Self {
        Self { exit: EXIT_FAILED, code, message: message.into(), hint: None, details: Map::new() }
    }

    /// The command line or the configuration makes no sense.
    pub(crate) fn usage(code: &'static str, message: impl Into<String>) -> Self {
        Self { exit: EXIT_USAGE, ..Self::failed(code, message) }
    }

    /// Something that was named does not exist.
    pub(crate) fn not_found(code: &'static str, message: impl Into<String>) -> Self {
        Self { exit: EXIT_NOT_FOUND, ..Self::failed(code, message) }
    }

    /// What to do next, instead of what was said about it before.
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// What else to do next.
    pub(crate) fn also_hint(mut self, more: &str) -> Self {
        self.hint = Some(match self.hint {
            Some(hint) => format!("{hint} {more}"),
            None => more.to_owned(),
        });
        self
    }

    /// Where it went wrong, before what did.
    pub(crate) fn within(mut self, place: &str) -> Self {
        self.message = format!("{place}: {}", self.message);
        self
    }

    /// A fact for programs: a member of the JSON form.
    pub(crate) fn detail(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.details.insert(name.to_owned(), value.into());
        self
    }

    /// Tells it on stderr, as text or JSON.
    pub(crate) fn report(&self, json: bool) -> ExitCode {
        // Should stderr be closed, the exit code says it all the same.
        let _ = if json { self.write_json() } else { self.write_text() };
        ExitCode::from(self.exit)
    }

    fn write_text(&self) -> io::Result<()> {
        let mut stderr = anstream::stderr().lock();
        writeln!(stderr, "{ERROR}error:{ERROR:#} {}", self.message)?;
        if let Some(hint) = &self.hint {
            writeln!(stderr, "{HINT}hint:{HINT:#} {hint}")?;
        }
        Ok(())
    }

    fn write_json(&self) -> io::Result<()> {
        let mut error = self.details.clone();
        error.insert("code".to_owned(), self.code.into());
        error.insert("message".to_owned(), self.message.clone().into());
        error.insert("hint".to_owned(), self.hint.clone().into());
        writeln!(io::stderr(), "{}", json!({ "error": error }))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl StdError for Failure {}

impl From<&anyhow::Error> for Failure {
    fn from(error: &anyhow::Error) -> Self {
        if let Some(failure) = error.downcast_ref::<Self>() {
            return failure.clone();
        }
        let told = Self::failed("failed", chain(error.as_ref()));
        for cause in error.chain() {
            if let Some(cause) = cause.downcast_ref::<sqlstreams::Error>() {
                return Self { message: told.message, ..Self::from(cause) };
            }
            if let Some(cause) = cause.downcast_ref::<sqlstreams_dev::Error>() {
                return private_postgres(cause, told.message);
            }
        }
        told
    }
}

impl From<&sqlstreams::Error> for Failure {
    fn from(error: &sqlstreams::Error) -> Self {
        Self {
            exit: exit_of(error.kind()),
            hint: error.hint().map(str::to_owned),
            ..Self::failed(error.code(), chain(error))
        }
    }
}

/// Tells what went wrong on stderr, as text or JSON.
pub(crate) fn report(error: &anyhow::Error, json: bool) -> ExitCode {
    // Whoever closed our output, `head` for one, has seen enough: that is no failure.
    if error.is::<OutputClosed>() {
        return ExitCode::SUCCESS;
    }
    Failure::from(error).report(json)
}

/// These errors say what happened in the first line, then what to do.
fn private_postgres(error: &sqlstreams_dev::Error, message: String) -> Failure {
    let exit = match error {
        sqlstreams_dev::Error::UnusableFolder { .. }
        | sqlstreams_dev::Error::UnsupportedMajor { .. } => EXIT_USAGE,
        _ => EXIT_FAILED,
    };
    let (message, hint) = match message.split_once('\n') {
        Some((first, rest)) => (first.to_owned(), Some(rest.to_owned())),
        None => (message, None),
    };
    Failure { exit, hint, ..Failure::failed("private_postgres", message) }
}

/// The message and those of its causes that add something to it.
fn chain(error: &(dyn StdError + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        next = cause.source();
        // The driver only says here what kind of error it has; the details are the next cause.
        let added = cause.to_string();
        if matches!(added.as_str(), "db error" | "error connecting to server") {
            continue;
        }
        let added = added.strip_prefix("ERROR: ").unwrap_or(&added);
        let added = added.strip_prefix("FATAL: ").unwrap_or(added);
        let first_line = added.lines().next().unwrap_or_default();
        if !text.contains(first_line) {
            text = format!("{text}: {first_line}");
        }
    }
    text
}

fn exit_of(kind: ErrorKind) -> u8 {
    match kind {
        ErrorKind::InvalidConfig
        | ErrorKind::InvalidName
        | ErrorKind::InvalidArgument
        | ErrorKind::InvalidBinding => EXIT_USAGE,
        ErrorKind::UnknownStream | ErrorKind::UnknownGroup | ErrorKind::UnknownSchedule => {
            EXIT_NOT_FOUND
        }
        ErrorKind::Connection
        | ErrorKind::ReadOnly
        | ErrorKind::UnsupportedServer
        | ErrorKind::PermissionDenied
        | ErrorKind::SchemaMissing
        | ErrorKind::SchemaMismatch => EXIT_DATABASE,
        _ => EXIT_FAILED,
    }
}
