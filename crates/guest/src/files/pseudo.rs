//! Keeps walks out of file systems that hold no files but views of the kernel: they are large, never at rest, and nobody
//! who asks for a tree of files means them.

use std::{collections::HashMap, fs::Metadata, os::unix::fs::MetadataExt, path::Path};

use nix::{errno::Errno, sys::statfs::statfs};

/// Magic numbers of such file systems. Source: linux/magic.h and statfs(2); fusectl and rpc_pipefs from their own code.
const PSEUDO: [u32; 20] = [
    0x9FA0,      // proc
    0x6265_6572, // sysfs
    0x6367_7270, // cgroup2
    0x0027_E0EB, // cgroup
    0x1CD1,      // devpts
    0x6462_6720, // debugfs
    0x7472_6163, // tracefs
    0x7363_6673, // securityfs
    0xF97C_FF8C, // selinuxfs
    0x4341_5D53, // smackfs
    0x5A3C_69F0, // apparmorfs
    0xCAFE_4A11, // bpf
    0x6165_676C, // pstore
    0x6265_6570, // configfs
    0xDE5E_81E4, // efivarfs
    0x4249_4E4D, // binfmt_misc
    0x6E73_6673, // nsfs
    0x1980_0202, // mqueue
    0x6573_5543, // fusectl
    0x6759_6969, // rpc_pipefs
];

/// The border of one walk. What the walk starts in belongs to it, even a pseudo file system.
#[derive(Debug)]
pub struct Border {
    root_magic: u32,
    /// Whether a device may be entered. Asked once for each, since every answer is a system call.
    devices: HashMap<u64, bool>,
}

impl Border {
    /// The border of a walk that starts at the directory `root`.
    ///
    /// # Errors
    /// Those of statfs(2).
    pub fn around(root: &Path, meta: &Metadata) -> Result<Self, Errno> {
        Ok(Self {
            root_magic: magic(root)?,
            devices: HashMap::from([(meta.dev(), true)]),
        })
    }

    /// Whether the directory `path`, whose own metadata is `meta`, may be entered. Not if that cannot be known.
    pub fn admits(&mut self, path: &Path, meta: &Metadata) -> bool {
        let root_magic = self.root_magic;
        *self.devices.entry(meta.dev()).or_insert_with(|| {
            magic(path).is_ok_and(|magic| magic == root_magic || !PSEUDO.contains(&magic))
        })
    }
}

/// The type is as wide as a C long and signed, the numbers are 32 bits: cut to compare.
fn magic(path: &Path) -> Result<u32, Errno> {
    Ok(statfs(path)?.filesystem_type().0 as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::metadata;

    #[test]
    fn proc_is_entered_only_from_within() {
        let (proc, sys, root) = (Path::new("/proc"), Path::new("/sys"), Path::new("/"));
        let mut outside = Border::around(root, &metadata(root).unwrap()).unwrap();
        assert!(outside.admits(root, &metadata(root).unwrap()));
        assert!(!outside.admits(proc, &metadata(proc).unwrap()));
        assert!(!outside.admits(sys, &metadata(sys).unwrap()));
        let mut inside = Border::around(proc, &metadata(proc).unwrap()).unwrap();
        let below = proc.join("sys");
        assert!(inside.admits(&below, &metadata(&below).unwrap()));
        assert!(!inside.admits(sys, &metadata(sys).unwrap()));
    }

    #[test]
    fn ordinary_mounts_are_entered() {
        let (root, dir) = (Path::new("/sys"), tempfile::tempdir().unwrap());
        let mut border = Border::around(root, &metadata(root).unwrap()).unwrap();
        assert!(border.admits(dir.path(), &metadata(dir.path()).unwrap()));
    }
}
