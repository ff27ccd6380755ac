//! Passwords, and files for their owner alone.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::error::{Context, Result};

/// 144 random bits in hexadecimal, fit for a URL as it is.
pub(crate) fn random_password() -> io::Result<String> {
    let mut random = [0; 18];
    File::open("/dev/urandom")?.read_exact(&mut random)?;
    Ok(random.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// A name for a folder that nobody can guess.
pub(crate) fn random_name() -> io::Result<String> {
    random_password().map(|random| random[..16].to_owned())
}

/// Writes a file only its owner can read, in the place of an older one.
pub(crate) fn write_private(path: &Path, text: &str) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?
        .write_all(text.as_bytes())
}

/// Opens a file to lock; only its owner can, so nobody else can hold it locked.
pub(crate) fn open_lock(path: &Path) -> Result<File> {
    OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(path)
        .doing(|| format!("open {}", path.display()))
}
