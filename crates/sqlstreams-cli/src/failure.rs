//! What went wrong, as one line, a hint and an exit code.

use std::error::Error as StdError;
use std::fmt;
use std::io::{self, Write};
use std::process::ExitCode;

use serde_json::json;
use sqlstreams::ErrorKind;

use crate::context::Context;
use crate::terminal::{ERROR, HINT};

/// The command could not do what it was asked.
pub(crate) const EXIT_FAILED: u8 = 1;
/// The command line or the configuration makes no sense.
pub(crate) const EXIT_USAGE: u8 = 2;
/// A stream, group or dead letter that was named does not exist.
pub(crate) const EXIT_NOT_FOUND: u8 = 3;
/// The database cannot be reached or cannot be used.
pub(crate) const EXIT_DATABASE: u8 = 4;

/// An error of the command itself; errors of the library come as they are.
#[derive(Debug)]
pub(crate) struct Failure {
    exit: u8,
    code: &'static str,
    message: String,
    hint: Option<String>,
}

impl Failure {
    /// The command could not do what it was asked. `code` is stable, for scripts.
    pub(crate) fn failed(code: &'static str, message: impl Into<String>) -> Self {
        Self { exit: EXIT_FAILED, code, message: message.into(), hint: None }
    }

    /// The command line or the configuration makes no sense.
    pub(crate) fn usage(code: &'static str, message: impl Into<String>) -> Self {
        Self { exit: EXIT_USAGE, ..Self::failed(code, message) }
    }

    /// Something that was named does not exist.
    pub(crate) fn not_found(code: &'static str, message: impl Into<String>) -> Self {
        Self { exit: EXIT_NOT_FOUND, ..Self::failed(code, message) }
    }

    /// What to do next.
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl StdError for Failure {}

/// Tells what went wrong on stderr, as text or JSON, and which exit code it makes.
pub(crate) fn report(error: &anyhow::Error, context: &Context) -> ExitCode {
    let told = Told::new(error);
    // Should stderr be closed, the exit code says it all the same.
    let _ = if context.json() { told.write_json() } else { told.write_text() };
    ExitCode::from(told.exit)
}

/// An error taken apart for telling.
struct Told {
    exit: u8,
    code: &'static str,
    message: String,
    hint: Option<String>,
}

impl Told {
    fn new(error: &anyhow::Error) -> Self {
        let mut told =
            Self { exit: EXIT_FAILED, code: "failed", message: chain(error), hint: None };
        for cause in error.chain() {
            if let Some(failure) = cause.downcast_ref::<Failure>() {
                (told.exit, told.code, told.hint) =
                    (failure.exit, failure.code, failure.hint.clone());
                break;
            }
            if let Some(error) = cause.downcast_ref::<sqlstreams::Error>() {
                (told.exit, told.code) = (exit_of(error.kind()), error.code());
                told.hint = error.hint().map(str::to_owned);
                break;
            }
            if cause.is::<sqlstreams_dev::Error>() {
                told.code = "private_postgres";
                // These say what to do in the lines after the first.
                if let Some((first, rest)) = told.message.split_once('\n') {
                    told.hint = Some(rest.to_owned());
                    told.message = first.to_owned();
                }
                break;
            }
        }
        told
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
        let error = json!({"code": self.code, "message": self.message, "hint": self.hint});
        writeln!(io::stderr(), "{}", json!({ "error": error }))
    }
}

/// The message and those of its causes that add something to it.
fn chain(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1) {
        let cause = cause.to_string();
        let cause = cause.strip_prefix("db error: ").unwrap_or(&cause);
        // A cause that only repeats what was said already adds nothing.
        if !text.contains(cause.strip_prefix("ERROR: ").unwrap_or(cause)) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

fn exit_of(kind: ErrorKind) -> u8 {
    match kind {
        ErrorKind::InvalidConfig | ErrorKind::InvalidName | ErrorKind::InvalidArgument => {
            EXIT_USAGE
        }
        ErrorKind::UnknownStream | ErrorKind::UnknownGroup => EXIT_NOT_FOUND,
        ErrorKind::Connection
        | ErrorKind::ReadOnly
        | ErrorKind::UnsupportedServer
        | ErrorKind::PermissionDenied
        | ErrorKind::SchemaMissing
        | ErrorKind::SchemaMismatch => EXIT_DATABASE,
        _ => EXIT_FAILED,
    }
}
