//! TLS against a real server, with certificates made on the spot.
//!
//! Needs the programs of PostgreSQL and openssl; says so and does nothing where they are missing.
//! Inside the crate, as the connector is no part of the public API.

use std::error::Error;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::{Connector, Dsn};

#[test]
fn every_mode_does_what_it_says() {
    let (Some(bin), Ok(_)) = (find_postgres(), Command::new("openssl").arg("version").output())
    else {
        eprintln!("skipped: needs the programs of PostgreSQL and openssl");
        return;
    };
    let server = Server::start(&bin);
    let ca = server.file("ca.crt");
    let other = server.file("other.crt");

    server.use_certificate("server");
    server.encrypts("sslmode=allow");
    server.encrypts("sslmode=prefer");
    server.encrypts("sslmode=require");
    server.encrypts("sslmode=require host=127.0.0.1");
    server.encrypts("sslmode=require hostaddr=127.0.0.1 host=''");
    server.encrypts("sslmode=require ssl_min_protocol_version=TLSv1.3");
    server.encrypts(&format!("sslmode=require sslrootcert={ca}"));
    server.encrypts(&format!("sslmode=verify-ca sslrootcert={ca}"));
    server.encrypts(&format!("sslmode=verify-ca sslrootcert={ca} host=127.0.0.1"));
    server.encrypts(&format!("sslmode=verify-full sslrootcert={ca}"));
    server.stays_plain("sslmode=disable");

    // An unknown authority, and no plain text after it even where that is allowed.
    server.refuses(&format!("sslmode=prefer sslrootcert={other}"), "UnknownIssuer");
    server.refuses(&format!("sslmode=require sslrootcert={other}"), "UnknownIssuer");
    server.refuses(&format!("sslmode=verify-ca sslrootcert={other}"), "UnknownIssuer");
    server.refuses(&format!("sslmode=verify-full sslrootcert={other}"), "UnknownIssuer");

    // A host name that the certificate doesn't have.
    let full = format!("sslmode=verify-full sslrootcert={ca}");
    server.refuses(&format!("{full} host=127.0.0.1"), "not valid for name");
    server.refuses(&format!("{full} host=db.invalid hostaddr=127.0.0.1"), "not valid for name");

    // Nobody encrypts over Unix sockets.
    server.stays_plain(&format!("sslmode=require host={}", server.dir.display()));

    // Users that pg_hba.conf admits in one way only.
    server.encrypts("sslmode=prefer user=encrypted");
    server.refuses("sslmode=disable user=encrypted", "no encryption");
    server.stays_plain("sslmode=prefer user=plain");
    server.refuses("sslmode=require user=plain", "SSL encryption");

    // Channel binding needs a password, and is worth something without a checked certificate too.
    let scram = "user=scram password=pw channel_binding=require";
    server.encrypts(&format!("{scram} sslmode=require"));
    server.refuses(&format!("{scram} sslmode=disable"), "channel binding");

    let key = format!("sslcert={} sslkey={}", server.file("client.crt"), server.file("client.key"));
    server.encrypts(&format!("sslmode=require user=certified {key}"));
    server.refuses("sslmode=require user=certified", "client certificate");

    // A certificate that is its own root, as `openssl req -x509` makes it.
    let own = server.file("own.crt");
    server.use_certificate("own");
    server.encrypts("sslmode=require");
    server.encrypts(&format!("sslmode=verify-full sslrootcert={own}"));
    server.refuses(&format!("sslmode=verify-full sslrootcert={own} host=127.0.0.1"), "not valid");
    server.refuses(&format!("sslmode=verify-ca sslrootcert={ca}"), "invalid peer certificate");

    // A certificate of version 1, in either version of TLS.
    server.use_certificate("v1");
    server.encrypts("sslmode=require");
    server.refuses(&format!("sslmode=verify-ca sslrootcert={ca}"), "UnsupportedCertVersion");
    server.set("ssl_max_protocol_version", "TLSv1.2");
    server.encrypts("sslmode=require");
    server.refuses("sslmode=require ssl_min_protocol_version=TLSv1.3", "ProtocolVersion");
    server.stays_plain("sslmode=prefer ssl_min_protocol_version=TLSv1.3");
    server.use_certificate("server");
    server.encrypts(&full);

    server.set("ssl", "off");
    server.stays_plain("sslmode=prefer");
    server.refuses("sslmode=require", "does not support TLS");
}

struct Server {
    process: Child,
    dir: PathBuf,
    port: u16,
    runtime: tokio::runtime::Runtime,
}

impl Server {
    fn start(bin: &Path) -> Self {
        let dir = std::env::temp_dir().join(format!("sqlstreams-tls-{}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        make_certificates(&dir);

        // PostgreSQL refuses to run as root, and keys that belong to somebody else.
        let owner = (fs::metadata(&dir).unwrap().uid() == 0).then(unprivileged_user);
        if let Some(owner) = owner {
            chown(&dir, Some(owner), None).unwrap();
            for file in fs::read_dir(&dir).unwrap() {
                chown(file.unwrap().path(), Some(owner), None).unwrap();
            }
        }
        let data = dir.join("data");
        let program = |name: &str| {
            let mut command = Command::new(bin.join(name));
            command.arg("-D").arg(&data).current_dir("/");
            command.stdout(Stdio::null()).stderr(Stdio::null());
            if let Some(owner) = owner {
                command.uid(owner);
            }
            command
        };

        let init = program("initdb").args(["-U", "trusted", "-A", "trust", "-N"]).status();
        assert!(init.unwrap().success());
        let hba = "local all all trust\n\
                   hostssl all encrypted all trust\n\
                   hostnossl all plain all trust\n\
                   hostssl all certified all cert\n\
                   host all scram all scram-sha-256\n\
                   host all trusted all trust\n";
        fs::write(data.join("pg_hba.conf"), hba).unwrap();

        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        drop(listener);
        let process = program("postgres")
            .args(["-c", "fsync=off", "-c", "listen_addresses=127.0.0.1"])
            .args(["-c", &format!("ssl_ca_file={}", dir.join("ca.crt").display())])
            .args(["-k", &dir.display().to_string(), "-p", &port.to_string()])
            .spawn()
            .unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let server = Self { process, dir, port, runtime };
        server.wait_until("the server is up", || server.execute("SELECT").is_ok());
        server.execute("CREATE ROLE encrypted LOGIN").unwrap();
        server.execute("CREATE ROLE plain LOGIN").unwrap();
        server.execute("CREATE ROLE certified LOGIN").unwrap();
        server.execute("CREATE ROLE scram LOGIN PASSWORD 'pw'").unwrap();
        server
    }

    fn encrypts(&self, text: &str) {
        assert_eq!(self.connect(text), Ok(true), "{text}");
    }

    fn stays_plain(&self, text: &str) {
        assert_eq!(self.connect(text), Ok(false), "{text}");
    }

    fn refuses(&self, text: &str, why: &str) {
        match self.connect(text) {
            Err(message) => assert!(message.contains(why), "{text}: {message}"),
            Ok(_) => panic!("{text}: connected"),
        }
    }

    /// Whether a connection is encrypted, or why there is none.
    fn connect(&self, text: &str) -> Result<bool, String> {
        let dsn = Dsn::parse(&format!(
            "host=localhost port={} user=trusted dbname=postgres {text}",
            self.port
        ));
        let connector = Connector::new(&dsn.unwrap()).unwrap();
        self.runtime.block_on(async {
            let (client, task) = connector.connect().await.map_err(|error| chain(&error))?;
            let row = client
                .query_one("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()", &[])
                .await
                .map_err(|error| chain(&error))?;
            drop(client);
            task.await.unwrap();
            Ok(row.get(0))
        })
    }

    /// The first column of the first row, over the Unix socket.
    fn execute(&self, sql: &str) -> Result<String, String> {
        let text =
            format!("host={} port={} user=trusted dbname=postgres", self.dir.display(), self.port);
        let connector = Connector::new(&Dsn::parse(&text).unwrap()).unwrap();
        self.runtime.block_on(async {
            let (client, _) = connector.connect().await.map_err(|error| chain(&error))?;
            let messages = client.simple_query(sql).await.map_err(|error| chain(&error))?;
            let value = messages.iter().find_map(|message| match message {
                tokio_postgres::SimpleQueryMessage::Row(row) => row.try_get(0).ok().flatten(),
                _ => None,
            });
            Ok(value.unwrap_or_default().to_owned())
        })
    }

    fn use_certificate(&self, name: &str) {
        // Alone the key doesn't fit, and the server goes on with what it has.
        self.set("ssl_key_file", &self.file(&format!("{name}.key")));
        self.set("ssl_cert_file", &self.file(&format!("{name}.crt")));
        self.set("ssl", "on");
    }

    /// Changes a setting and waits until new sessions have it.
    fn set(&self, name: &str, value: &str) {
        self.execute(&format!("ALTER SYSTEM SET {name} = '{value}'")).unwrap();
        self.execute("SELECT pg_reload_conf()").unwrap();
        let shown = || self.execute(&format!("SHOW {name}"));
        self.wait_until(name, || shown().is_ok_and(|shown| shown == value));
    }

    fn wait_until(&self, what: &str, condition: impl Fn() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !condition() {
            assert!(Instant::now() < deadline, "waited in vain: {what}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn file(&self, name: &str) -> String {
        self.dir.join(name).display().to_string()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Killed outright it would leave shared memory behind.
        let pid = self.process.id().to_string();
        let _ = Command::new("kill").args(["-INT", &pid]).status();
        let _ = self.process.wait();
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// `ca` has signed `server` (for localhost), `client` (of user certified) and `v1`, which has no
/// extensions; `own` (for localhost) and `other` have signed themselves.
fn make_certificates(dir: &Path) {
    let openssl = |arguments: &str| {
        let output =
            Command::new("openssl").args(arguments.split(' ')).current_dir(dir).output().unwrap();
        assert!(
            output.status.success(),
            "openssl {arguments}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
    };
    let key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";
    let localhost = "-addext subjectAltName=DNS:localhost";
    openssl(&format!("req -x509 {key} -keyout ca.key -out ca.crt -subj /CN=ca"));
    openssl(&format!("req -x509 {key} -keyout other.key -out other.crt -subj /CN=other"));
    openssl(&format!("req -x509 {key} -keyout own.key -out own.crt -subj /CN=own {localhost}"));
    fs::write(dir.join("server.ext"), "subjectAltName=DNS:localhost\n").unwrap();
    fs::write(dir.join("client.ext"), "extendedKeyUsage=clientAuth\n").unwrap();
    for (name, user, extensions) in [
        ("server", "localhost", "-extfile server.ext"),
        ("client", "certified", "-extfile client.ext"),
        ("v1", "localhost", "-days 30"),
    ] {
        openssl(&format!("req -new {key} -keyout {name}.key -out {name}.csr -subj /CN={user}"));
        openssl(&format!(
            "x509 -req -in {name}.csr -CA ca.crt -CAkey ca.key -CAcreateserial -out {name}.crt \
             {extensions}"
        ));
    }
    for file in fs::read_dir(dir).unwrap() {
        fs::set_permissions(file.unwrap().path(), fs::Permissions::from_mode(0o600)).unwrap();
    }
}

/// The newest of the versions that are installed the way Debian does it, or what is on the path.
fn find_postgres() -> Option<PathBuf> {
    let versions = fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let mut dirs: Vec<PathBuf> = versions.map(|entry| entry.path().join("bin")).collect();
    dirs.sort();
    dirs.reverse();
    dirs.extend(std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()));
    dirs.into_iter().find(|dir| dir.join("initdb").exists() && dir.join("postgres").exists())
}

fn unprivileged_user() -> u32 {
    let users = fs::read_to_string("/etc/passwd").unwrap();
    let id = |name: &str| {
        let user = users.lines().find(|line| line.split(':').next() == Some(name))?;
        user.split(':').nth(2)?.parse().ok()
    };
    id("postgres").or_else(|| id("nobody")).unwrap()
}

fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}
