//! What is wrong with an installation, and repairing it.

use std::fmt;
use std::time::Duration;

use serde_json::Value;
use tokio_postgres::Row;

use crate::backoff::Backoff;
use crate::client::Client;
use crate::error::{Error, ErrorKind, Result};
use crate::migrate;

/// How often a repair is tried whose locks others have.
const TRIES: u32 = 5;
/// Of the installation: what is repaired by making all functions and views anew.
const REMADE: [&str; 3] = ["functions_missing", "functions_changed", "views_missing"];
const PAUSE: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(2));

/// Looks at an installation, says what is wrong, and repairs what it safely can. From [`Client::doctor`] or
/// [`ClientBuilder::doctor`](crate::ClientBuilder::doctor).
///
/// Meant for after a restore; it may look at any time.
///
/// ```no_run
/// # async fn f() -> sqlstreams::Result<()> {
/// let doctor = sqlstreams::Client::builder("postgres://app@localhost/shop").doctor().await?;
/// for finding in doctor.look().await? {
///     println!("{} {}: {}", finding.severity, finding.code, finding.message);
///     if finding.fixable {
///         doctor.repair(&finding).await?;
///     }
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct Doctor {
    client: Client,
}

/// Something that is not as it should be.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Finding {
    /// What it is, for programs: stable. `docs/backup.md` lists them.
    pub code: String,
    /// How bad it is.
    pub severity: Severity,
    /// The stream that it is about; `None`: all of the installation.
    pub stream: Option<String>,
    /// The group that it is about, where it is about one.
    pub group: Option<String>,
    /// What it is, for people.
    pub message: String,
    /// What to do about it.
    pub hint: String,
    /// Whether [`Doctor::repair`] does something about it.
    pub fixable: bool,
    /// Numbers and names, for programs.
    pub detail: Value,
}

/// How bad something is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Severity {
    /// Nothing has to be done.
    Info,
    /// It gets worse, or somebody has to know.
    Warning,
    /// Messages are refused, lost or taken for others unless something is done.
    Error,
}

impl Severity {
    /// `info`, `warning` or `error`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Info => "info",
            Self::Warning => "warning",
            Self::Error => "error",
        }
    }
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Client {
    /// For looking at this installation.
    pub fn doctor(&self) -> Doctor {
        Doctor { client: self.clone() }
    }
}

impl Doctor {
    /// Everything that is found, of all streams. Changes nothing and waits for nobody: some look-ups per stream, group and partition,
    /// whatever the tables hold.
    ///
    /// Needs to read all tables of the schema; its owner may. A schema that is missing or not this crate's is a finding, and then the only one;
    /// so are functions that somebody has dropped. What cannot be looked at of one stream is a finding, too, and the others are looked at.
    ///
    /// # Errors
    /// The database's.
    pub async fn look(&self) -> Result<Vec<Finding>> {
        self.look_at(None).await
    }

    /// The same of one stream. What is of no stream is left out.
    ///
    /// # Errors
    /// [`UnknownStream`](ErrorKind::UnknownStream), or the database's.
    pub async fn look_at(&self, stream: Option<&str>) -> Result<Vec<Finding>> {
        let inner = &self.client.inner;
        {
            let connection = self.client.connection("look at the schema").await?;
            if let Err(error) = migrate::check(&connection, &inner.schema).await {
                let code = match error.kind() {
                    ErrorKind::SchemaMissing => "schema_missing",
                    ErrorKind::SchemaMismatch => "schema_version",
                    _ => return Err(error),
                };
                return Ok(vec![Finding {
                    code: code.to_owned(),
                    severity: Severity::Error,
                    stream: None,
                    group: None,
                    message: error.to_string(),
                    hint: error.hint().unwrap_or_default().to_owned(),
                    fixable: !migrate::is_newer(&connection, &inner.schema).await?,
                    detail: Value::Null,
                }]);
            }
        }
        let doctor = &inner.queries.doctor;
        let found = self.client.query(doctor, &[&stream], "look at the installation").await;
        match found {
            Ok(rows) => Ok(rows.iter().map(Finding::from_row).collect()),
            // Not even the doctor's own functions are all there.
            Err(error) if error.sql_state() == Some("42883") => Ok(vec![Finding {
                code: "functions_missing".to_owned(),
                severity: Severity::Error,
                stream: None,
                group: None,
                message: format!("functions of the installation are missing: {error}"),
                hint: "--fix makes all functions anew. More may be found then.".to_owned(),
                fixable: true,
                detail: Value::Null,
            }]),
            Err(error) => Err(error),
        }
    }

    /// Repairs what was found, in a transaction of its own, and says what that did, for programs. It looks again first: what is well
    /// meanwhile is left alone. Each repair leaves a row in the table `audit`.
    ///
    /// Only the owner of the schema's tables may. Where a sequence is moved, producers wait for a moment.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) for what is not [fixable](Finding::fixable), or the database's; after which nothing is
    /// changed. Transactions that write to the stream and stay open make it fail after about 20 s.
    pub async fn repair(&self, finding: &Finding) -> Result<Value> {
        if !finding.fixable {
            let text = format!("{} cannot be repaired by itself", finding.code);
            return Err(Error::new(ErrorKind::InvalidArgument, text).with_hint(&finding.hint));
        }
        if finding.stream.is_none() && REMADE.contains(&&*finding.code) {
            let mut connection = self.client.connection("make the functions anew").await?;
            let schema = &self.client.inner.schema;
            migrate::remake_functions(&mut connection, schema, &finding.code).await?;
            return Ok(finding.detail.clone());
        }
        if finding.code.starts_with("schema_") {
            let report = self.client.migrate().await?;
            return Ok(serde_json::json!({"from": report.from, "to": report.to}));
        }
        let repair = &self.client.inner.queries.doctor_repair;
        let mut pauses = Backoff::new(PAUSE);
        let mut tries = 1;
        loop {
            let params: [&(dyn tokio_postgres::types::ToSql + Sync); 2] =
                [&finding.code, &finding.stream];
            let row = self.client.query_one(repair, &params, "repair the installation").await;
            match row {
                Ok(row) => {
                    let done = row.get::<_, Option<String>>(0);
                    let done = done.and_then(|done| serde_json::from_str(&done).ok());
                    return Ok(done.unwrap_or_default());
                }
                Err(error) if error.sql_state() == Some("55P03") && tries < TRIES => {
                    tries += 1;
                    tokio::time::sleep(pauses.pause()).await;
                }
                Err(error) => return Err(error),
            }
        }
    }
}

impl Finding {
    fn from_row(row: &Row) -> Self {
        let severity = match row.get(1) {
            "error" => Severity::Error,
            "warning" => Severity::Warning,
            _ => Severity::Info,
        };
        let detail = row.get::<_, Option<&str>>(7).and_then(|text| serde_json::from_str(text).ok());
        Self {
            code: row.get(0),
            severity,
            stream: row.get(2),
            group: row.get(3),
            message: row.get(4),
            hint: row.get(5),
            fixable: row.get(6),
            detail: detail.unwrap_or_default(),
        }
    }
}
