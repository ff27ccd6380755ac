//! Cleans up after a process that can't do it itself any more.

use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};

use crate::error::{Context, Result};

/// A shell that waits for this process to end, however it ends.
///
/// It reads from a pipe whose other end only this process holds: std opens it
/// close-on-exec, so no server inherits it.
#[derive(Debug)]
pub(crate) struct Watchdog {
    shell: Child,
    pipe: Option<ChildStdin>,
}

impl Watchdog {
    /// Sets a watchdog on a folder that is to go with this process.
    pub(crate) fn set(dir: &Path, data_dir: &Path) -> Result<Self> {
        let mut shell = Command::new("/bin/sh")
            .args(["-c", include_str!("watchdog.sh"), "sqlstreams-watchdog"])
            .arg(dir)
            .arg(data_dir)
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .doing(|| "start the shell that cleans up".to_owned())?;
        let pipe = shell.stdin.take();
        Ok(Self { shell, pipe })
    }

    /// Tells it of a process that must not outlive this one.
    pub(crate) fn tell(&mut self, pid: u32) {
        // Without the shell there's still Drop.
        let _: io::Result<()> = match &mut self.pipe {
            Some(pipe) => writeln!(pipe, "{pid}"),
            None => Ok(()),
        };
    }

    /// Has it do its work now, and waits for that.
    pub(crate) fn finish(&mut self) {
        drop(self.pipe.take());
        let _ = self.shell.wait();
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.finish();
    }
}
