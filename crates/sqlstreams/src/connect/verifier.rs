//! Which server certificates are accepted.

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{verify_server_cert_signed_by_trust_anchor, verify_server_name};
use rustls::crypto::{
    WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature,
    verify_tls13_signature_with_raw_key,
};
use rustls::pki_types::{CertificateDer, ServerName, SubjectPublicKeyInfoDer, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{CertificateError, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};

use super::error::DsnError;

/// Checks as much of a server's certificate as `sslmode` asks for.
///
/// rustls itself knows only one mode, that of `verify-full`. In every mode the handshake has to be
/// signed with the certificate's key: otherwise it could be replayed by anyone who ever saw it,
/// and channel binding would be worthless.
#[derive(Debug)]
pub(super) struct Verifier {
    check: Check,
    algorithms: WebPkiSupportedAlgorithms,
}

#[derive(Debug)]
pub(super) enum Check {
    Nothing,
    Chain(Roots),
    ChainAndName(Roots),
}

/// The certificates a chain may end in.
#[derive(Debug)]
pub(super) struct Roots {
    store: RootCertStore,
    /// The same, whole. A server's self-signed certificate is its own root, which the search for a
    /// chain refuses, as it is no authority's; then being the very same is all there is to check.
    pinned: Vec<CertificateDer<'static>>,
}

impl Roots {
    pub(super) fn new(certificates: Vec<CertificateDer<'static>>) -> Result<Self, DsnError> {
        let mut store = RootCertStore::empty();
        for certificate in &certificates {
            store.add(certificate.clone()).map_err(|error| {
                DsnError::with_source("a certificate in the sslrootcert file can't be used", error)
            })?;
        }
        Ok(Self { store, pinned: certificates })
    }
}

impl From<RootCertStore> for Roots {
    fn from(store: RootCertStore) -> Self {
        Self { store, pinned: Vec::new() }
    }
}

impl Verifier {
    pub(super) fn new(check: Check, algorithms: WebPkiSupportedAlgorithms) -> Self {
        Self { check, algorithms }
    }

    /// Whether the handshake's signature may be checked with a key taken from a certificate that
    /// rustls can't parse.
    ///
    /// It can't parse certificates of version 1, which are what `openssl x509 -req` makes from the
    /// commands in PostgreSQL's manual. Where nothing else is asked of a certificate they will do.
    fn accepts_unparsable(&self, error: &Error) -> bool {
        matches!(self.check, Check::Nothing)
            && matches!(error, Error::InvalidCertificate(cause) if !matches!(cause, CertificateError::BadSignature))
    }
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let (roots, check_name) = match &self.check {
            Check::Nothing => return Ok(ServerCertVerified::assertion()),
            Check::Chain(roots) => (roots, false),
            Check::ChainAndName(roots) => (roots, true),
        };
        let certificate = ParsedCertificate::try_from(end_entity)?;
        if !roots.pinned.contains(end_entity) {
            verify_server_cert_signed_by_trust_anchor(
                &certificate,
                &roots.store,
                intermediates,
                now,
                self.algorithms.all,
            )?;
        }
        if check_name {
            verify_server_name(&certificate, server_name)?;
        }
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        match verify_tls12_signature(message, cert, dss, &self.algorithms) {
            Err(error) if self.accepts_unparsable(&error) => {
                verify_tls12_signature_with_key_of(message, cert, dss, &self.algorithms)
                    .ok_or(error)
            }
            result => result,
        }
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        match verify_tls13_signature(message, cert, dss, &self.algorithms) {
            Err(error) if self.accepts_unparsable(&error) => match public_key_info(cert) {
                Some(key) => verify_tls13_signature_with_raw_key(
                    message,
                    &SubjectPublicKeyInfoDer::from(key),
                    dss,
                    &self.algorithms,
                ),
                None => Err(error),
            },
            result => result,
        }
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

/// rustls has this for TLS 1.3 only.
fn verify_tls12_signature_with_key_of(
    message: &[u8],
    cert: &CertificateDer<'_>,
    dss: &DigitallySignedStruct,
    algorithms: &WebPkiSupportedAlgorithms,
) -> Option<HandshakeSignatureValid> {
    let (_, content, _) = element(public_key_info(cert)?)?;
    let (_, algorithm, key) = element(content)?;
    // A bit string starts with the number of unused bits at its end, and a key has none.
    let (BIT_STRING, [0, key @ ..], _) = element(key)? else { return None };
    algorithms
        .mapping
        .iter()
        .filter(|(scheme, _)| *scheme == dss.scheme)
        .flat_map(|(_, candidates)| candidates.iter())
        .filter(|candidate| candidate.public_key_alg_id().as_ref() == algorithm)
        .any(|candidate| candidate.verify_signature(key, message, dss.signature()).is_ok())
        .then(HandshakeSignatureValid::assertion)
}

/// The subject's public key with its algorithm, as DER, from a certificate of any version.
///
/// Certificate → tbsCertificate → version if any, serial number, algorithm, issuer, validity, subject,
/// and then the key.
fn public_key_info<'a>(cert: &'a CertificateDer<'_>) -> Option<&'a [u8]> {
    let (SEQUENCE, certificate, _) = element(cert.as_ref())? else { return None };
    let (SEQUENCE, mut rest, _) = element(certificate)? else { return None };
    if let Some((VERSION, _, after)) = element(rest) {
        rest = after;
    }
    for _ in 0..5 {
        rest = element(rest)?.2;
    }
    let (SEQUENCE, _, after) = element(rest)? else { return None };
    rest.get(..rest.len() - after.len())
}

const BIT_STRING: u8 = 0x03;
const SEQUENCE: u8 = 0x30;
const VERSION: u8 = 0xa0;

/// Splits DER into the first element's tag, its content, and what follows.
fn element(der: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (&tag, rest) = der.split_first()?;
    let (&first, rest) = rest.split_first()?;
    let (length, rest) = match first {
        0..=0x7f => (usize::from(first), rest),
        // Certificates are shorter than 64 KiB by far.
        0x81 | 0x82 => {
            let (length, rest) = rest.split_at_checked(usize::from(first - 0x80))?;
            (length.iter().fold(0, |sum, byte| sum << 8 | usize::from(*byte)), rest)
        }
        _ => return None,
    };
    let (content, after) = rest.split_at_checked(length)?;
    Some((tag, content, after))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn elements() {
        assert_eq!(element(&[0x30, 2, 1, 2, 9]), Some((0x30, [1, 2].as_slice(), [9].as_slice())));
        assert_eq!(element(&[4, 0x81, 1, 7]), Some((4, [7].as_slice(), [].as_slice())));
        for bad in [[].as_slice(), &[1], &[1, 1], &[1, 0x80], &[1, 0x82, 1], &[1, 0x84, 0, 0, 0, 0]]
        {
            assert_eq!(element(bad), None, "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in any::<Vec<u8>>()) {
            let _ = public_key_info(&CertificateDer::from(bytes));
        }
    }
}
