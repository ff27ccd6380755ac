//! What can go wrong, each case saying what happened and what to do next.

use std::io;
use std::path::PathBuf;

/// The result of everything in this crate that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a private cluster could not be found, obtained, started or stopped.
///
/// The text of each case is written for the person at the terminal: what
/// happened, then what to do. An underlying I/O error is the
/// [`source`](std::error::Error::source) and isn't repeated in the text.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A folder that was asked for by name holds no usable server programs.
    #[error(
        "{} can't be used for PostgreSQL programs ({origin}): {why}\n\
         Name a folder that holds `initdb` and `postgres` of PostgreSQL 15 to 18.",
        folder.display()
    )]
    UnusableFolder {
        /// The folder that was asked for.
        folder: PathBuf,
        /// Who asked for it: an option or an environment variable.
        origin: &'static str,
        /// What it lacks.
        why: String,
    },

    /// No server programs were found and none could be obtained.
    #[error(
        "no server programs of PostgreSQL {wanted} here. Looked at:\n{}\n{fix}",
        bullets(looked)
    )]
    NoPrograms {
        /// The version or versions that would have done.
        wanted: String,
        /// Each place that was looked at and what was there.
        looked: Vec<String>,
        /// The command that mends it.
        fix: String,
    },

    /// A major version outside of 15 to 18 was asked for.
    #[error("PostgreSQL {major} isn't supported: ask for one of 15, 16, 17 or 18.")]
    UnsupportedMajor {
        /// The version asked for.
        major: u32,
    },

    /// Obtaining server programs failed.
    #[error("PostgreSQL {major} could not be downloaded: {why}\n{fix}")]
    Obtain {
        /// The major version asked for.
        major: u32,
        /// What went wrong.
        why: String,
        /// What mends it.
        fix: String,
    },

    /// The account the server must run under can't get at a folder.
    #[error(
        "the account `{account}` can't enter {}: PostgreSQL refuses to run as root and would run as that account.\n\
         Choose a folder whose parents all allow others to enter (chmod o+x), such as one below /var/lib or /tmp.",
        folder.display()
    )]
    NotEnterable {
        /// The folder in question.
        folder: PathBuf,
        /// The account's name.
        account: String,
    },

    /// This process is root and there's no account to run the server under.
    #[error(
        "PostgreSQL refuses to run as root, and /etc/passwd has neither `postgres` nor `nobody`.\n\
         Run this as a plain user, or add an account: useradd --system postgres"
    )]
    NoAccount,

    /// `initdb` failed.
    #[error("initdb could not make a cluster in {}. It said:\n{log}", data_dir.display())]
    Initdb {
        /// The data folder it was to make.
        data_dir: PathBuf,
        /// The last lines it wrote.
        log: String,
    },

    /// The server ended before it was ready.
    #[error(
        "PostgreSQL {version} ended while starting in {}. Its log says:\n{log}",
        data_dir.display()
    )]
    Start {
        /// The server's version.
        version: String,
        /// The server's data folder.
        data_dir: PathBuf,
        /// The last lines of its log.
        log: String,
    },

    /// The server wasn't ready in time and was stopped.
    #[error(
        "PostgreSQL {version} in {} wasn't ready after {seconds} s and was stopped. Its log says:\n{log}\n\
         If it was recovering after a crash, allow a longer start time.",
        data_dir.display()
    )]
    StartTimeout {
        /// The server's version.
        version: String,
        /// The server's data folder.
        data_dir: PathBuf,
        /// How long it was given, in seconds.
        seconds: u64,
        /// The last lines of its log.
        log: String,
    },

    /// Another program listens at the port this cluster must keep.
    #[error(
        "port {port} is in use by another program, so the server in {} could not come back at its old address.\n\
         End that program, or start a new cluster.",
        data_dir.display()
    )]
    PortTaken {
        /// The port.
        port: u16,
        /// The server's data folder.
        data_dir: PathBuf,
    },

    /// The cluster is running already.
    #[error("the cluster in {} is running already; stop it first.", data_dir.display())]
    AlreadyRunning {
        /// The server's data folder.
        data_dir: PathBuf,
    },

    /// A server started by another process isn't ready yet.
    #[error(
        "PostgreSQL (process {pid}) was started before and still isn't ready after {seconds} s.\n\
         See its log, {}, and wait, or stop it first.",
        log.display()
    )]
    NotReady {
        /// The server's process id.
        pid: u32,
        /// How long was waited, in seconds.
        seconds: u64,
        /// The server's log file.
        log: PathBuf,
    },

    /// The server did not end in time.
    #[error(
        "PostgreSQL (process {pid}) did not end within {seconds} s of being told to.\n\
         See its log, {}, and end it with: kill -QUIT {pid}",
        log.display()
    )]
    StopTimeout {
        /// The server's process id.
        pid: u32,
        /// How long it was given, in seconds.
        seconds: u64,
        /// The server's log file.
        log: PathBuf,
    },

    /// The kept data was written by another major version than the programs at hand.
    #[error(
        "the data in {} belongs to PostgreSQL {wanted}, and there are no programs of that version here: {why}\n\
         Install PostgreSQL {wanted}, or move that folder away to begin afresh.",
        data_dir.display()
    )]
    MajorMismatch {
        /// The data folder.
        data_dir: PathBuf,
        /// The major version that wrote it.
        wanted: u32,
        /// What was found instead.
        why: String,
    },

    /// A file that keeps the cluster's address or version can't be understood.
    #[error(
        "{} is damaged: {why}\nMove the folder {} away to begin afresh.",
        file.display(),
        file.parent().unwrap_or(file).display()
    )]
    Damaged {
        /// The file.
        file: PathBuf,
        /// What's wrong with it.
        why: String,
    },

    /// Neither an option nor the environment says where to keep files.
    #[error("there's no home folder to keep files in: set {variable} or HOME.")]
    NoHome {
        /// The variable that would settle it.
        variable: &'static str,
    },

    /// A server setting has a name PostgreSQL can't have or a value it can't hold.
    #[error("`{name}` can't be a PostgreSQL setting: {why}.")]
    BadSetting {
        /// The setting's name as given.
        name: String,
        /// What's wrong with it.
        why: &'static str,
    },

    /// A system call failed.
    #[error("could not {doing}")]
    Io {
        /// What was being done.
        doing: String,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
}

/// Turns a bare I/O error into one that says what was being done.
pub(crate) trait Context<T> {
    /// `doing` completes the sentence "could not …".
    fn doing(self, doing: impl FnOnce() -> String) -> Result<T>;
}

impl<T> Context<T> for io::Result<T> {
    fn doing(self, doing: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|source| Error::Io { doing: doing(), source })
    }
}

fn bullets(lines: &[String]) -> String {
    let mut text = String::new();
    for line in lines {
        text.push_str("  - ");
        text.push_str(line);
        text.push('\n');
    }
    text.truncate(text.trim_end().len());
    text
}
