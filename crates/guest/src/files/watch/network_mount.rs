//! Tells file systems whose content others change behind the kernel's back, where inotify stays silent.

use std::path::Path;

use nix::{errno::Errno, sys::statfs::statfs};

/// Magic numbers of network and user-space file systems. Source: linux/magic.h, statfs(2), and the file systems' own
/// headers (Lustre, GPFS).
const NETWORK: [u32; 14] = [
    0x6969,      // NFS
    0x517B,      // SMB
    0xFF53_4D42, // CIFS
    0xFE53_4D42, // SMB2
    0x6573_5546, // FUSE, virtiofs
    0x0102_1997, // 9p
    0x00C3_6400, // Ceph
    0x5346_414F, // AFS
    0x6B41_4653, // kAFS
    0x7375_7245, // Coda
    0x564C,      // NCP
    0x7461_636F, // OCFS2
    0x0BD0_0BD0, // Lustre
    0x4750_4653, // GPFS
];

/// Whether `path` is on such a file system.
///
/// # Errors
/// Those of statfs(2).
pub fn is_network(path: &Path) -> Result<bool, Errno> {
    // The type is as wide as a C long and signed, the numbers are 32 bits: cut to compare.
    let magic = statfs(path)?.filesystem_type().0 as u32;
    Ok(NETWORK.contains(&magic))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proc_is_local_and_missing_is_an_error() {
        assert_eq!(is_network(Path::new("/proc")), Ok(false));
        assert_eq!(is_network(Path::new("/proc/none")), Err(Errno::ENOENT));
    }
}
