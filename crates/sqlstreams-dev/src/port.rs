//! Free TCP ports.

use std::fs::File;
use std::io::{self, Read};
use std::net::{Ipv4Addr, TcpListener};

/// Below the range systems hand out to outgoing connections (from 32768 on
/// Linux, 49152 on macOS).
///
/// A port from that range can be lost while a server restarts: to any outgoing
/// connection, and even to a client of that very server, as a connection to a
/// local port nobody listens at may be given that port as its own and so
/// connect to itself.
const FIRST: u16 = 16_384;
const COUNT: u16 = 16_000;

/// A port on 127.0.0.1 that nobody listens at now.
pub(crate) fn free_port() -> io::Result<u16> {
    for _ in 0..50 {
        let mut random = [0; 2];
        File::open("/dev/urandom")?.read_exact(&mut random)?;
        let port = FIRST + u16::from_ne_bytes(random) % COUNT;
        if is_free(port) {
            return Ok(port);
        }
    }
    // Nearly everything taken: let the system choose from its own range.
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

/// Whether nobody listens at a port on 127.0.0.1.
pub(crate) fn is_free(port: u16) -> bool {
    TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok()
}
