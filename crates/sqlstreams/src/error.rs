//! The one error type of the crate.

use std::error::Error as StdError;
use std::fmt;
use std::time::Duration;

use tokio_postgres::error::SqlState;

use crate::connect::DsnError;

type Source = Box<dyn StdError + Send + Sync>;

/// What went wrong, as far as a program may want to tell cases apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A connection string, option or setting makes no sense.
    InvalidConfig,
    /// The database cannot be reached, or the connection broke.
    Connection,
    /// The connection broke during the commit of a send, and the database could not be asked in time what became of it: the
    /// messages may or may not have been stored.
    CommitUnknown,
    /// The server is read-only: a standby, or a database set to read-only.
    ReadOnly,
    /// The server is older than PostgreSQL 15 or stores text in another encoding than UTF-8.
    UnsupportedServer,
    /// The role lacks a privilege.
    PermissionDenied,
    /// The schema is not installed.
    SchemaMissing,
    /// The schema was installed by another version of SQLStreams than this one understands.
    SchemaMismatch,
    /// No stream has that name.
    UnknownStream,
    /// The stream has no consumer group of that name.
    UnknownGroup,
    /// No schedule has that name.
    UnknownSchedule,
    /// A stream of that name exists already.
    StreamExists,
    /// The stream has a consumer group of that name already.
    GroupExists,
    /// A schedule of that name exists already.
    ScheduleExists,
    /// The group's mode was changed.
    WrongMode,
    /// The current value of a key is another than expected; see [`Error::latest_id`].
    Conflict,
    /// The group has messages that are handed out or wait for another attempt.
    GroupBusy,
    /// A message cannot be imported under its own id: the stream has another one there, or has come beyond it.
    ImportConflict,
    /// A name is empty, longer than 200 bytes or holds a NUL.
    InvalidName,
    /// Some other argument is out of its range.
    InvalidArgument,
    /// A payload, key, routing key or header that the stream cannot store.
    InvalidMessage,
    /// A payload above [`MAX_PAYLOAD_BYTES`](crate::MAX_PAYLOAD_BYTES).
    TooLarge,
    /// A binding of a group that makes no sense: a malformed pattern, too many words, no conditions at all.
    InvalidBinding,
    /// The stream has had as many messages as there are ids, 2^63: it takes no more.
    IdsUsedUp,
    /// The caller's transaction is not READ COMMITTED.
    WrongIsolation,
    /// The producer or consumer was closed.
    Closed,
    /// Anything else that PostgreSQL reported.
    Database,
}

impl ErrorKind {
    /// A stable code for logs, scripts and metrics.
    pub fn code(self) -> &'static str {
        match self {
            Self::InvalidConfig => "invalid_config",
            Self::Connection => "connection",
            Self::CommitUnknown => "commit_unknown",
            Self::ReadOnly => "read_only",
            Self::UnsupportedServer => "unsupported_server",
            Self::PermissionDenied => "permission_denied",
            Self::SchemaMissing => "schema_missing",
            Self::SchemaMismatch => "schema_mismatch",
            Self::UnknownStream => "unknown_stream",
            Self::UnknownGroup => "unknown_group",
            Self::UnknownSchedule => "unknown_schedule",
            Self::StreamExists => "stream_exists",
            Self::GroupExists => "group_exists",
            Self::ScheduleExists => "schedule_exists",
            Self::WrongMode => "wrong_mode",
            Self::Conflict => "conflict",
            Self::GroupBusy => "group_busy",
            Self::ImportConflict => "import_conflict",
            Self::InvalidName => "invalid_name",
            Self::InvalidArgument => "invalid_argument",
            Self::InvalidMessage => "invalid_message",
            Self::TooLarge => "too_large",
            Self::InvalidBinding => "invalid_binding",
            Self::IdsUsedUp => "ids_used_up",
            Self::WrongIsolation => "wrong_isolation",
            Self::Closed => "closed",
            Self::Database => "database",
        }
    }
}

/// An error of this crate: what happened ([`Display`](fmt::Display)), what to do next ([`hint`](Self::hint)), a stable
/// [`code`](Self::code), and the cause as [`source`](StdError::source).
///
/// `Display` never repeats the source, so that error reporters which print the chain say everything once.
pub struct Error(Box<Inner>);

struct Inner {
    kind: ErrorKind,
    message: String,
    hint: Option<String>,
    /// For a refused batch: which of its messages was at fault.
    place: Option<usize>,
    source: Option<Source>,
}

impl Error {
    pub(crate) fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self(Box::new(Inner {
            kind,
            message: message.into(),
            hint: None,
            place: None,
            source: None,
        }))
    }

    pub(crate) fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.0.hint = Some(hint.into());
        self
    }

    pub(crate) fn with_source(mut self, source: impl Into<Source>) -> Self {
        self.0.source = Some(source.into());
        self
    }

    pub(crate) fn at_place(mut self, place: usize) -> Self {
        self.0.place = Some(place);
        self
    }

    /// A copy, as far as there can be one.
    pub(crate) fn without_source(&self) -> Self {
        let Inner { kind, message, hint, place, .. } = &*self.0;
        Self(Box::new(Inner {
            kind: *kind,
            message: message.clone(),
            hint: hint.clone(),
            place: *place,
            source: None,
        }))
    }

    /// What went wrong, for matching.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The stable code of [`kind`](Self::kind).
    pub fn code(&self) -> &'static str {
        self.0.kind.code()
    }

    /// What to do next, where that can be said.
    pub fn hint(&self) -> Option<&str> {
        self.0.hint.as_deref()
    }

    /// For a refused batch: the place of the message at fault, counted from 0.
    pub fn place(&self) -> Option<usize> {
        self.0.place
    }

    /// Of a [`Conflict`](ErrorKind::Conflict): the id of the message that is the key's current value, 0 if it has none.
    pub fn latest_id(&self) -> Option<i64> {
        let source = self.0.source.as_ref().filter(|_| self.0.kind == ErrorKind::Conflict)?;
        let db = source.downcast_ref::<tokio_postgres::Error>()?.as_db_error()?;
        db.detail()?.parse().ok()
    }

    /// What PostgreSQL said in addition, for programs.
    pub(crate) fn detail(&self) -> Option<&str> {
        let source = self.0.source.as_ref()?.downcast_ref::<tokio_postgres::Error>()?;
        source.as_db_error()?.detail()
    }

    /// Whether the same call may succeed later without any change: the connection broke, or the server was busy.
    pub fn is_retryable(&self) -> bool {
        match self.0.kind {
            ErrorKind::Connection | ErrorKind::ReadOnly => true,
            ErrorKind::Database => self.sql_state().is_some_and(|s| {
                // transaction rollback (40…), insufficient resources (53…), operator intervention (57…), lock not available
                ["40", "53", "57"].iter().any(|class| s.starts_with(class))
                    || s == SqlState::LOCK_NOT_AVAILABLE.code()
            }),
            _ => false,
        }
    }

    /// Whether the connection is of no use any more: it broke, or leads to a server that cannot write.
    pub(crate) fn is_of_connection(&self) -> bool {
        matches!(self.0.kind, ErrorKind::Connection | ErrorKind::ReadOnly)
    }

    /// The server, or the way to it, hangs.
    pub(crate) fn no_answer(doing: &str, waited: Duration) -> Self {
        Self::new(
            ErrorKind::Connection,
            format!(
                "the server did not answer within {} s when asked to {doing}",
                waited.as_secs()
            ),
        )
        .with_hint("Look whether the server, or the network to it, hangs.")
    }

    pub(crate) fn kept_transaction() -> Self {
        Self::new(
            ErrorKind::InvalidArgument,
            "the handler kept its transaction; it was rolled back",
        )
        .with_hint("Drop it, and whatever uses it, before the handler returns.")
    }

    /// Whether one message may be the reason: its payload is more than the server can store or hand out.
    pub(crate) fn may_be_a_message(&self) -> bool {
        self.kind() == ErrorKind::InvalidMessage
            // out of memory; an allocation too large, which PostgreSQL takes for an internal error
            || self.sql_state().is_some_and(|state| state == "53200" || state == "XX000")
    }

    /// Whether a row found no partition of the log: a check violation without a constraint. (The text may be in any language.)
    pub(crate) fn is_out_of_partitions(&self) -> bool {
        let source = self.0.source.as_ref();
        let driver = source.and_then(|source| source.downcast_ref::<tokio_postgres::Error>());
        driver
            .and_then(tokio_postgres::Error::as_db_error)
            .is_some_and(|db| *db.code() == SqlState::CHECK_VIOLATION && db.constraint().is_none())
    }

    /// The SQLSTATE, when the error came from PostgreSQL.
    pub fn sql_state(&self) -> Option<&str> {
        let source = self.0.source.as_ref()?.downcast_ref::<tokio_postgres::Error>()?;
        source.code().map(SqlState::code)
    }

    /// An error of the driver, translated: `doing` says what was being done, as in "create the stream".
    pub(crate) fn from_driver(error: tokio_postgres::Error, doing: &str) -> Self {
        let Some(db) = error.as_db_error() else {
            return match error.is_closed()
                || error.source().is_some_and(|s| s.is::<std::io::Error>())
            {
                true => Self::new(
                    ErrorKind::Connection,
                    format!("the connection broke while trying to {doing}"),
                ),
                false => Self::new(ErrorKind::Database, format!("could not {doing}")),
            }
            .with_source(error);
        };
        let code = db.code();
        let kind = match code.code() {
            "SQ001" => ErrorKind::UnknownStream,
            "SQ002" => ErrorKind::UnknownGroup,
            "SQ003" => ErrorKind::WrongIsolation,
            "SQ004" => ErrorKind::InvalidArgument,
            "SQ005" => ErrorKind::StreamExists,
            "SQ006" => ErrorKind::GroupExists,
            "SQ012" => ErrorKind::WrongMode,
            // 2200H: the sequence says so itself.
            "SQ013" | "2200H" => ErrorKind::IdsUsedUp,
            "SQ015" => ErrorKind::Conflict,
            "SQ014" => ErrorKind::GroupBusy,
            "SQ020" => ErrorKind::InvalidBinding,
            "SQ030" => ErrorKind::UnknownSchedule,
            "SQ031" => ErrorKind::ScheduleExists,
            "SQ040" | "SQ041" => ErrorKind::ImportConflict,
            "25006" => ErrorKind::ReadOnly,
            "42501" => ErrorKind::PermissionDenied,
            // A table or function of ours is not there.
            "3F000" | "42P01" | "42883" => ErrorKind::SchemaMissing,
            // Data that cannot be stored, by its form (22…), its size or depth (54…), or a CHECK.
            c if c.starts_with("22") || c.starts_with("54") || c == "23514" => {
                ErrorKind::InvalidMessage
            }
            // Connection trouble and shutdown, also as told by the server before it hangs up.
            c if c.starts_with("08") || c.starts_with("57P") || c == "25P03" => {
                ErrorKind::Connection
            }
            c if c.starts_with("28") || c == "3D000" => ErrorKind::Connection,
            _ => ErrorKind::Database,
        };
        let ours = code.code().starts_with("SQ");
        let message = if ours {
            db.message().to_owned()
        } else {
            format!("could not {doing}: {}", db.message())
        };
        let hint = db.hint().map(str::to_owned).or_else(|| {
            Some(
                match kind {
                    ErrorKind::ReadOnly => "Connect to the primary: a standby or read-only database takes no messages.",
                    ErrorKind::PermissionDenied => "Ask the owner of the schema for the privilege, or connect with another role.",
                    ErrorKind::SchemaMissing => "Run `sqlstreams migrate`, or check the schema name.",
                    _ => return None,
                }
                .to_owned(),
            )
        });
        let error = Self::new(kind, message).with_source(error);
        match hint {
            Some(hint) => error.with_hint(hint),
            None => error,
        }
    }

    /// No connection of the pool came free.
    pub(crate) fn no_connection(doing: &str, target: &str) -> Self {
        Self::new(ErrorKind::Connection, format!("no connection to {target} in time to {doing}"))
            .with_hint("The pool is exhausted: look at what takes so long, or give the client a larger one.")
    }

    /// No connection came about: whatever the reason, it is trouble with the connection.
    pub(crate) fn from_connect(error: tokio_postgres::Error, target: &str) -> Self {
        let Some(db) = error.as_db_error() else {
            return Self::new(ErrorKind::Connection, format!("could not connect to {target}"))
                .with_hint("Look at the address, and whether PostgreSQL runs there and accepts connections from here.")
                .with_source(error);
        };
        let code = db.code();
        let hint = if [SqlState::INVALID_PASSWORD, SqlState::INVALID_AUTHORIZATION_SPECIFICATION]
            .contains(code)
        {
            "Look at the user and the password, and at the server's pg_hba.conf."
        } else if *code == SqlState::INVALID_CATALOG_NAME {
            "Look at the name of the database, or create it."
        } else if *code == SqlState::TOO_MANY_CONNECTIONS {
            // The one thing that tells the limits apart and is not translated.
            match db.routine() {
                Some("InitializeSessionUserId") => {
                    "Close other connections of this role, or raise its limit: ALTER ROLE … CONNECTION LIMIT."
                }
                Some("CheckMyDatabase") => {
                    "Close other connections to this database, or raise its limit: ALTER DATABASE … CONNECTION LIMIT."
                }
                _ => "Close other connections, or raise the server's max_connections.",
            }
        } else if *code == SqlState::INSUFFICIENT_PRIVILEGE {
            "Ask the owner of the database for the privilege CONNECT, or connect with another role."
        } else {
            "The server refused the connection; it may accept one later."
        };
        Self::new(ErrorKind::Connection, format!("could not connect to {target}: {}", db.message()))
            .with_hint(hint)
            .with_source(error)
    }
}

impl From<DsnError> for Error {
    fn from(error: DsnError) -> Self {
        Self::new(ErrorKind::InvalidConfig, error.to_string()).with_source(error)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Error")
            .field("code", &self.code())
            .field("message", &self.0.message)
            .field("hint", &self.0.hint)
            .field("source", &self.0.source)
            .finish()
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source.as_deref().map(|s| s as &(dyn StdError + 'static))
    }
}

/// The crate's result type.
pub type Result<T, E = Error> = std::result::Result<T, E>;
