//! Mounts NFS volumes with the mount system call, since the image may have no `mount.nfs`. The kernel must have NFS.

use std::{fs, io, net::IpAddr, path::Path};

use nix::mount::{mount, MsFlags};
use serde::Deserialize;

/// A volume that `/init` asks for.
#[derive(Clone, Debug, Deserialize)]
pub struct VolumeMount {
    /// `<address>:<exported path>`; an address and no name, because nobody in a static binary resolves names.
    pub nfs_target: String,
    pub path: String,
}

/// Why a volume cannot be mounted.
#[derive(Debug)]
pub enum VolumeError {
    /// The request makes no sense.
    Invalid(String),
    Failed(String),
}

impl VolumeMount {
    /// Mounts the volume; does nothing when something is mounted at its path already.
    pub fn mount(&self) -> Result<(), VolumeError> {
        let address = self.address()?;
        let failed = |error: io::Error| {
            VolumeError::Failed(format!(
                "cannot mount {} at {}: {error}",
                self.nfs_target, self.path
            ))
        };
        let mounts = fs::read_to_string("/proc/self/mounts").map_err(failed)?;
        if is_mounted(&mounts, &self.path) {
            return Ok(());
        }
        fs::create_dir_all(&self.path).map_err(failed)?;
        let options = format!(
            "vers=3,proto=tcp,port=2049,mountproto=tcp,mountport=2049,nolock,addr={address}"
        );
        mount(
            Some(self.nfs_target.as_str()),
            self.path.as_str(),
            Some("nfs"),
            MsFlags::empty(),
            Some(options.as_str()),
        )
        .map_err(|errno| failed(errno.into()))
    }

    fn address(&self) -> Result<IpAddr, VolumeError> {
        let (host, export) = self.nfs_target.rsplit_once(":/").ok_or_else(|| {
            VolumeError::Invalid(format!("'{}' is not address:/path", self.nfs_target))
        })?;
        if !Path::new(&self.path).is_absolute() || export.contains(',') {
            return Err(VolumeError::Invalid(format!(
                "'{}' cannot be a mount point",
                self.path
            )));
        }
        host.trim_matches(['[', ']'])
            .parse()
            .map_err(|_| VolumeError::Invalid(format!("'{host}' is not an IP address")))
    }
}

fn is_mounted(mounts: &str, path: &str) -> bool {
    let path = path.trim_end_matches('/').replace(' ', "\\040");
    mounts
        .lines()
        .any(|line| line.split(' ').nth(1) == Some(path.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_need_an_address_and_an_absolute_path() {
        let address = |target: &str, path: &str| {
            let volume = VolumeMount {
                nfs_target: target.into(),
                path: path.into(),
            };
            volume.address().ok().map(|address| address.to_string())
        };
        assert_eq!(address("10.0.0.1:/v", "/mnt").as_deref(), Some("10.0.0.1"));
        assert_eq!(address("[fd00::1]:/v", "/mnt").as_deref(), Some("fd00::1"));
        assert_eq!(address("host:/v", "/mnt"), None);
        assert_eq!(address("10.0.0.1", "/mnt"), None);
        assert_eq!(address("10.0.0.1:/v", "mnt"), None);
    }

    #[test]
    fn mount_points_are_compared_whole() {
        let mounts = "a /mnt/x nfs rw 0 0\nb /with\\040space nfs rw 0 0\n";
        assert!(is_mounted(mounts, "/mnt/x/") && is_mounted(mounts, "/with space"));
        assert!(!is_mounted(mounts, "/mnt"));
    }
}
