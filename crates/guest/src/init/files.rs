//! The files of a root file system that must fit this machine: hosts, resolver, machine id, and kernel parameters.
//!
//! Every function takes the root to work on, so that it can be tested on a directory. Files are replaced whole, by
//! rename, which also replaces links that point out of the image.

use std::{
    fs, io,
    net::Ipv4Addr,
    os::unix::fs::PermissionsExt,
    path::Path,
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};

/// Ends the line of `/etc/hosts` that names this machine, so that a later name replaces it.
pub const HOSTS_MARK: &str = "# agentenv";

const SYSTEM_PARAMETERS: [(&str, &str); 4] = [
    // Unprivileged `ping`, as container runtimes allow it.
    ("net/ipv4/ping_group_range", "0 2147483647"),
    // File watchers of editors and build tools outgrow the kernel's defaults, which follow the small memory.
    ("fs/inotify/max_user_watches", "524288"),
    ("fs/inotify/max_user_instances", "8192"),
    ("fs/inotify/max_queued_events", "65536"),
];

/// Sets kernel parameters below `base` (`/proc/sys`). The first failure is returned after all were tried.
pub fn set_system_parameters(base: &Path) -> Result<()> {
    let mut outcome = Ok(());
    for (name, value) in SYSTEM_PARAMETERS {
        let written = fs::write(base.join(name), value).with_context(|| format!("setting {name}"));
        if outcome.is_ok() {
            outcome = written;
        }
    }
    outcome
}

pub fn write_hostname(root: &Path, hostname: &str) -> Result<()> {
    replace(&root.join("etc/hostname"), &format!("{hostname}\n"), 0o644)
}

/// Makes `localhost` and the machine's own name resolve, and keeps everything else that the image has.
pub fn write_hosts(root: &Path, hostname: Option<&str>) -> Result<()> {
    let path = root.join("etc/hosts");
    let old = read_or_empty(&path)?;
    let new = hosts_with(&old, hostname);
    if new == old {
        return Ok(());
    }
    replace(&path, &new, 0o644)
}

fn hosts_with(old: &str, hostname: Option<&str>) -> String {
    let mut lines: Vec<&str> = old
        .lines()
        .filter(|line| !line.trim_end().ends_with(HOSTS_MARK))
        .collect();
    let localhost_has = |address: &str| {
        lines.iter().any(|line| {
            let mut words = line
                .split('#')
                .next()
                .unwrap_or_default()
                .split_ascii_whitespace();
            words.next() == Some(address) && words.any(|name| name == "localhost")
        })
    };
    let missing: Vec<&str> = [
        ("127.0.0.1", "127.0.0.1\tlocalhost"),
        ("::1", "::1\tlocalhost ip6-localhost ip6-loopback"),
    ]
    .into_iter()
    .filter(|(address, _)| !localhost_has(address))
    .map(|(_, line)| line)
    .collect();
    lines.splice(0..0, missing);
    let mut text = lines.join("\n");
    text.push('\n');
    if let Some(hostname) = hostname {
        text.push_str(&format!("127.0.1.1\t{hostname}\t{HOSTS_MARK}\n"));
    }
    text
}

/// Points the resolver at `dns`. What the image had belongs to the machine that built it, so it goes.
pub fn write_resolv_conf(root: &Path, dns: Ipv4Addr) -> Result<()> {
    let path = root.join("etc/resolv.conf");
    let text = format!("nameserver {dns}\n");
    let is_regular = fs::symlink_metadata(&path).is_ok_and(|metadata| metadata.is_file());
    if is_regular && fs::read(&path).is_ok_and(|old| old == text.as_bytes()) {
        return Ok(());
    }
    replace(&path, &text, 0o644)
}

/// Gives the machine an id where the image has none (32 hex digits; source: machine-id(5)).
///
/// The name of the machine goes in besides random bytes, because the pool may be young this early.
pub fn ensure_machine_id(root: &Path, hostname: &str) -> Result<()> {
    let path = root.join("etc/machine-id");
    let old = read_or_empty(&path)?;
    if !matches!(old.trim(), "" | "uninitialized") {
        return Ok(());
    }
    let elapsed = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let digest = Sha256::new()
        .chain_update(random_bytes()?)
        .chain_update(elapsed.as_nanos().to_le_bytes())
        .chain_update(hostname)
        .finalize();
    let id: String = digest[..16]
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    replace(&path, &format!("{id}\n"), 0o444)
}

fn random_bytes() -> io::Result<[u8; 32]> {
    let mut bytes = [0u8; 32];
    // SAFETY: the pointer and the length describe `bytes`. GRND_INSECURE never waits for the pool to fill.
    let count =
        unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), libc::GRND_INSECURE) };
    if usize::try_from(count) == Ok(bytes.len()) {
        Ok(bytes)
    } else {
        Err(io::Error::last_os_error())
    }
}

/// A file's text; empty when it is missing or a link that leads nowhere. Bytes that are no UTF-8 are replaced.
fn read_or_empty(path: &Path) -> Result<String> {
    match fs::read(path) {
        Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        Err(error) => Err(error).with_context(|| format!("reading {}", path.display())),
    }
}

fn replace(path: &Path, text: &str, mode: u32) -> Result<()> {
    let directory = path.parent().context("a file without a directory")?;
    fs::create_dir_all(directory)?;
    let name = path.file_name().context("a path without a name")?;
    let draft = directory.join(format!(".{}.aenv", name.to_string_lossy()));
    let written = fs::write(&draft, text)
        .and_then(|()| fs::set_permissions(&draft, fs::Permissions::from_mode(mode)))
        .and_then(|()| fs::rename(&draft, path));
    if written.is_err() {
        let _ = fs::remove_file(&draft);
    }
    written.with_context(|| format!("writing {}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn root() -> tempfile::TempDir {
        tempfile::tempdir().unwrap()
    }

    fn read(root: &tempfile::TempDir, name: &str) -> String {
        fs::read_to_string(root.path().join(name)).unwrap()
    }

    #[test]
    fn hosts_of_an_empty_image() {
        let root = root();
        write_hosts(root.path(), Some("i0abc")).unwrap();
        assert_eq!(
            read(&root, "etc/hosts"),
            "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n127.0.1.1\ti0abc\t# agentenv\n"
        );
    }

    #[test]
    fn hosts_keep_what_the_image_has_and_only_our_line_changes() {
        let root = root();
        fs::create_dir(root.path().join("etc")).unwrap();
        let own = "# my hosts\n127.0.0.1 localhost box\n::1 localhost\n10.0.0.1 db\n";
        fs::write(root.path().join("etc/hosts"), own).unwrap();
        write_hosts(root.path(), Some("first")).unwrap();
        write_hosts(root.path(), Some("second")).unwrap();
        assert_eq!(
            read(&root, "etc/hosts"),
            format!("{own}127.0.1.1\tsecond\t# agentenv\n")
        );
    }

    #[test]
    fn a_commented_localhost_does_not_count() {
        assert!(
            hosts_with("# 127.0.0.1 localhost\n127.0.0.1 box # localhost\n", None)
                .starts_with("127.0.0.1\tlocalhost\n")
        );
    }

    #[test]
    fn a_resolver_link_becomes_a_file_and_its_target_stays() {
        let root = root();
        fs::create_dir(root.path().join("etc")).unwrap();
        let target = root.path().join("stub.conf");
        fs::write(&target, "nameserver 127.0.0.53\n").unwrap();
        symlink(&target, root.path().join("etc/resolv.conf")).unwrap();
        write_resolv_conf(root.path(), Ipv4Addr::new(169, 254, 0, 22)).unwrap();
        assert!(!root.path().join("etc/resolv.conf").is_symlink());
        assert_eq!(read(&root, "etc/resolv.conf"), "nameserver 169.254.0.22\n");
        assert_eq!(
            fs::read_to_string(target).unwrap(),
            "nameserver 127.0.0.53\n"
        );
    }

    #[test]
    fn a_dangling_or_missing_resolver_becomes_a_file() {
        for dangling in [true, false] {
            let root = root();
            fs::create_dir(root.path().join("etc")).unwrap();
            if dangling {
                symlink(
                    "../run/systemd/resolve/stub.conf",
                    root.path().join("etc/resolv.conf"),
                )
                .unwrap();
            }
            write_resolv_conf(root.path(), Ipv4Addr::LOCALHOST).unwrap();
            assert_eq!(read(&root, "etc/resolv.conf"), "nameserver 127.0.0.1\n");
        }
    }

    #[test]
    fn machine_ids_are_made_once_and_differ() {
        let (one, two) = (root(), root());
        ensure_machine_id(one.path(), "a").unwrap();
        ensure_machine_id(two.path(), "a").unwrap();
        let id = read(&one, "etc/machine-id");
        assert_eq!(id.trim_end().len(), 32);
        assert!(id.trim_end().bytes().all(|byte| byte.is_ascii_hexdigit()));
        assert_ne!(id, read(&two, "etc/machine-id"));
        ensure_machine_id(one.path(), "b").unwrap();
        assert_eq!(read(&one, "etc/machine-id"), id);
    }

    #[test]
    fn an_uninitialized_machine_id_is_replaced() {
        let root = root();
        fs::create_dir(root.path().join("etc")).unwrap();
        fs::write(root.path().join("etc/machine-id"), "uninitialized\n").unwrap();
        ensure_machine_id(root.path(), "").unwrap();
        assert_eq!(read(&root, "etc/machine-id").trim_end().len(), 32);
    }

    #[test]
    fn all_parameters_are_tried_although_one_fails() {
        let root = root();
        fs::create_dir_all(root.path().join("fs/inotify")).unwrap();
        assert!(set_system_parameters(root.path()).is_err());
        assert_eq!(read(&root, "fs/inotify/max_queued_events"), "65536");
    }

    #[test]
    fn a_failed_replacement_leaves_no_draft() {
        let root = root();
        fs::create_dir_all(root.path().join("etc/hostname")).unwrap();
        assert!(write_hostname(root.path(), "x").is_err());
        assert_eq!(fs::read_dir(root.path().join("etc")).unwrap().count(), 1);
    }
}
