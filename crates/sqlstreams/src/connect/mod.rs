//! Connection strings and the connections opened with them.
//!
//! tokio-postgres reads connection strings too, but refuses `sslmode=verify-full`, `verify-ca` and
//! `sslrootcert`, which hosted providers hand out, and knows neither the `PG*` variables nor
//! `.pgpass`. This module reads what libpq reads, so that a string which works in `psql` works
//! here, and means the same.
//!
//! * [`Dsn`] is a parsed string: one tokio-postgres configuration per host, and how to do TLS.
//! * [`Connector`] has read the certificates a [`Dsn`] names and opens connections.
//!
//! # TLS
//!
//! | `sslmode`           | `sslrootcert` | encrypted         | certificate                       |
//! | ------------------- | ------------- | ----------------- | --------------------------------- |
//! | `disable`           | –             | no                | –                                 |
//! | `allow`, `prefer`   | –             | when possible     | unchecked                         |
//! | `allow`, `prefer`   | a file        | when possible     | chain checked                     |
//! | `require`           | –             | yes               | unchecked                         |
//! | `require`           | a file        | yes               | chain checked                     |
//! | `verify-ca`         | a file        | yes               | chain checked                     |
//! | `verify-full`       | a file        | yes               | chain and host name checked       |
//! | `verify-full`       | `system` or – | yes               | chain and host name checked       |
//!
//! That is libpq's table, for libpq's reasons: many providers sign with a CA of their own, so
//! `require` has to connect without knowing it. It protects against listening, not against a
//! server that poses as another; `verify-full` does both. An unchecked certificate still has to
//! belong to the key that signed the handshake.
//!
//! As in libpq, `~/.postgresql/root.crt`, where it exists, stands for a missing `sslrootcert` from
//! `require` upwards; `sslrootcert=system` alone means `verify-full`, and is refused together with
//! anything weaker; Unix sockets are never encrypted. Four things differ:
//!
//! * `allow` is taken for `prefer`: it encrypts where libpq would not have.
//! * Plain text never follows a refused certificate, not even with `prefer`.
//! * `verify-full` without any root file uses the system's roots, where libpq gives up.
//! * The host name has to be among the certificate's alternative names; a common name alone, which
//!   libpq falls back to, isn't enough for rustls.

mod connector;
mod dsn;
mod environment;
mod error;
mod hosts;
mod keyvalue;
#[cfg(test)]
#[cfg(unix)]
mod live_tests;
mod passfile;
mod settings;
mod tls;
mod url;
mod verifier;

pub(crate) use self::connector::{Connector, Driver, timed_out};
pub use self::dsn::Dsn;
pub use self::error::DsnError;
