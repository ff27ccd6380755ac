//! The account a server runs under.
//!
//! PostgreSQL refuses to run as root, so root's servers run under another
//! account. A plain user's servers run as that user.

use std::fs;
use std::os::unix::fs::{MetadataExt, chown};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use crate::error::{Context, Error, Result};

/// Accounts root may run a server under, best first.
const ACCOUNTS: [&str; 2] = ["postgres", "nobody"];

/// Who runs the server programs.
#[derive(Clone, Debug)]
pub(crate) enum ServerUser {
    /// The user of this process.
    Current,
    /// Another account, as this process is root.
    Account { name: String, uid: u32, gid: u32 },
}

impl ServerUser {
    /// Picks the account for servers started by this process.
    pub(crate) fn pick() -> Result<Self> {
        if !rustix::process::geteuid().is_root() {
            return Ok(Self::Current);
        }
        let passwd = fs::read_to_string("/etc/passwd").doing(|| "read /etc/passwd".to_owned())?;
        ACCOUNTS.iter().find_map(|name| account(&passwd, name)).ok_or(Error::NoAccount)
    }

    /// Makes `command` run under this account.
    ///
    /// With a user id set, std also drops root's supplementary groups.
    pub(crate) fn apply(&self, command: &mut Command) {
        if let Self::Account { uid, gid, .. } = self {
            command.uid(*uid).gid(*gid);
        }
    }

    /// Gives a file or folder to this account.
    pub(crate) fn own(&self, path: &Path) -> Result<()> {
        match self {
            Self::Current => Ok(()),
            Self::Account { name, uid, gid } => chown(path, Some(*uid), Some(*gid))
                .doing(|| format!("give {} to the account {name}", path.display())),
        }
    }

    /// Makes sure this account can enter `folder`, which must be absolute.
    pub(crate) fn check_enter(&self, folder: &Path) -> Result<()> {
        let Self::Account { name, uid, gid } = self else {
            return Ok(());
        };
        for ancestor in folder.ancestors() {
            let meta = fs::metadata(ancestor)
                .doing(|| format!("look at the folder {}", ancestor.display()))?;
            let execute = if meta.uid() == *uid {
                0o100
            } else if meta.gid() == *gid {
                0o010
            } else {
                0o001
            };
            if meta.mode() & execute == 0 {
                return Err(Error::NotEnterable {
                    folder: ancestor.to_path_buf(),
                    account: name.clone(),
                });
            }
        }
        Ok(())
    }

    /// How to call this account in a message.
    pub(crate) fn name(&self) -> &str {
        match self {
            Self::Current => "the current user",
            Self::Account { name, .. } => name,
        }
    }
}

/// Finds an account in the text of a passwd file.
fn account(passwd: &str, wanted: &str) -> Option<ServerUser> {
    passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        let uid = id(fields.nth(1)?)?;
        let gid = id(fields.next()?)?;
        (name == wanted && uid != 0).then(|| ServerUser::Account {
            name: name.to_owned(),
            uid,
            gid,
        })
    })
}

/// Reads a user or group id; macOS writes that of `nobody` as -2.
fn id(text: &str) -> Option<u32> {
    text.parse().ok().or_else(|| Some(text.parse::<i32>().ok()?.cast_unsigned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/bash\n# comment\n\
        nobody:*:-2:-2:Unprivileged User:/var/empty:/usr/bin/false\n\
        postgres:x:101:104:,,,:/var/lib/postgresql:/bin/bash\n";

    #[test]
    fn finds_accounts_by_exact_name() {
        let Some(ServerUser::Account { uid, gid, .. }) = account(PASSWD, "postgres") else {
            panic!("not found");
        };
        assert_eq!((uid, gid), (101, 104));
        assert!(account(PASSWD, "post").is_none());
    }

    #[test]
    fn reads_negative_ids() {
        let Some(ServerUser::Account { uid, .. }) = account(PASSWD, "nobody") else {
            panic!("not found");
        };
        assert_eq!(uid, u32::MAX - 1);
    }

    #[test]
    fn never_picks_root() {
        assert!(account(PASSWD, "root").is_none());
    }
}
