//! File systems: those of the initramfs, the root disk, the move into it, and those that programs expect there.
//!
//! The root file system may be almost empty: missing mount points are created.

use std::{
    fs, io,
    os::unix::fs::{symlink, PermissionsExt},
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{bail, Context, Result};
use nix::{
    errno::Errno,
    mount::{mount, umount2, MntFlags, MsFlags},
    unistd::{chdir, chroot},
};

use super::{device::Events, log};

const NEW_ROOT: &str = "/newroot";
const CARRIED: [&str; 3] = ["/dev", "/proc", "/sys"];

/// Mounts what booting itself needs, in the initramfs.
pub fn mount_early() -> Result<()> {
    for (kind, target, flags, data) in [
        ("devtmpfs", "/dev", MsFlags::MS_NOSUID, Some("mode=0755")),
        ("proc", "/proc", hardened(), None),
        ("sysfs", "/sys", hardened(), None),
    ] {
        mount_at(kind, Path::new(target), flags, data)?;
    }
    Ok(())
}

/// Mounts the root disk at the place where `switch_root` expects it, waiting for the disk to appear.
///
/// A disk that refuses writing is mounted read-only. Inode tables are not zeroed in the background, because that would
/// make every sandbox write megabytes that nobody asked for.
pub fn mount_root(disk: &str, events: &mut Events, deadline_s: u64) -> Result<()> {
    fs::create_dir_all(NEW_ROOT)?;
    let deadline = Instant::now() + Duration::from_secs(deadline_s);
    let mut flags = MsFlags::MS_NOATIME;
    let mut data = Some("noinit_itable");
    loop {
        match mount(Some(disk), NEW_ROOT, Some("ext4"), flags, data) {
            Ok(()) => return Ok(()),
            Err(Errno::ENOENT | Errno::ENXIO | Errno::ENOMEDIUM) => {
                if !events.wait("block", deadline)? {
                    bail!("the root disk {disk} did not appear within {deadline_s} s");
                }
            }
            Err(Errno::EROFS | Errno::EACCES) if !flags.contains(MsFlags::MS_RDONLY) => {
                log::warn(&format!("{disk} cannot be written, mounting it read-only"));
                flags |= MsFlags::MS_RDONLY;
            }
            Err(Errno::EINVAL) if data.is_some() => data = None,
            Err(error) => return Err(error).with_context(|| format!("mounting {disk} as ext4")),
        }
    }
}

/// Makes the mounted root disk `/`, taking `/dev`, `/proc` and `/sys` along. What was `/` is out of reach after it.
pub fn switch_root() -> Result<()> {
    for source in CARRIED {
        let target = format!("{NEW_ROOT}{source}");
        ensure_directory(Path::new(&target))?;
        mount(
            Some(source),
            target.as_str(),
            None::<&str>,
            MsFlags::MS_MOVE,
            None::<&str>,
        )
        .with_context(|| format!("moving {source}"))?;
    }
    chdir(NEW_ROOT)?;
    mount(Some("."), "/", None::<&str>, MsFlags::MS_MOVE, None::<&str>)
        .context("moving the root")?;
    chroot(".")?;
    chdir("/")?;
    Ok(())
}

/// Mounts what programs expect besides, and makes the usual links. Failures are logged: a guest without `/dev/shm` is
/// better than none.
pub fn mount_late() {
    let no_exec = hardened();
    let shared = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    let table = [
        (
            "devpts",
            "/dev/pts",
            MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC,
            Some("gid=5,mode=620,ptmxmode=666"),
        ),
        ("tmpfs", "/dev/shm", shared, Some("mode=1777")),
        ("mqueue", "/dev/mqueue", no_exec, None),
        ("tmpfs", "/run", shared, Some("mode=0755")),
        (
            "cgroup2",
            "/sys/fs/cgroup",
            no_exec,
            Some("nsdelegate,memory_recursiveprot"),
        ),
    ];
    for (kind, target, flags, data) in table {
        if let Err(error) = mount_at(kind, Path::new(target), flags, data) {
            log::warn(&format!("{error:#}"));
        }
    }
    for (directory, mode) in [("/run/lock", 0o1777), ("/run/agentenv", 0o755)] {
        if let Err(error) = make_directory(Path::new(directory), mode) {
            log::warn(&format!("{directory}: {error}"));
        }
    }
    if let Err(error) = ensure_temporary_directory(Path::new("/tmp")) {
        log::warn(&format!("/tmp: {error:#}"));
    }
    for (link, target) in [
        ("/dev/fd", "/proc/self/fd"),
        ("/dev/stdin", "/proc/self/fd/0"),
        ("/dev/stdout", "/proc/self/fd/1"),
        ("/dev/stderr", "/proc/self/fd/2"),
        ("/etc/mtab", "/proc/self/mounts"),
    ] {
        match symlink(target, link) {
            Err(error)
                if !matches!(
                    error.kind(),
                    io::ErrorKind::AlreadyExists | io::ErrorKind::NotFound
                ) =>
            {
                log::warn(&format!("{link}: {error}"));
            }
            _ => {}
        }
    }
}

/// Unmounts what can be unmounted and makes the root read-only, so that the disk is clean.
pub fn unmount_all() {
    let mounts = fs::read_to_string("/proc/mounts").unwrap_or_default();
    let targets = mounts.lines().filter_map(|line| line.split(' ').nth(1));
    for target in targets.collect::<Vec<_>>().into_iter().rev() {
        let kept = target == "/"
            || CARRIED
                .iter()
                .any(|root| Path::new(target).starts_with(root));
        if !kept {
            let _ = umount2(target, MntFlags::MNT_DETACH);
        }
    }
    let read_only = MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
    if let Err(error) = mount(None::<&str>, "/", None::<&str>, read_only, None::<&str>) {
        log::warn(&format!("making the root read-only: {error}"));
    }
}

fn hardened() -> MsFlags {
    MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC | MsFlags::MS_NODEV
}

fn mount_at(kind: &str, target: &Path, flags: MsFlags, data: Option<&str>) -> Result<()> {
    ensure_directory(target).with_context(|| format!("creating {}", target.display()))?;
    match mount(Some(kind), target, Some(kind), flags, data) {
        Ok(()) | Err(Errno::EBUSY) => Ok(()),
        Err(error) => {
            Err(error).with_context(|| format!("mounting {kind} on {}", target.display()))
        }
    }
}

/// Makes sure that a path is a directory; a file or a dangling link in its place gives way.
fn ensure_directory(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    fs::create_dir_all(path)
}

fn make_directory(path: &Path, mode: u32) -> io::Result<()> {
    ensure_directory(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
}

/// The image's own `/tmp` stays; a missing one is made on the disk, and where that fails a tmpfs takes its place.
fn ensure_temporary_directory(path: &Path) -> Result<()> {
    let usable = path.is_dir() && fs::metadata(path)?.permissions().mode() & 0o1777 == 0o1777;
    if usable || make_directory(path, 0o1777).is_ok() {
        return Ok(());
    }
    mount_at(
        "tmpfs",
        path,
        MsFlags::MS_NOSUID | MsFlags::MS_NODEV,
        Some("mode=1777"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_or_link_gives_way_to_a_directory() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("file");
        fs::write(&file, "x").unwrap();
        ensure_directory(&file).unwrap();
        assert!(file.is_dir());
        let link = directory.path().join("link");
        symlink("/nowhere/at/all", &link).unwrap();
        ensure_directory(&link).unwrap();
        assert!(link.is_dir() && !link.is_symlink());
        let deep = directory.path().join("a/b/c");
        ensure_directory(&deep).unwrap();
        assert!(deep.is_dir());
    }

    #[test]
    fn a_link_to_a_directory_stays() {
        let directory = tempfile::tempdir().unwrap();
        let link = directory.path().join("link");
        symlink(".", &link).unwrap();
        ensure_directory(&link).unwrap();
        assert!(link.is_symlink());
    }

    #[test]
    fn a_temporary_directory_becomes_writable_for_all() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("tmp");
        ensure_temporary_directory(&path).unwrap();
        assert_eq!(
            fs::metadata(&path).unwrap().permissions().mode() & 0o7777,
            0o1777
        );
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        ensure_temporary_directory(&path).unwrap();
        assert_eq!(
            fs::metadata(&path).unwrap().permissions().mode() & 0o7777,
            0o1777
        );
    }
}
