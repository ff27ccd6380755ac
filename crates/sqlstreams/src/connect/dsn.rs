//! A connection string with its meaning.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use tokio_postgres::Config;
use tokio_postgres::config::{
    ChannelBinding, Host, LoadBalanceHosts, SslNegotiation, TargetSessionAttrs,
};

use super::connector::Connector;
use super::environment::Environment;
use super::error::DsnError;
use super::hosts::Target;
use super::passfile::Passfile;
use super::settings::Settings;
use super::tls::TlsOptions;
use super::{keyvalue, url};

/// Where and how to connect: a parsed connection string.
///
/// Both of libpq's forms are read, URLs (`postgres://user@host/database?sslmode=require`) and
/// pairs (`host=localhost dbname='my db'`). What the string leaves out comes from the `PG*`
/// variables, the password also from `PGPASSFILE` or `~/.pgpass`, the user and the database from
/// the name of the user that runs the process. Where nothing is said, connections are named
/// `sqlstreams`, have to be established within 10 seconds, and notice a vanished server after 30 to
/// 60 seconds.
///
/// `Display` and `Debug` show neither the password nor a hint of it.
#[derive(Clone)]
pub struct Dsn {
    /// One configuration for each host: hosts differ in more than their address, as passwords in
    /// `.pgpass` belong to a host and Unix sockets don't take TLS.
    pub(super) hosts: Vec<Config>,
    pub(super) tls: TlsOptions,
    pub(super) load_balance: bool,
}

impl Dsn {
    /// Parses a connection string.
    ///
    /// # Errors
    ///
    /// Says what is wrong when the string is malformed, has an option that is unknown or isn't
    /// supported, or when options contradict each other. Certificates aren't read yet.
    pub fn parse(text: &str) -> Result<Self, DsnError> {
        Self::parse_in(text, &Environment::of_process())
    }

    /// Takes everything from the `PG*` variables and defaults.
    ///
    /// # Errors
    ///
    /// As for [`parse`](Self::parse).
    pub fn from_env() -> Result<Self, DsnError> {
        Self::parse("")
    }

    /// Opens a connection of your own, for transactions in which you send messages, and drives it in a task that ends when
    /// the client is dropped.
    ///
    /// ```no_run
    /// # async fn f(orders: sqlstreams::Stream<String>) -> Result<(), Box<dyn std::error::Error>> {
    /// let mut db = sqlstreams::Dsn::parse("postgres://app@localhost/shop")?.connect().await?;
    /// let tx = db.transaction().await?;
    /// orders.send_in(&tx, &"placed".to_owned()).await?;
    /// tx.commit().await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// A certificate that the string names cannot be read, or no host can be connected to.
    pub async fn connect(&self) -> crate::Result<tokio_postgres::Client> {
        let connector = Connector::new(self).map_err(crate::Error::from)?;
        let opened = Connector::connect(&connector).await;
        Ok(opened.map_err(|e| crate::Error::from_connect(e, &self.to_string()))?.0)
    }

    /// The configuration for the first host.
    ///
    /// For what is the same for all hosts; to connect, use a connector.
    pub(crate) fn config(&self) -> &Config {
        // There is at least one host.
        &self.hosts[0]
    }

    fn parse_in(text: &str, environment: &Environment) -> Result<Self, DsnError> {
        let text = text.trim();
        // The protocol ends strings with a zero byte.
        let has_nul = |value: &str| value.contains('\0') || value.contains("%00");
        if has_nul(text) {
            return Err(DsnError::new("the connection string contains a zero byte"));
        }
        let mut settings = match (url::strip_scheme(text), text.split_once("://")) {
            (Some(url), _) => url::parse(url)?,
            (None, Some((scheme, _))) if !scheme.contains(['=', ' ']) => {
                return Err(DsnError::new(
                    "the connection URL has to start with postgres:// or postgresql://",
                ));
            }
            (None, _) => keyvalue::parse(text)?,
        };
        settings.add_defaults(environment);
        Self::new(&settings, environment)
    }

    fn new(settings: &Settings, environment: &Environment) -> Result<Self, DsnError> {
        let tls = TlsOptions::new(settings, environment.default_root_cert())?;
        let targets = Target::all(settings, environment)?;
        let base = base_config(settings, environment)?;
        let passfile = match settings.get("password") {
            Some(_) => None,
            None => settings
                .get("passfile")
                .map(PathBuf::from)
                .or_else(|| environment.default_passfile())
                .and_then(|path| Passfile::read(&path)),
        };

        let hosts = targets.iter().map(|target| {
            let mut config = base.clone();
            target.apply(&mut config);
            tls.apply(target.is_local(), &mut config);
            if let Some(passfile) = &passfile {
                let user = config.get_user().unwrap_or_default();
                let database = config.get_dbname().unwrap_or(user);
                let host = match environment.is_default_socket_dir(&target.host) {
                    true => "localhost",
                    false => &target.host,
                };
                if let Some(password) = passfile.password(host, target.port, database, user) {
                    config.password(password);
                }
            }
            config
        });
        let load_balance = settings
            .choice("load_balance_hosts", &[("disable", false), ("random", true)])?
            .unwrap_or(false);
        Ok(Self { hosts: hosts.collect(), tls, load_balance })
    }
}

impl fmt::Display for Dsn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("postgresql://")?;
        if let Some(user) = self.config().get_user() {
            write!(f, "{}@", Encoded(user))?;
        }
        for (index, config) in self.hosts.iter().enumerate() {
            if index > 0 {
                f.write_str(",")?;
            }
            for host in config.get_hosts() {
                match host {
                    Host::Tcp(name) if name.contains(':') => write!(f, "[{name}]")?,
                    Host::Tcp(name) => Encoded(name).fmt(f)?,
                    #[cfg(unix)]
                    Host::Unix(path) => Encoded(&path.to_string_lossy()).fmt(f)?,
                }
            }
            for port in config.get_ports() {
                write!(f, ":{port}")?;
            }
        }
        if let Some(database) = self.config().get_dbname() {
            write!(f, "/{}", Encoded(database))?;
        }
        write!(f, "?sslmode={}", self.tls.mode)
    }
}

impl fmt::Debug for Dsn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Dsn({self})")
    }
}

/// What is the same for all hosts.
fn base_config(settings: &Settings, environment: &Environment) -> Result<Config, DsnError> {
    let mut config = Config::new();

    // Without any, tokio-postgres asks the system for the user, and the server takes the user's
    // name for the database's.
    let user = settings.get("user").or_else(|| environment.user());
    if let Some(user) = user {
        config.user(user);
    }
    if let Some(database) = settings.get("dbname").or(user) {
        config.dbname(database);
    }
    if let Some(password) = settings.get("password") {
        config.password(password);
    }
    if let Some(options) = settings.get("options") {
        config.options(options);
    }
    config.application_name(
        settings
            .get("application_name")
            .or_else(|| settings.get("fallback_application_name"))
            .unwrap_or("sqlstreams"),
    );

    timeouts(settings, &mut config)?;
    session(settings, &mut config)?;
    Ok(config)
}

/// A producer whose host vanished must not hold its locks for the two hours the system's defaults
/// allow, hence stricter ones here. As in libpq a zero or less asks for the system's own.
fn timeouts(settings: &Settings, config: &mut Config) -> Result<(), DsnError> {
    let positive = |name: &str, default: i32| -> Result<Option<u32>, DsnError> {
        let value = settings.number(name)?.unwrap_or(default);
        Ok(u32::try_from(value).ok().filter(|value| *value > 0))
    };
    let seconds = |value: u32| Duration::from_secs(value.into());

    if let Some(value) = positive("connect_timeout", 10)? {
        config.connect_timeout(seconds(value));
    }
    // In milliseconds, as libpq has it; tokio-postgres's own parser takes seconds.
    if let Some(value) = positive("tcp_user_timeout", 30_000)? {
        config.tcp_user_timeout(Duration::from_millis(value.into()));
    }
    config.keepalives(settings.number("keepalives")? != Some(0));
    if let Some(value) = positive("keepalives_idle", 30)? {
        config.keepalives_idle(seconds(value));
    }
    if let Some(value) = positive("keepalives_interval", 10)? {
        config.keepalives_interval(seconds(value));
    }
    if let Some(value) = positive("keepalives_count", 3)? {
        config.keepalives_retries(value);
    }
    Ok(())
}

fn session(settings: &Settings, config: &mut Config) -> Result<(), DsnError> {
    let binding = settings.choice(
        "channel_binding",
        &[
            ("disable", ChannelBinding::Disable),
            ("prefer", ChannelBinding::Prefer),
            ("require", ChannelBinding::Require),
        ],
    )?;
    config.channel_binding(binding.unwrap_or(ChannelBinding::Prefer));

    let attributes = settings.choice(
        "target_session_attrs",
        &[
            ("any", TargetSessionAttrs::Any),
            ("read-write", TargetSessionAttrs::ReadWrite),
            ("read-only", TargetSessionAttrs::ReadOnly),
            // Here it is for writing that a primary is wanted.
            ("primary", TargetSessionAttrs::ReadWrite),
        ],
    )?;
    config.target_session_attrs(attributes.unwrap_or(TargetSessionAttrs::Any));

    let negotiation = settings.choice(
        "sslnegotiation",
        &[("postgres", SslNegotiation::Postgres), ("direct", SslNegotiation::Direct)],
    )?;
    config.ssl_negotiation(negotiation.unwrap_or_default());
    // Shuffled by the connector, which resolves names itself.
    config.load_balance_hosts(LoadBalanceHosts::Disable);

    // Nothing here speaks GSSAPI, so only a demand for it matters.
    let gss = settings.choice(
        "gssencmode",
        &[("disable", false), ("allow", false), ("prefer", false), ("require", true)],
    )?;
    if gss == Some(true) {
        return Err(DsnError::new("gssencmode=require is not supported; use TLS instead"));
    }
    match settings.get("client_encoding").map(str::to_ascii_lowercase).as_deref() {
        None | Some("utf8" | "utf-8" | "unicode" | "auto") => Ok(()),
        Some(_) => Err(DsnError::new("client_encoding has to be UTF8, or left out")),
    }
}

/// Text with all but plain characters percent-encoded.
struct Encoded<'a>(&'a str);

impl fmt::Display for Encoded<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for byte in self.0.bytes() {
            match byte {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => {
                    write!(f, "{}", char::from(byte))?;
                }
                byte => write!(f, "%{byte:02X}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tokio_postgres::config::SslMode;

    use super::*;

    fn parse(text: &str) -> Result<Dsn, DsnError> {
        Dsn::parse_in(text, &Environment::default())
    }

    #[test]
    fn both_forms_mean_the_same() {
        for text in [
            "postgres://alice:p%20w@db:6432/app?sslmode=require",
            " postgresql://alice:p%20w@db:6432/app?sslmode=require\n",
            "host=db port=6432 user=alice password='p w' dbname=app sslmode=require",
        ] {
            let dsn = parse(text).unwrap();
            assert_eq!(dsn.config().get_password(), Some(b"p w".as_slice()));
            assert_eq!(dsn.to_string(), "postgresql://alice@db:6432/app?sslmode=require");
        }
    }

    #[test]
    fn defaults() {
        let dsn = parse("").unwrap();
        let config = dsn.config();
        assert_eq!(dsn.to_string(), "postgresql://localhost:5432?sslmode=prefer");
        assert_eq!(config.get_application_name(), Some("sqlstreams"));
        assert_eq!(config.get_connect_timeout(), Some(&Duration::from_secs(10)));
        assert_eq!(config.get_tcp_user_timeout(), Some(&Duration::from_secs(30)));
        assert!(config.get_keepalives());
        assert_eq!(config.get_keepalives_idle(), Duration::from_secs(30));
        assert_eq!(config.get_keepalives_interval(), Some(Duration::from_secs(10)));
        assert_eq!(config.get_keepalives_retries(), Some(3));
    }

    #[test]
    fn timeouts_can_be_set_and_switched_off() {
        let dsn = parse(
            "connect_timeout=3 tcp_user_timeout=500 keepalives_idle=7 keepalives_retries=9 \
             keepalives=0",
        )
        .unwrap();
        let config = dsn.config();
        assert_eq!(config.get_connect_timeout(), Some(&Duration::from_secs(3)));
        assert_eq!(config.get_tcp_user_timeout(), Some(&Duration::from_millis(500)));
        assert_eq!(config.get_keepalives_idle(), Duration::from_secs(7));
        assert_eq!(config.get_keepalives_retries(), Some(9));
        assert!(!config.get_keepalives());
        let off = parse("connect_timeout=0 tcp_user_timeout=-1").unwrap();
        assert_eq!(off.config().get_connect_timeout(), None);
        assert_eq!(off.config().get_tcp_user_timeout(), None);
    }

    #[test]
    fn variables_fill_what_is_left_out() {
        let environment = Environment::default()
            .with("USER", "os")
            .with("PGHOST", "envhost")
            .with("PGPORT", "6000")
            .with("PGPASSWORD", "envpw")
            .with("PGSSLMODE", "require")
            .with("PGAPPNAME", "envapp")
            .with("PGCONNECT_TIMEOUT", "4");
        let show = |text: &str| Dsn::parse_in(text, &environment).unwrap().to_string();
        assert_eq!(show(""), "postgresql://os@envhost:6000/os?sslmode=require");
        assert_eq!(
            show("postgres://me@h:1/d?sslmode=disable"),
            "postgresql://me@h:1/d?sslmode=disable"
        );
        assert_eq!(show("user=me"), "postgresql://me@envhost:6000/me?sslmode=require");
        assert_eq!(
            show("host='' port='' sslmode=''"),
            "postgresql://os@localhost:5432/os?sslmode=prefer",
            "an empty value asks for the built-in default"
        );
        let config = Dsn::parse_in("", &environment).unwrap().config().clone();
        assert_eq!(config.get_password(), Some(b"envpw".as_slice()));
        assert_eq!(config.get_application_name(), Some("envapp"));
        assert_eq!(config.get_connect_timeout(), Some(&Duration::from_secs(4)));
        assert!(Dsn::parse_in("", &Environment::default().with("PGPORT", "x")).is_err());
    }

    #[cfg(unix)]
    #[test]
    fn each_host_has_its_own_password_and_tls() {
        use std::os::unix::fs::PermissionsExt;
        let path = std::env::temp_dir().join(format!("sqlstreams-dsn-{}", std::process::id()));
        std::fs::write(&path, "a:5432:d:u:pa\nlocalhost:5432:d:u:ps\n*:1:d:u:pb\n").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        let environment = Environment::default()
            .with("PGPASSFILE", path.to_str().unwrap())
            .with_socket_dir("/var/run/postgresql".as_ref());
        let text = "host=a,/var/run/postgresql,b,c port=,,1, user=u dbname=d sslmode=require";
        let dsn = Dsn::parse_in(text, &environment).unwrap();
        let given = Dsn::parse_in(&format!("{text} password=x"), &environment).unwrap();
        std::fs::remove_file(&path).unwrap();

        let passwords: Vec<_> = dsn.hosts.iter().map(Config::get_password).collect();
        assert_eq!(
            passwords,
            [Some(b"pa".as_slice()), Some(b"ps".as_slice()), Some(b"pb".as_slice()), None]
        );
        assert!(given.hosts.iter().all(|config| config.get_password() == Some(b"x".as_slice())));
        let modes: Vec<_> = dsn.hosts.iter().map(Config::get_ssl_mode).collect();
        assert_eq!(modes, [SslMode::Require, SslMode::Disable, SslMode::Require, SslMode::Require]);
    }

    #[test]
    fn neither_display_nor_debug_shows_the_password() {
        let dsn =
            parse("postgres://alice:s3cret@[::1]:1,b/a%20b?host=%2Ftmp,::1&port=1,2").unwrap();
        assert_eq!(dsn.to_string(), "postgresql://alice@%2Ftmp:1,[::1]:2/a%20b?sslmode=prefer");
        assert!(!format!("{dsn:?} {:?}", dsn.config()).contains("s3cret"));
    }

    #[test]
    fn what_providers_hand_out() {
        for text in [
            "postgresql://u:p@ep-x-1-pooler.eu.example.com/neondb?sslmode=require&channel_binding=require",
            "postgres://u.ref:p@aws-0.pooler.example.com:6543/postgres",
            "postgres://u:p@h.example.com:25060/defaultdb?sslmode=require",
            "postgresql://u:p@h.example.com:26257/defaultdb?sslmode=verify-full",
            "postgresql://u:p@h.example.com/d?sslmode=verify-full&sslrootcert=system&sslnegotiation=direct",
            "host=h.postgres.example.com port=5432 dbname=d user=u@server password='p' sslmode=require",
            "postgresql://u:p@a:1,b:2,c/d?target_session_attrs=read-write&load_balance_hosts=random",
            "postgres://u:p@h/d?gssencmode=prefer&client_encoding=UTF8&krbsrvname=postgres",
        ] {
            if let Err(error) = parse(text) {
                panic!("{text}: {error}");
            }
        }
    }

    #[test]
    fn refused() {
        for text in [
            "mysql://h/d",
            "postgres+psycopg://h/d",
            "http://postgres@h/d",
            "mydb",
            "user=a\0b",
            "postgres://a%00b@h/d",
            "sslmode=always",
            "channel_binding=maybe",
            "target_session_attrs=standby",
            "gssencmode=require",
            "client_encoding=latin1",
            "connect_timeout=soon",
            "connect_timeout=99999999999",
            "load_balance_hosts=yes",
            "sslrootcert=system sslmode=require",
            "sslnegotiation=direct sslmode=prefer",
            "sslcert=/x",
            "sslpassword=x",
            "service=x",
            "postgres://h:99999/d",
            "postgres://h:port/d",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_parsed_or_refused(text in any::<String>()) {
            let _ = parse(&text);
        }

        #[test]
        fn any_url_is_parsed_or_refused(text in "[a-z0-9:/?@%,=&\\[\\] '\\\\#é.-]{0,60}") {
            let _ = parse(&format!("postgres://{text}"));
            let _ = parse(&text);
        }

        #[test]
        fn any_option_is_parsed_or_refused(
            name in "sslmode|sslrootcert|port|host|hostaddr|connect_timeout|options|keepalives",
            value in any::<String>(),
        ) {
            let escaped = value.replace('\\', "\\\\").replace('\'', "\\'");
            let _ = parse(&format!("{name}='{escaped}'"));
        }

        #[test]
        fn an_encoded_password_comes_back(password in "[^\0]{1,20}") {
            let dsn = parse(&format!("postgres://u:{}@h/d", Encoded(&password))).unwrap();
            prop_assert_eq!(dsn.config().get_password(), Some(password.as_bytes()));
            prop_assert_eq!(dsn.to_string(), "postgresql://u@h:5432/d?sslmode=prefer");
        }
    }
}
