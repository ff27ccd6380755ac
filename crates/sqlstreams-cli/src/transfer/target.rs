//! Where an export is written: a file that appears when it is whole, or stdout.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::Context as _;

use crate::failure::Failure;
use crate::output::closed;

const BUFFER: usize = 1024 * 1024;

/// A file under another name until it is whole. Dropped before, it is removed.
#[derive(Debug)]
pub(crate) struct NewFile {
    /// None when it has got its name.
    file: Option<BufWriter<File>>,
    temporary: PathBuf,
    name: PathBuf,
    /// Whether one of that name may be there.
    replace: bool,
}

impl NewFile {
    /// In the folder that it is to be in. One of that name may only be there if it is to be replaced.
    pub(crate) fn create(name: &Path, replace: bool) -> anyhow::Result<Self> {
        if !replace && name.symlink_metadata().is_ok() {
            return Err(Failure::failed(
                "file_exists",
                format!("{} exists already", name.display()),
            )
            .hint("Choose another name, or pass --overwrite.")
            .into());
        }
        if name.metadata().is_ok_and(|found| !found.is_file()) {
            let text = format!("{} is no file that could be replaced", name.display());
            return Err(Failure::failed("file_exists", text)
                .hint("Leave --output out, and redirect stdout.")
                .into());
        }
        let Some(file_name) = name.file_name() else {
            let text = format!("{} is no name of a file", name.display());
            return Err(Failure::usage("usage", text).into());
        };
        let mut temporary = std::ffi::OsString::from(".");
        temporary.push(file_name);
        temporary.push(format!(".{}.part", std::process::id()));
        let temporary = name.with_file_name(temporary);
        let file = OpenOptions::new().write(true).create_new(true).open(&temporary);
        let file = file.with_context(|| format!("could not create {}", temporary.display()))?;
        Ok(Self {
            file: Some(BufWriter::with_capacity(BUFFER, file)),
            temporary,
            name: name.to_owned(),
            replace,
        })
    }

    /// On disk, whole, and under its name.
    pub(crate) fn finish(mut self) -> anyhow::Result<()> {
        let failed = || format!("could not write {}", self.name.display());
        let file = self.file.take();
        if let Some(file) = file {
            let synced = file.into_inner().map_err(io::IntoInnerError::into_error);
            let synced = synced.and_then(|file| file.sync_all());
            // Somebody may have made one of that name meanwhile.
            let renamed = synced.and_then(|()| match self.replace {
                true => fs::rename(&self.temporary, &self.name),
                false => fs::hard_link(&self.temporary, &self.name)
                    .and_then(|()| fs::remove_file(&self.temporary)),
            });
            if renamed.is_err() {
                let _ = fs::remove_file(&self.temporary);
            }
            renamed.with_context(failed)?;
            // So that the name survives a crash as well.
            let folder = self.name.parent().filter(|folder| !folder.as_os_str().is_empty());
            let folder = File::open(folder.unwrap_or(Path::new(".")));
            folder.and_then(|folder| folder.sync_all()).with_context(failed)?;
        }
        Ok(())
    }
}

impl Write for NewFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.as_mut().map_or(Ok(0), |file| file.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.as_mut().map_or(Ok(()), Write::flush)
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if self.file.take().is_some() {
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

/// A file, or stdout.
#[derive(Debug)]
pub(crate) enum Target {
    File(NewFile),
    Stdout(BufWriter<io::Stdout>),
}

impl Target {
    pub(crate) fn stdout() -> Self {
        Self::Stdout(BufWriter::with_capacity(BUFFER, io::stdout()))
    }

    /// Everything that was written is where it belongs.
    pub(crate) fn finish(self) -> anyhow::Result<()> {
        match self {
            Self::File(file) => file.finish(),
            Self::Stdout(mut out) => out.flush().map_err(closed),
        }
    }

    /// An error of writing to it.
    pub(crate) fn failed(is_stdout: bool, error: io::Error) -> anyhow::Error {
        match is_stdout {
            true => closed(error),
            false => anyhow::Error::from(error).context("could not write the file"),
        }
    }
}

impl Write for Target {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::File(file) => file.write(bytes),
            Self::Stdout(out) => out.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::File(file) => file.flush(),
            Self::Stdout(out) => out.flush(),
        }
    }
}
