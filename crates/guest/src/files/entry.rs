//! Describes one thing in the file system the way clients see it (`EntryInfo`). Reads only.

use std::{
    ffi::OsStr,
    fs::{self, Metadata},
    io,
    os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt},
    path::Path,
};

use super::{metadata, owners::Owners};
use crate::proto::filesystem::{EntryInfo, FileType};

/// Describes what is at `path` without following a final symlink: `size`, `permissions`, owner and times are the link's
/// own, `type` and `mode` are those of its target.
///
/// # Errors
/// Those of lstat(2).
pub fn describe(path: &Path, owners: &Owners) -> io::Result<EntryInfo> {
    Ok(describe_known(path, &fs::symlink_metadata(path)?, owners))
}

/// As `describe`, when lstat has been done already.
pub fn describe_known(path: &Path, own: &Metadata, owners: &Owners) -> EntryInfo {
    let is_symlink = own.file_type().is_symlink();
    // A broken link is shown as a link: clients drop entries that have no type.
    let target = if is_symlink {
        fs::metadata(path).ok()
    } else {
        None
    };
    let kind = match (&target, is_symlink) {
        (None, true) => FileType::Symlink,
        (Some(meta), _) if meta.is_dir() => FileType::Directory,
        (None, false) if own.is_dir() => FileType::Directory,
        _ => FileType::File,
    };
    let symlink_target = is_symlink.then(|| {
        let resolved = fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
        resolved.to_string_lossy().into_owned()
    });
    EntryInfo {
        name: path
            .file_name()
            .unwrap_or(OsStr::new("/"))
            .to_string_lossy()
            .into_owned(),
        r#type: kind.into(),
        path: path.to_string_lossy().into_owned(),
        size: i64::try_from(own.len()).unwrap_or(i64::MAX),
        mode: target.as_ref().unwrap_or(own).mode() & 0o777,
        permissions: permissions(own),
        owner: owners.user(own.uid()),
        group: owners.group(own.gid()),
        modified_time: Some(pbjson_types::Timestamp {
            seconds: own.mtime(),
            nanos: i32::try_from(own.mtime_nsec()).unwrap_or(0),
        }),
        symlink_target,
        metadata: metadata::read(path),
        is_symlink,
    }
}

/// Go's text form of a file mode: letters for what is special, else `-`, then nine permission letters.
fn permissions(meta: &Metadata) -> String {
    let kind = meta.file_type();
    let mode = meta.permissions().mode();
    let letters = [
        (kind.is_dir(), "d"),
        (kind.is_symlink(), "L"),
        (kind.is_block_device() || kind.is_char_device(), "D"),
        (kind.is_fifo(), "p"),
        (kind.is_socket(), "S"),
        (mode & libc::S_ISUID != 0, "u"),
        (mode & libc::S_ISGID != 0, "g"),
        (kind.is_char_device(), "c"),
        (mode & libc::S_ISVTX != 0, "t"),
    ];
    let mut text: String = letters
        .into_iter()
        .filter(|(applies, _)| *applies)
        .map(|(_, letter)| letter)
        .collect();
    if text.is_empty() {
        text.push('-');
    }
    for (place, letter) in "rwxrwxrwx".chars().enumerate() {
        text.push(if mode & (0o400 >> place) != 0 {
            letter
        } else {
            '-'
        });
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn describe_in(dir: &Path, name: &str) -> EntryInfo {
        describe(&dir.join(name), &Owners::default()).unwrap()
    }

    #[test]
    fn describes_files_and_directories() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("f"), "hello").unwrap();
        fs::set_permissions(dir.path().join("f"), fs::Permissions::from_mode(0o4754)).unwrap();
        let file = describe_in(dir.path(), "f");
        assert_eq!((file.name.as_str(), file.size, file.mode), ("f", 5, 0o754));
        assert_eq!(file.permissions, "urwxr-xr--");
        assert_eq!(file.r#type(), FileType::File);
        assert_eq!((file.symlink_target, file.is_symlink), (None, false));

        fs::create_dir(dir.path().join("d")).unwrap();
        fs::set_permissions(dir.path().join("d"), fs::Permissions::from_mode(0o1777)).unwrap();
        let sub = describe_in(dir.path(), "d");
        assert_eq!(sub.r#type(), FileType::Directory);
        assert_eq!((sub.permissions.as_str(), sub.mode), ("dtrwxrwxrwx", 0o777));
    }

    #[test]
    fn links_have_the_type_of_their_target() {
        let dir = tempfile::tempdir().unwrap();
        let real = fs::canonicalize(dir.path()).unwrap();
        fs::create_dir(real.join("d")).unwrap();
        symlink("d", real.join("l1")).unwrap();
        symlink("l1", real.join("l2")).unwrap();
        let link = describe_in(&real, "l2");
        assert_eq!(link.r#type(), FileType::Directory);
        assert!(link.is_symlink);
        assert_eq!(link.symlink_target.as_deref(), real.join("d").to_str());
        assert_eq!(link.permissions, "Lrwxrwxrwx");
        assert_eq!((link.mode, link.size), (describe_in(&real, "d").mode, 2));
    }

    #[test]
    fn broken_and_looping_links_stay_visible() {
        let dir = tempfile::tempdir().unwrap();
        symlink("nowhere", dir.path().join("broken")).unwrap();
        symlink("loop", dir.path().join("loop")).unwrap();
        for name in ["broken", "loop"] {
            let link = describe_in(dir.path(), name);
            assert_eq!(link.r#type(), FileType::Symlink);
            assert_eq!(
                link.symlink_target.as_deref(),
                dir.path().join(name).to_str()
            );
        }
    }

    #[test]
    fn devices_and_the_root_have_names_and_types() {
        let null = describe(Path::new("/dev/null"), &Owners::default()).unwrap();
        assert_eq!(
            (null.permissions.as_str(), null.owner.as_str()),
            ("Dcrw-rw-rw-", "root")
        );
        assert_eq!(null.r#type(), FileType::File);
        assert_eq!(
            describe(Path::new("/"), &Owners::default()).unwrap().name,
            "/"
        );
    }
}
