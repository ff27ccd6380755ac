//! The servers a connection string names.

use std::net::IpAddr;

use tokio_postgres::Config;

use super::environment::Environment;
use super::error::DsnError;
use super::settings::Settings;

/// One server to try.
#[derive(Debug, PartialEq)]
pub(super) struct Target {
    /// A name, an address, or a directory with the server's socket; what TLS checks the
    /// certificate against and what `.pgpass` is searched for.
    pub(super) host: String,
    /// Where to connect instead of looking the host up.
    pub(super) address: Option<IpAddr>,
    pub(super) port: u16,
}

impl Target {
    /// The servers in the order given, at least one.
    pub(super) fn all(
        settings: &Settings,
        environment: &Environment,
    ) -> Result<Vec<Self>, DsnError> {
        let hosts = settings.list("host");
        let addresses = settings.list("hostaddr");
        let ports = settings.list("port");

        let count = hosts.len().max(addresses.len()).max(1);
        if !hosts.is_empty() && !addresses.is_empty() && hosts.len() != addresses.len() {
            return Err(DsnError::new(format!(
                "{} hosts can't be matched to {} hostaddr addresses; give as many of each",
                hosts.len(),
                addresses.len()
            )));
        }
        if ports.len() > 1 && ports.len() != count {
            return Err(DsnError::new(format!(
                "{} ports can't be matched to {count} hosts; give one for all or one for each",
                ports.len()
            )));
        }

        let element =
            |list: &[&str], index: usize| list.get(index).copied().unwrap_or_default().to_owned();
        (0..count)
            .map(|index| {
                let port = match ports.as_slice() {
                    [only] => only,
                    several => several.get(index).copied().unwrap_or_default(),
                };
                Self::new(element(&hosts, index), &element(&addresses, index), port, environment)
            })
            .collect()
    }

    fn new(
        host: String,
        address: &str,
        port: &str,
        environment: &Environment,
    ) -> Result<Self, DsnError> {
        let port = match port.trim() {
            "" => DEFAULT_PORT,
            port => port.parse().ok().filter(|port| *port != 0).ok_or_else(|| {
                DsnError::new(
                    "the port in the connection string has to be a number from 1 to 65535",
                )
            })?,
        };
        if host.starts_with('@') {
            return Err(DsnError::new(
                "sockets in the abstract namespace (a host that starts with @) are not supported",
            ));
        }
        if address.is_empty() {
            let host = match host.is_empty() {
                true => default_host(port, environment),
                false => host,
            };
            return Ok(Self { host, address: None, port });
        }
        let address: IpAddr = address.trim().parse().map_err(|_| {
            DsnError::new("hostaddr has to be an IPv4 or IPv6 address; give a name as host")
        })?;
        // Something has to stand where TLS and .pgpass look for a name.
        let host = match host.is_empty() || is_socket_dir(&host) {
            true => address.to_string(),
            false => host,
        };
        Ok(Self { host, address: Some(address), port })
    }

    /// Whether this server is reached over a Unix socket.
    pub(super) fn is_local(&self) -> bool {
        is_socket_dir(&self.host)
    }

    /// Points a configuration at this server.
    pub(super) fn apply(&self, config: &mut Config) {
        config.host(&self.host).port(self.port);
        if let Some(address) = self.address {
            config.hostaddr(address);
        }
    }
}

const DEFAULT_PORT: u16 = 5432;

/// A local server's socket if there is one, as in libpq, but never one that isn't there.
fn default_host(port: u16, environment: &Environment) -> String {
    let dir = environment.socket_dir(port).and_then(|dir| dir.to_str());
    dir.unwrap_or("localhost").to_owned()
}

fn is_socket_dir(host: &str) -> bool {
    cfg!(unix) && host.starts_with('/')
}

#[cfg(test)]
mod tests {
    use super::super::keyvalue;
    use super::*;

    fn targets(text: &str) -> Result<Vec<Target>, DsnError> {
        Target::all(&keyvalue::parse(text).unwrap(), &Environment::default())
    }

    fn target(host: &str, address: Option<&str>, port: u16) -> Target {
        Target { host: host.to_owned(), address: address.map(|a| a.parse().unwrap()), port }
    }

    #[test]
    fn hosts_and_ports_are_matched() {
        assert_eq!(targets("").unwrap(), [target("localhost", None, 5432)]);
        assert_eq!(
            targets("host=a,b port=1").unwrap(),
            [target("a", None, 1), target("b", None, 1)]
        );
        assert_eq!(
            targets("host=a,,c port=1,,3").unwrap(),
            [target("a", None, 1), target("localhost", None, 5432), target("c", None, 3)]
        );
        assert_eq!(
            targets("host=a,b hostaddr=127.0.0.1,").unwrap(),
            [target("a", Some("127.0.0.1"), 5432), target("b", None, 5432)]
        );
        assert_eq!(targets("hostaddr=::1").unwrap(), [target("::1", Some("::1"), 5432)]);
        assert_eq!(
            targets("host=/tmp hostaddr=127.0.0.1").unwrap(),
            [target("127.0.0.1", Some("127.0.0.1"), 5432)]
        );
    }

    #[test]
    fn mismatches_and_nonsense() {
        for text in [
            "host=a,b port=1,2,3",
            "host=a,b hostaddr=127.0.0.1",
            "port=1,2",
            "port=0",
            "port=65536",
            "port=-1",
            "port=x",
            "hostaddr=localhost",
            "host=@abstract",
        ] {
            assert!(targets(text).is_err(), "{text}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn a_local_socket_is_the_default_host() {
        let dir = std::env::temp_dir().join(format!("sqlstreams-socket-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join(".s.PGSQL.5432"), "").unwrap();
        let environment = Environment::default().with_socket_dir(&dir);
        let host = |text: &str| {
            let targets = Target::all(&keyvalue::parse(text).unwrap(), &environment).unwrap();
            targets.into_iter().next().unwrap().host
        };
        assert_eq!(host(""), dir.to_str().unwrap());
        assert_eq!(host("port=5433"), "localhost");
        assert_eq!(host("host=''"), dir.to_str().unwrap());
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
