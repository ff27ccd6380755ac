//! What a connection string says about TLS, and the rustls configuration that does it.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};
use tokio_postgres::Config;
use tokio_postgres_rustls::MakeRustlsConnect;

use super::error::DsnError;
use super::settings::Settings;
use super::verifier::{Check, Roots, Verifier};

/// libpq's `sslmode`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum SslMode {
    Disable,
    Allow,
    Prefer,
    Require,
    VerifyCa,
    VerifyFull,
}

impl fmt::Display for SslMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = MODES.iter().find(|(_, mode)| mode == self).map(|(name, _)| *name);
        f.write_str(name.unwrap_or_default())
    }
}

const MODES: &[(&str, SslMode)] = &[
    ("disable", SslMode::Disable),
    ("allow", SslMode::Allow),
    ("prefer", SslMode::Prefer),
    ("require", SslMode::Require),
    ("verify-ca", SslMode::VerifyCa),
    ("verify-full", SslMode::VerifyFull),
];

/// How to do TLS; names files, but hasn't read them.
#[derive(Clone, Debug)]
pub(super) struct TlsOptions {
    pub(super) mode: SslMode,
    trust: Trust,
    /// The client's certificate and its key.
    client: Option<(PathBuf, PathBuf)>,
    send_host_name: bool,
    only_tls13: bool,
    direct: bool,
}

#[derive(Clone, Debug, PartialEq)]
enum Trust {
    /// Any certificate.
    Anyone,
    /// A certificate that leads to one in the file.
    Chain(PathBuf),
    /// The same, for the host that was asked for.
    ChainAndName(PathBuf),
    /// The same, with the certificates the system trusts.
    SystemAndName,
}

impl TlsOptions {
    /// `default_root_cert` is what stands for a missing `sslrootcert`, if it exists.
    pub(super) fn new(
        settings: &Settings,
        default_root_cert: Option<PathBuf>,
    ) -> Result<Self, DsnError> {
        let (mode, trust) = mode_and_trust(
            settings.choice("sslmode", MODES)?,
            settings.get("sslrootcert"),
            default_root_cert,
        )?;

        let direct = settings.get("sslnegotiation") == Some("direct");
        if direct && matches!(mode, SslMode::Disable | SslMode::Allow | SslMode::Prefer) {
            return Err(DsnError::new(format!(
                "sslnegotiation=direct can't be combined with sslmode={mode}; use sslmode=require \
                 or stricter"
            )));
        }
        let client = match (settings.get("sslcert"), settings.get("sslkey")) {
            (None, None) => None,
            (Some(cert), Some(key)) => Some((PathBuf::from(cert), PathBuf::from(key))),
            _ => return Err(DsnError::new("sslcert and sslkey are only of use together")),
        };
        let only_tls13 = settings.choice(
            "ssl_min_protocol_version",
            // rustls speaks nothing older than 1.2 anyway.
            &[("TLSv1", false), ("TLSv1.1", false), ("TLSv1.2", false), ("TLSv1.3", true)],
        )?;
        Ok(Self {
            mode,
            trust,
            client,
            send_host_name: settings.number("sslsni")? != Some(0),
            only_tls13: only_tls13.unwrap_or(false),
            direct,
        })
    }

    /// Tells a configuration whether to ask the server for TLS.
    pub(super) fn apply(&self, is_local: bool, config: &mut Config) {
        config.ssl_mode(match self.mode {
            // The server refuses TLS on Unix sockets, even to those who require it.
            _ if is_local => tokio_postgres::config::SslMode::Disable,
            SslMode::Disable => tokio_postgres::config::SslMode::Disable,
            SslMode::Allow | SslMode::Prefer => tokio_postgres::config::SslMode::Prefer,
            SslMode::Require | SslMode::VerifyCa | SslMode::VerifyFull => {
                tokio_postgres::config::SslMode::Require
            }
        });
    }

    /// Reads the files and makes what tokio-postgres takes.
    pub(super) fn connector(&self) -> Result<MakeRustlsConnect, DsnError> {
        let provider = provider();
        let check = match &self.trust {
            Trust::Anyone => Check::Nothing,
            Trust::Chain(path) => Check::Chain(Roots::new(certificates(path, "sslrootcert")?)?),
            Trust::ChainAndName(path) => {
                Check::ChainAndName(Roots::new(certificates(path, "sslrootcert")?)?)
            }
            Trust::SystemAndName => Check::ChainAndName(system_roots()?),
        };
        let verifier = Verifier::new(check, provider.signature_verification_algorithms);

        let versions: &[_] = match self.only_tls13 {
            true => &[&rustls::version::TLS13],
            false => &[&rustls::version::TLS13, &rustls::version::TLS12],
        };
        let builder = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(versions)
            .map_err(|error| DsnError::with_source("TLS can't be set up", error))?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier));
        let mut config = match &self.client {
            None => builder.with_no_client_auth(),
            Some((cert, key)) => builder
                .with_client_auth_cert(certificates(cert, "sslcert")?, private_key(key)?)
                .map_err(|error| {
                    DsnError::with_source("sslcert and sslkey can't be used together", error)
                })?,
        };
        config.enable_sni = self.send_host_name;
        if self.direct {
            // Without a first exchange in PostgreSQL's protocol the server asks for its name here.
            config.alpn_protocols = vec![b"postgresql".to_vec()];
        }
        Ok(MakeRustlsConnect::new(config))
    }
}

/// The one place that picks an implementation of the cryptography.
fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// The table in the module's documentation.
fn mode_and_trust(
    mode: Option<SslMode>,
    root_cert: Option<&str>,
    default_root_cert: Option<PathBuf>,
) -> Result<(SslMode, Trust), DsnError> {
    if root_cert == Some("system") {
        return match mode {
            None | Some(SslMode::VerifyFull) => Ok((SslMode::VerifyFull, Trust::SystemAndName)),
            Some(SslMode::Disable) => Ok((SslMode::Disable, Trust::Anyone)),
            // Anyone can have a certificate from a public authority, for a name of their own.
            Some(mode) => Err(DsnError::new(format!(
                "sslrootcert=system can't be combined with sslmode={mode}, which doesn't check \
                 the host name; use sslmode=verify-full"
            ))),
        };
    }
    let mode = mode.unwrap_or(SslMode::Prefer);
    let given = root_cert.map(PathBuf::from);
    let trust = match mode {
        SslMode::Disable => Trust::Anyone,
        SslMode::Allow | SslMode::Prefer => given.map_or(Trust::Anyone, Trust::Chain),
        SslMode::Require => given.or(default_root_cert).map_or(Trust::Anyone, Trust::Chain),
        SslMode::VerifyCa => match given.or(default_root_cert) {
            Some(path) => Trust::Chain(path),
            None => {
                return Err(DsnError::new(
                    "sslmode=verify-ca needs the certificate of the authority: give its file as \
                     sslrootcert, or use sslmode=verify-full with the system's",
                ));
            }
        },
        SslMode::VerifyFull => {
            given.or(default_root_cert).map_or(Trust::SystemAndName, Trust::ChainAndName)
        }
    };
    Ok((mode, trust))
}

fn certificates(path: &Path, option: &str) -> Result<Vec<CertificateDer<'static>>, DsnError> {
    let file = path.display();
    let certificates = CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|error| {
            DsnError::with_source(format!("the file {file} ({option}) can't be read"), error)
        })?;
    match certificates.is_empty() {
        true => Err(DsnError::new(format!(
            "the file {file} ({option}) contains no certificate in PEM form"
        ))),
        false => Ok(certificates),
    }
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, DsnError> {
    PrivateKeyDer::from_pem_file(path).map_err(|error| {
        DsnError::with_source(
            format!(
                "the file {} (sslkey) can't be read; it has to be an unencrypted key in PEM form",
                path.display()
            ),
            error,
        )
    })
}

fn system_roots() -> Result<Roots, DsnError> {
    const HINT: &str = "no certificates that the system trusts were found; install them \
                        (ca-certificates), or give a file as sslrootcert";
    let mut found = rustls_native_certs::load_native_certs();
    let mut store = RootCertStore::empty();
    // Some systems carry a few that nobody can parse.
    let (usable, _) = store.add_parsable_certificates(found.certs);
    match (usable, found.errors.pop()) {
        (0, Some(error)) => Err(DsnError::with_source(HINT, error)),
        (0, None) => Err(DsnError::new(HINT)),
        _ => Ok(Roots::from(store)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_and_what_they_trust() {
        use SslMode::*;
        let file = || PathBuf::from("f");
        let home = || PathBuf::from("home");
        for (mode, given, default, expected) in [
            (None, None, None, Some((Prefer, Trust::Anyone))),
            (None, None, Some(home()), Some((Prefer, Trust::Anyone))),
            (None, Some("f"), None, Some((Prefer, Trust::Chain(file())))),
            (None, Some("system"), None, Some((VerifyFull, Trust::SystemAndName))),
            (Some(Disable), Some("f"), None, Some((Disable, Trust::Anyone))),
            (Some(Disable), Some("system"), None, Some((Disable, Trust::Anyone))),
            (Some(Allow), None, None, Some((Allow, Trust::Anyone))),
            (Some(Prefer), Some("system"), None, None),
            (Some(Require), None, None, Some((Require, Trust::Anyone))),
            (Some(Require), None, Some(home()), Some((Require, Trust::Chain(home())))),
            (Some(Require), Some("f"), Some(home()), Some((Require, Trust::Chain(file())))),
            (Some(Require), Some("system"), None, None),
            (Some(VerifyCa), None, None, None),
            (Some(VerifyCa), Some("f"), None, Some((VerifyCa, Trust::Chain(file())))),
            (Some(VerifyCa), Some("system"), None, None),
            (Some(VerifyFull), None, None, Some((VerifyFull, Trust::SystemAndName))),
            (Some(VerifyFull), None, Some(home()), Some((VerifyFull, Trust::ChainAndName(home())))),
            (Some(VerifyFull), Some("f"), None, Some((VerifyFull, Trust::ChainAndName(file())))),
        ] {
            let case = format!("{mode:?} {given:?} {default:?}");
            assert_eq!(mode_and_trust(mode, given, default).ok(), expected, "{case}");
        }
    }

    #[test]
    fn a_missing_or_empty_file_is_named() {
        let path =
            std::env::temp_dir().join(format!("sqlstreams-empty-{}.crt", std::process::id()));
        let message = || certificates(&path, "sslrootcert").err().unwrap().to_string();
        assert!(message().contains("can't be read") && message().contains("sslrootcert"));
        std::fs::write(&path, "nothing").unwrap();
        assert!(message().contains("contains no certificate"), "{}", message());
        std::fs::remove_file(&path).unwrap();
    }
}
