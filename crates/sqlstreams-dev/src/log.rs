//! A server's log file: what it said since some moment, and the last of that.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use crate::error::{Context, Result};

/// How many lines an error shows.
const LINES: usize = 15;

/// A log file and the length it had when something was started.
pub(crate) struct LogMark {
    path: PathBuf,
    from: u64,
}

impl LogMark {
    /// Marks the present end of a log, which needn't exist yet.
    pub(crate) fn new(path: &Path) -> Self {
        Self { path: path.to_path_buf(), from: fs::metadata(path).map_or(0, |meta| meta.len()) }
    }

    /// The log for a program's output and for its errors.
    pub(crate) fn outputs(&self) -> Result<(Stdio, Stdio)> {
        let doing = || format!("open the log {}", self.path.display());
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            // Statements and their data may be in it.
            .mode(0o600)
            .open(&self.path)
            .doing(doing)?;
        let copy: File = file.try_clone().doing(doing)?;
        Ok((file.into(), copy.into()))
    }

    /// All that was written since the mark.
    pub(crate) fn text(&self) -> String {
        let mut bytes = Vec::new();
        if let Ok(mut file) = File::open(&self.path)
            && file.seek(SeekFrom::Start(self.from)).is_ok()
        {
            // What could be read is better than nothing.
            let _ = file.read_to_end(&mut bytes);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The last lines written since the mark, indented.
    pub(crate) fn tail(&self) -> String {
        let text = self.text();
        let lines: Vec<&str> = text.lines().collect();
        if lines.is_empty() {
            return "  (nothing)".to_owned();
        }
        let last = &lines[lines.len().saturating_sub(LINES)..];
        format!("  {}", last.join("\n  "))
    }
}
