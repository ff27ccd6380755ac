//! Opens the connections a [`Dsn`] describes.

use std::collections::BTreeSet;
use std::future::Future;
use std::net::IpAddr;
use std::sync::Arc;

use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_postgres::config::{ChannelBinding, Host, SslMode};
use tokio_postgres::error::SqlState;
use tokio_postgres::tls::MakeTlsConnect;
use tokio_postgres::{CancelToken, Client, Config, Connection, Error, Socket};
use tokio_postgres_rustls::MakeRustlsConnect;

use super::dsn::Dsn;
use super::error::DsnError;

/// The half of a connection that moves the bytes; nothing happens unless it is polled.
pub(crate) type Driver = Connection<Socket, <MakeRustlsConnect as MakeTlsConnect<Socket>>::Stream>;

/// Opens connections, by itself or for a pool. Cheap to clone.
///
/// Hosts are tried in turn, or in random order when the string says so, and so are the addresses
/// behind a name. `connect_timeout` limits each such attempt from the first packet until the
/// session is ready; tokio-postgres alone would limit only the first of these steps, and wait
/// forever for a server that accepts connections and is then silent, as one that is stopped does.
#[derive(Clone)]
pub(crate) struct Connector {
    dsn: Arc<Dsn>,
    tls: MakeRustlsConnect,
}

impl std::fmt::Debug for Connector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connector").field("dsn", &self.dsn).finish_non_exhaustive()
    }
}

impl Connector {
    /// Reads the certificates the string names.
    pub(crate) fn new(dsn: &Dsn) -> Result<Self, DsnError> {
        Ok(Self { tls: dsn.tls.connector()?, dsn: Arc::new(dsn.clone()) })
    }

    /// Connects and leaves it to the caller to drive the connection, for the notices and
    /// notifications that only the driver sees.
    pub(crate) async fn open(&self) -> Result<(Client, Driver), Error> {
        let mut hosts: Vec<&Config> = self.dsn.hosts.iter().collect();
        self.shuffle(&mut hosts);
        let mut failure = None;
        for config in hosts {
            match self.open_host(config).await {
                Ok(opened) => return Ok(opened),
                Err(error) => keep_more_telling(&mut failure, error),
            }
        }
        // There is at least one host.
        Err(failure.unwrap_or_else(timed_out))
    }

    /// Connects and drives the connection in a task, until the client is dropped. The task says what broke the connection.
    pub(crate) async fn connect(&self) -> Result<(Client, JoinHandle<Option<Error>>), Error> {
        let (client, driver) = self.open().await?;
        let task = tokio::spawn(async move {
            let error = driver.await.err();
            if let Some(error) = &error {
                tracing::info!(error = error as &dyn std::error::Error, "lost a connection");
            }
            error
        });
        Ok((client, task))
    }

    /// The same with these settings, as `-c name=value`, from the start: they hold whatever the role's and the database's are.
    pub(crate) async fn connect_with(
        &self,
        settings: &str,
    ) -> Result<(Client, JoinHandle<Option<Error>>), Error> {
        let mut dsn = (*self.dsn).clone();
        for host in &mut dsn.hosts {
            let options = match host.get_options() {
                Some(options) => format!("{options} {settings}"),
                None => settings.to_owned(),
            };
            host.options(options);
        }
        Self { dsn: Arc::new(dsn), tls: self.tls.clone() }.connect().await
    }

    /// Asks the server to cancel what runs on a connection. Nothing says whether that was in time.
    pub(crate) async fn cancel(&self, token: &CancelToken) -> Result<(), Error> {
        token.cancel_query(self.tls.clone()).await
    }

    async fn open_host(&self, config: &Config) -> Result<(Client, Driver), Error> {
        let mut failure = None;
        for config in self.resolve(config).await? {
            let result = match self.attempt(&config).await {
                Err(error) if plain_text_may_help(&config, &error) => {
                    let mut plain = config.clone();
                    plain.ssl_mode(SslMode::Disable);
                    // Should that fail too, the first reason is the better one.
                    self.attempt(&plain).await.map_err(|_| error)
                }
                result => result,
            };
            match result {
                Ok(opened) => return Ok(opened),
                Err(error) => {
                    tracing::debug!(
                        hosts = ?config.get_hosts(),
                        ports = ?config.get_ports(),
                        addresses = ?config.get_hostaddrs(),
                        error = &error as &dyn std::error::Error,
                        "could not connect",
                    );
                    keep_more_telling(&mut failure, error);
                }
            }
        }
        Err(failure.unwrap_or_else(timed_out))
    }

    /// One configuration for each address of the host, so that each has its own time limit.
    async fn resolve(&self, config: &Config) -> Result<Vec<Config>, Error> {
        let (name, port) = match (config.get_hosts(), config.get_hostaddrs(), config.get_ports()) {
            ([Host::Tcp(name)], [], [port]) => (name.as_str(), *port),
            _ => return Ok(vec![config.clone()]),
        };
        let found = limit(config, tokio::net::lookup_host((name, port))).await?;
        let mut seen = BTreeSet::<IpAddr>::new();
        let mut configs: Vec<Config> = found
            .into_iter()
            .flatten()
            .map(|address| address.ip())
            .filter(|address| seen.insert(*address))
            .map(|address| {
                let mut config = config.clone();
                config.hostaddr(address);
                config
            })
            .collect();
        if configs.is_empty() {
            // tokio-postgres will fail to look the name up as well, and only it can make an error.
            configs.push(config.clone());
        }
        self.shuffle(&mut configs);
        Ok(configs)
    }

    async fn attempt(&self, config: &Config) -> Result<(Client, Driver), Error> {
        limit(config, config.connect(self.tls.clone())).await?
    }

    fn shuffle<T>(&self, items: &mut [T]) {
        if self.dsn.load_balance {
            fastrand::shuffle(items);
        }
    }
}

/// Gives up on `action` after the configuration's `connect_timeout`.
async fn limit<T>(config: &Config, action: impl Future<Output = T>) -> Result<T, Error> {
    match config.get_connect_timeout() {
        Some(limit) => timeout(*limit, action).await.map_err(|_| timed_out()),
        None => Ok(action.await),
    }
}

/// Callers get tokio-postgres's own error, and this is the only way to make one. It is meant
/// for the synchronous client of the same project, so it won't go away.
pub(crate) fn timed_out() -> Error {
    Error::__private_api_timeout()
}

/// Of several hosts' errors, one a server gave (a wrong password, say) says more than that another
/// couldn't be reached.
fn keep_more_telling(kept: &mut Option<Error>, error: Error) {
    if kept.as_ref().is_none_or(|kept| kept.as_db_error().is_none()) {
        *kept = Some(error);
    }
}

/// Whether `prefer` has to give up its preference, as it does in libpq: the server takes TLS of a
/// kind that rustls doesn't speak, or admits this client only without (`hostnossl`).
fn plain_text_may_help(config: &Config, error: &Error) -> bool {
    if config.get_ssl_mode() != SslMode::Prefer
        || config.get_channel_binding() == ChannelBinding::Require
    {
        return false;
    }
    match tls_failure(error) {
        // Who posed a check doesn't want to go on without it.
        Some(rustls::Error::InvalidCertificate(_)) => false,
        Some(_) => true,
        None => error.code() == Some(&SqlState::INVALID_AUTHORIZATION_SPECIFICATION),
    }
}

fn tls_failure(error: &Error) -> Option<&rustls::Error> {
    let mut source = std::error::Error::source(error);
    while let Some(error) = source {
        if let Some(failure) = error.downcast_ref::<rustls::Error>() {
            return Some(failure);
        }
        // An io::Error's source is that of the error it wraps, not that error.
        let wrapped = error.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref);
        if let Some(failure) = wrapped.and_then(|wrapped| wrapped.downcast_ref::<rustls::Error>()) {
            return Some(failure);
        }
        source = error.source();
    }
    None
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
    }

    fn connector(text: &str) -> Connector {
        Connector::new(&Dsn::parse(text).unwrap()).unwrap()
    }

    #[test]
    fn a_silent_server_is_given_up() {
        // Connections are accepted by the system, and nobody ever answers.
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let start = Instant::now();
        let connector = connector(&format!("host=localhost port={port} connect_timeout=1"));
        let error = block_on(connector.connect()).err().unwrap();
        assert_eq!(error.to_string(), "timeout waiting for server");
        assert!(start.elapsed() < Duration::from_secs(8), "{:?}", start.elapsed());
    }

    #[test]
    fn a_refused_connection_and_an_unknown_host() {
        let port = {
            let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            listener.local_addr().unwrap().port()
        };
        for host in ["127.0.0.1", "/nonexistent", "no-such-host.invalid", "a..b"] {
            let connector = connector(&format!("host={host} port={port}"));
            assert!(block_on(connector.open()).is_err(), "{host}");
        }
    }
}
