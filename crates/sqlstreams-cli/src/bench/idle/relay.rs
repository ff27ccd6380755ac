//! A relay in front of the server that counts the statements which pass it: exactly, and at no cost to the server.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use tokio::io::{self, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_postgres::config::{Host, SslMode};

/// A first message that asks for encryption, by TLS or GSSAPI.
const ENCRYPT: [u32; 2] = [80_877_103, 80_877_104];
/// How often to look whether connections are closed, and how many times.
const CLOSING: (Duration, u32) = (Duration::from_millis(20), 250);
/// The bytes of a message's length, which counts itself.
const LENGTH: usize = 4;

/// Dropped, it closes all its connections.
pub(super) struct Relay {
    /// The database by way of it. Holds a password: not for printing.
    pub(super) url: String,
    statements: Arc<AtomicU64>,
    /// Connections that are open.
    open: Arc<AtomicU64>,
    _accepting: JoinSet<()>,
}

impl Relay {
    /// In front of the server of this URL; nothing if that is not `postgres://…` with one host and port, or wants to be spoken to
    /// encrypted.
    pub(super) async fn start(url: &str) -> anyhow::Result<Option<Self>> {
        let Some((before, host, port, after)) = parts(url) else { return Ok(None) };
        let listener = TcpListener::bind("127.0.0.1:0").await.context("could not open a port")?;
        let own = listener.local_addr()?;
        let statements = Arc::new(AtomicU64::new(0));
        let mut accepting = JoinSet::new();
        let open = Arc::new(AtomicU64::new(0));
        let (counter, opened) = (statements.clone(), open.clone());
        accepting.spawn(async move {
            // They go with this task.
            let mut connections = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                let (host, counter, open) = (host.clone(), counter.clone(), opened.clone());
                open.fetch_add(1, Ordering::Relaxed);
                connections.spawn(async move {
                    // Whatever breaks is for the client to tell.
                    let _ = pass(client, &host, port, &counter).await;
                    open.fetch_sub(1, Ordering::Relaxed);
                });
                while connections.try_join_next().is_some() {}
            }
        });
        let url = format!("{before}{own}{after}");
        Ok(Some(Self { url, statements, open, _accepting: accepting }))
    }

    /// Waits until the client has closed its connections, which it does some time after it was dropped; not for ever.
    pub(super) async fn closed(&self) {
        for _ in 0..CLOSING.1 {
            if self.open.load(Ordering::Relaxed) == 0 {
                return;
            }
            tokio::time::sleep(CLOSING.0).await;
        }
    }

    /// How many statements have passed.
    pub(super) fn statements(&self) -> u64 {
        self.statements.load(Ordering::Relaxed)
    }
}

/// What is before the address, the address, and what is behind it.
fn parts(url: &str) -> Option<(String, String, u16, String)> {
    let config: tokio_postgres::Config = url.parse().ok()?;
    let ([Host::Tcp(host)], [port]) = (config.get_hosts(), config.get_ports()) else { return None };
    if config.get_ssl_mode() == SslMode::Require {
        return None;
    }
    let (before, after) = url.split_once(&format!("@{host}:{port}"))?;
    Some((format!("{before}@"), host.clone(), *port, after.to_owned()))
}

async fn pass(client: TcpStream, host: &str, port: u16, counter: &AtomicU64) -> io::Result<()> {
    let server = TcpStream::connect((host, port)).await?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let first = first_message(&mut from_client, &mut to_client).await?;
    to_server.write_all(&first).await?;
    tokio::select! {
        ended = count(&mut from_client, &mut to_server, counter) => ended,
        ended = io::copy(&mut from_server, &mut to_client) => ended.map(|_| ()),
    }
}

/// The message that opens a connection. To one that would rather encrypt it says no.
async fn first_message(
    from: &mut (impl AsyncRead + Unpin),
    back: &mut (impl AsyncWrite + Unpin),
) -> io::Result<Vec<u8>> {
    loop {
        let length = from.read_u32().await?;
        let code = from.read_u32().await?;
        if ENCRYPT.contains(&code) {
            back.write_all(b"N").await?;
            continue;
        }
        let mut message = [length.to_be_bytes(), code.to_be_bytes()].concat();
        let rest = u64::from(length).saturating_sub(2 * LENGTH as u64);
        from.take(rest).read_to_end(&mut message).await?;
        return Ok(message);
    }
}

/// Passes messages on and counts those that make the server run a statement: Query and Execute.
async fn count(
    from: &mut (impl AsyncRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
    counter: &AtomicU64,
) -> io::Result<()> {
    let mut chunk = vec![0; 16 * 1024];
    let mut framing = Framing::default();
    loop {
        let read = from.read(&mut chunk).await?;
        if read == 0 {
            return to.shutdown().await;
        }
        counter.fetch_add(framing.statements(&chunk[..read]), Ordering::Relaxed);
        to.write_all(&chunk[..read]).await?;
    }
}

/// Where in the stream of messages it is.
#[derive(Debug, Default)]
struct Framing {
    /// What has come of a message's kind and length.
    head: Vec<u8>,
    /// Bytes of its body that are still to come.
    body: usize,
}

impl Framing {
    /// How many statements begin in these bytes, which follow those before.
    fn statements(&mut self, mut bytes: &[u8]) -> u64 {
        let mut statements = 0;
        while !bytes.is_empty() {
            let skipped = self.body.min(bytes.len());
            self.body -= skipped;
            bytes = &bytes[skipped..];
            let taken = (1 + LENGTH - self.head.len()).min(bytes.len());
            if self.body > 0 || taken == 0 {
                continue;
            }
            self.head.extend_from_slice(&bytes[..taken]);
            bytes = &bytes[taken..];
            if let [kind, a, b, c, d] = *self.head {
                statements += u64::from(matches!(kind, b'Q' | b'E'));
                self.body = (u32::from_be_bytes([a, b, c, d]) as usize).saturating_sub(LENGTH);
                self.head.clear();
            }
        }
        statements
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: u8, body: &[u8]) -> Vec<u8> {
        let length = u32::try_from(body.len() + LENGTH).unwrap();
        [&[kind], &length.to_be_bytes()[..], body].concat()
    }

    #[test]
    fn statements_are_counted_wherever_the_bytes_are_cut() {
        let parts = [
            message(b'Q', b"BEGIN\0"),
            message(b'P', b"\0SELECT 'QQQQQEEEEE'\0\0\0"),
            message(b'B', b"EQ"),
            message(b'E', b"\0\0\0\0\0"),
            message(b'S', b""),
            message(b'Q', b"COMMIT\0"),
        ];
        let all = parts.concat();
        for size in 1..=all.len() {
            let mut framing = Framing::default();
            let counts = all.chunks(size).map(|chunk| framing.statements(chunk));
            assert_eq!(counts.sum::<u64>(), 3, "in pieces of {size}");
        }
    }

    #[test]
    fn an_address_is_found_where_there_is_one() {
        let found = parts("postgres://u:p@127.0.0.1:5432/db?sslmode=disable");
        let (before, host, port, after) = found.unwrap();
        assert_eq!((before.as_str(), host.as_str(), port), ("postgres://u:p@", "127.0.0.1", 5432));
        assert_eq!(after, "/db?sslmode=disable");
        assert_eq!(parts("host=127.0.0.1 user=u"), None);
        assert_eq!(parts("postgres://u@127.0.0.1:5432/db?sslmode=require"), None);
        assert_eq!(parts("postgres://u@a:1,b:2/db"), None);
    }
}
