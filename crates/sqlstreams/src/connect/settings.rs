//! The options a connection string may hold, before they are given a meaning.

use std::collections::BTreeMap;
use std::str::FromStr;

use super::environment::Environment;
use super::error::DsnError;

/// Options by name, as written.
///
/// An option written with an empty value asks for the built-in default, and keeps a `PG*` variable
/// from supplying another; an option left out takes the variable. So it is in libpq.
#[derive(Default)]
pub(super) struct Settings {
    values: BTreeMap<&'static str, String>,
}

impl Settings {
    /// Takes one option as written; the last of several with the same name wins, as in libpq.
    pub(super) fn set(&mut self, name: &str, value: String) -> Result<(), DsnError> {
        let name = match name {
            // libpq's name, and what tokio-postgres made of it.
            "keepalives_retries" => "keepalives_count",
            name => name,
        };
        if let Some((known, _)) = USED.iter().find(|(known, _)| *known == name) {
            self.values.insert(known, value);
            return Ok(());
        }
        if IGNORED.contains(&name) {
            return Ok(());
        }
        if UNSUPPORTED.contains(&name) {
            return Err(DsnError::new(format!(
                "the connection option `{name}` is not supported here, and ignoring it could be \
                 unsafe; remove it"
            )));
        }
        // What isn't shaped like an option is a piece of something else, a password for instance.
        if is_option_name(name) {
            Err(DsnError::new(format!("unknown connection option `{name}`; remove or correct it")))
        } else {
            Err(DsnError::new(
                "there is something in the connection string where an option name should be; \
                 check its quoting",
            ))
        }
    }

    /// Fills what was left out from the `PG*` variables.
    pub(super) fn add_defaults(&mut self, environment: &Environment) {
        for (name, variable) in USED {
            if let (false, Some(value)) =
                (self.values.contains_key(name), environment.get(variable))
            {
                self.values.insert(name, value.to_owned());
            }
        }
    }

    /// The value of an option, unless it is left out or empty.
    pub(super) fn get(&self, name: &str) -> Option<&str> {
        debug_assert!(USED.iter().any(|(known, _)| *known == name), "{name} is not an option");
        self.values.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }

    /// The comma-separated values of an option; an element may be empty.
    pub(super) fn list(&self, name: &str) -> Vec<&str> {
        self.get(name).map(|value| value.split(',').collect()).unwrap_or_default()
    }

    pub(super) fn number(&self, name: &str) -> Result<Option<i32>, DsnError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        i32::from_str(value.trim()).map(Some).map_err(|_| {
            DsnError::new(format!("the connection option `{name}` has to be a whole number"))
        })
    }

    /// The meaning of an option that takes one of a few words.
    pub(super) fn choice<T: Copy>(
        &self,
        name: &str,
        choices: &[(&str, T)],
    ) -> Result<Option<T>, DsnError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match choices.iter().find(|(word, _)| *word == value) {
            Some((_, meaning)) => Ok(Some(*meaning)),
            None => {
                let words: Vec<&str> = choices.iter().map(|(word, _)| *word).collect();
                Err(DsnError::new(format!(
                    "the connection option `{name}` has to be one of {}",
                    words.join(", ")
                )))
            }
        }
    }
}

fn is_option_name(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= 40
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-'))
}

/// Every option with a meaning here, and the variable that supplies its default. Those without one
/// in libpq have an empty name, which no variable has.
const USED: &[(&str, &str)] = &[
    ("application_name", "PGAPPNAME"),
    ("channel_binding", "PGCHANNELBINDING"),
    ("client_encoding", ""),
    ("connect_timeout", "PGCONNECT_TIMEOUT"),
    ("dbname", "PGDATABASE"),
    ("fallback_application_name", ""),
    ("gssencmode", "PGGSSENCMODE"),
    ("host", "PGHOST"),
    ("hostaddr", "PGHOSTADDR"),
    ("keepalives", ""),
    ("keepalives_count", ""),
    ("keepalives_idle", ""),
    ("keepalives_interval", ""),
    ("load_balance_hosts", "PGLOADBALANCEHOSTS"),
    ("options", "PGOPTIONS"),
    ("passfile", "PGPASSFILE"),
    ("password", "PGPASSWORD"),
    ("port", "PGPORT"),
    ("ssl_min_protocol_version", "PGSSLMINPROTOCOLVERSION"),
    ("sslcert", "PGSSLCERT"),
    ("sslkey", "PGSSLKEY"),
    ("sslmode", "PGSSLMODE"),
    ("sslnegotiation", "PGSSLNEGOTIATION"),
    ("sslrootcert", "PGSSLROOTCERT"),
    ("sslsni", "PGSSLSNI"),
    ("target_session_attrs", "PGTARGETSESSIONATTRS"),
    ("tcp_user_timeout", ""),
    ("user", "PGUSER"),
];

/// Options of libpq that make no difference here: they tune Kerberos, or compression that no
/// current server offers.
const IGNORED: &[&str] = &["gssdelegation", "gsslib", "krbsrvname", "sslcompression"];

/// Options of libpq that promise something this module doesn't keep.
const UNSUPPORTED: &[&str] = &[
    "max_protocol_version",
    "min_protocol_version",
    "oauth_client_id",
    "oauth_client_secret",
    "oauth_issuer",
    "oauth_scope",
    "replication",
    "require_auth",
    "requirepeer",
    "requiressl",
    "scram_client_key",
    "scram_server_key",
    "service",
    "servicefile",
    "ssl_max_protocol_version",
    "sslcertmode",
    "sslcrl",
    "sslcrldir",
    "sslkeylogfile",
    "sslpassword",
];
