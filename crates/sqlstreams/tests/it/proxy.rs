//! A TCP proxy in front of a cluster that cuts or freezes connections at chosen points of the conversation.
//!
//! It understands the framing of PostgreSQL's protocol, so a rule is asked about each statement by its text.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt, sink};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};

/// Where in the course of one statement something happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// The server never sees the statement. What was sent before it arrives.
    Before,
    /// The server gets the statement, and the client no byte of its answer.
    Sent,
    /// The client gets so many bytes of the answer, or all of it if it has fewer.
    InReply(usize),
}

/// What happens there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cut {
    /// The client's connection ends at once, the server's when it has dealt with what it was sent.
    Close(Place),
    /// Both stay open, and nothing passes any more either way.
    Freeze(Place),
}

impl Cut {
    fn place(self) -> Place {
        match self {
            Self::Close(place) | Self::Freeze(place) => place,
        }
    }
}

/// A statement on its way to the server.
#[derive(Debug, Clone, Copy)]
pub struct Statement<'a> {
    pub sql: &'a str,
    /// The process that serves the connection.
    pub pid: i32,
}

type Rule = Box<dyn FnMut(Statement<'_>) -> Option<Cut> + Send>;

/// Dropped, it closes all connections.
pub struct Proxy {
    /// For clients: the URL that the proxy was started with, with its own address.
    pub url: String,
    shared: Arc<Shared>,
    accepting: JoinHandle<()>,
}

struct Shared {
    rule: Mutex<Rule>,
    cuts: AtomicUsize,
    connections: AtomicUsize,
}

impl Proxy {
    /// In front of the server at `url`, with a rule that lets everything pass.
    pub async fn start(url: &str) -> Self {
        let config: tokio_postgres::Config = url.parse().unwrap();
        let upstream = config.get_ports()[0];
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let shared = Arc::new(Shared {
            rule: Mutex::new(Box::new(|_| None)),
            cuts: AtomicUsize::new(0),
            connections: AtomicUsize::new(0),
        });
        let url = url.replace(&format!(":{upstream}/"), &format!(":{port}/"));
        assert_eq!(url.parse::<tokio_postgres::Config>().unwrap().get_ports(), [port]);
        let accepting = tokio::spawn(accept(listener, upstream, shared.clone()));
        Self { url, shared, accepting }
    }

    /// From now on asks `rule` about each statement that passes.
    pub fn set(&self, rule: impl FnMut(Statement<'_>) -> Option<Cut> + Send + 'static) {
        *self.shared.rule.lock().unwrap() = Box::new(rule);
    }

    /// Cuts once: at the next statement that has this word in it.
    pub fn cut_next(&self, word: &'static str, cut: Cut) {
        let mut armed = Some(cut);
        self.set(move |statement| {
            let mut words = statement.sql.split(|c: char| !c.is_alphanumeric() && c != '_');
            words.any(|w| w == word).then(|| armed.take()).flatten()
        });
    }

    /// How often the rule has cut or frozen.
    pub fn cuts(&self) -> usize {
        self.shared.cuts.load(Ordering::SeqCst)
    }

    /// How many connections clients have tried to open.
    pub fn connections(&self) -> usize {
        self.shared.connections.load(Ordering::SeqCst)
    }

    /// From now on counts the statements that pass.
    pub fn count(&self) -> Arc<AtomicUsize> {
        let count = Arc::new(AtomicUsize::new(0));
        let counted = count.clone();
        self.set(move |_| {
            counted.fetch_add(1, Ordering::SeqCst);
            None
        });
        count
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn accept(listener: TcpListener, upstream: u16, shared: Arc<Shared>) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                shared.connections.fetch_add(1, Ordering::SeqCst);
                connections.spawn(serve(accepted.unwrap().0, upstream, shared.clone()));
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

/// Errors are no more than ends of connections.
async fn serve(client: TcpStream, upstream: u16, shared: Arc<Shared>) -> std::io::Result<()> {
    let server = TcpStream::connect(("127.0.0.1", upstream)).await?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let mut conversation = Conversation {
        client: Reader::new(from_client),
        to_client,
        server: Reader::new(from_server),
        to_server,
        pid: 0,
        // The start-up is answered as one.
        asked: 1,
        answered: 0,
        shared,
    };
    conversation.start_up().await?;
    let Some(cut) = conversation.pass_until_cut().await? else { return Ok(()) };
    let Conversation { client, to_client, mut server, mut to_server, .. } = conversation;
    match cut {
        Cut::Freeze(_) => std::future::pending().await,
        Cut::Close(_) => {
            drop((client, to_client));
            to_server.shutdown().await?;
            tokio::io::copy(&mut server.from, &mut sink()).await?;
            Ok(())
        }
    }
}

struct Conversation {
    client: Reader<OwnedReadHalf>,
    to_client: OwnedWriteHalf,
    server: Reader<OwnedReadHalf>,
    to_server: OwnedWriteHalf,
    pid: i32,
    /// Requests and finished answers: each request is answered by one ReadyForQuery.
    asked: usize,
    answered: usize,
    shared: Arc<Shared>,
}

impl Conversation {
    /// Requests of encryption, each with one byte for an answer, then the start-up message.
    async fn start_up(&mut self) -> std::io::Result<()> {
        const ENCRYPTION: [i32; 2] = [80_877_103, 80_877_104];
        loop {
            let message = self.client.start_up_message().await?;
            self.to_server.write_all(&message).await?;
            if !ENCRYPTION.contains(&number(&message[4..8])) {
                return Ok(());
            }
            let answer = self.server.from.read_u8().await?;
            assert_eq!(answer, b'N', "what is encrypted cannot be followed");
            self.to_client.write_u8(answer).await?;
        }
    }

    /// Passes messages both ways. `None`: one side has ended.
    async fn pass_until_cut(&mut self) -> std::io::Result<Option<Cut>> {
        // A cut that has been decided on, the number of the request, and how much of its answer has passed.
        let mut pending: Option<(Cut, usize, usize)> = None;
        loop {
            tokio::select! {
                message = self.client.message() => {
                    let Some(message) = message? else { return Ok(None) };
                    if let (Some(sql), None) = (text(&message), pending) {
                        let statement = Statement { sql, pid: self.pid };
                        let cut = (self.shared.rule.lock().unwrap())(statement);
                        if let Some(cut) = cut {
                            self.shared.cuts.fetch_add(1, Ordering::SeqCst);
                            if cut.place() == Place::Before {
                                return Ok(Some(cut));
                            }
                            pending = Some((cut, self.asked, 0));
                        }
                    }
                    self.to_server.write_all(&message).await?;
                    // Query and Sync.
                    if matches!(message[0], b'Q' | b'S') {
                        self.asked += 1;
                        if let Some((cut, _, _)) = pending && cut.place() == Place::Sent {
                            return Ok(Some(cut));
                        }
                    }
                }
                message = self.server.message() => {
                    let Some(message) = message? else { return Ok(None) };
                    // BackendKeyData.
                    if message[0] == b'K' {
                        self.pid = number(&message[5..9]);
                    }
                    let ready = message[0] == b'Z';
                    match &mut pending {
                        Some((cut, turn, passed)) if *turn == self.answered => {
                            let Place::InReply(limit) = cut.place() else { continue };
                            let rest = (limit - *passed).min(message.len());
                            self.to_client.write_all(&message[..rest]).await?;
                            *passed += rest;
                            if *passed == limit || ready {
                                // Closing discards what was not sent yet.
                                tokio::time::sleep(Duration::from_millis(1)).await;
                                return Ok(Some(*cut));
                            }
                        }
                        _ => self.to_client.write_all(&message).await?,
                    }
                    self.answered += usize::from(ready);
                }
            }
        }
    }
}

/// The text of a Query or Parse message.
fn text(message: &[u8]) -> Option<&str> {
    let body = &message[5..];
    let text = match message[0] {
        b'Q' => body,
        // The statement's own name comes first.
        b'P' => &body[body.iter().position(|byte| *byte == 0)? + 1..],
        _ => return None,
    };
    std::str::from_utf8(text.split(|byte| *byte == 0).next()?).ok()
}

fn number(bytes: &[u8]) -> i32 {
    i32::from_be_bytes(bytes.try_into().unwrap())
}

/// Reads whole messages. What has arrived of one stays when the future is dropped.
struct Reader<R> {
    from: R,
    buffer: Vec<u8>,
}

impl<R: AsyncRead + Unpin> Reader<R> {
    fn new(from: R) -> Self {
        Self { from, buffer: Vec::new() }
    }

    /// The first message of a connection has no type.
    async fn start_up_message(&mut self) -> std::io::Result<Vec<u8>> {
        self.framed(0).await?.ok_or_else(|| std::io::ErrorKind::UnexpectedEof.into())
    }

    async fn message(&mut self) -> std::io::Result<Option<Vec<u8>>> {
        self.framed(1).await
    }

    /// A message whose length, which counts itself, comes after so many bytes.
    async fn framed(&mut self, before: usize) -> std::io::Result<Option<Vec<u8>>> {
        loop {
            if self.buffer.len() >= before + 4 {
                let end = before + number(&self.buffer[before..before + 4]) as usize;
                if self.buffer.len() >= end {
                    let rest = self.buffer.split_off(end);
                    return Ok(Some(std::mem::replace(&mut self.buffer, rest)));
                }
            }
            if self.from.read_buf(&mut self.buffer).await? == 0 {
                return Ok(None);
            }
        }
    }
}
