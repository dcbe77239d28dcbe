//! The generation file: tells programs of the guest that their machine goes on as another life, perhaps beside copies of
//! itself. Knows nothing of how a life begins.
//!
//! It is one line, `<life> <id>`: the word that the host calls this life by, a space, and 32 hex digits that no other
//! life of any machine has. A program that keeps state which copies must not share (a generator of random numbers, an
//! id of its own) reads it first, watches its directory (inotify, `IN_MOVED_TO`) or reads it again, and starts
//! afresh when the id is another one. When it changes, clock, entropy and names are those of the new life already.

use std::{
    fs,
    io::{self, Read, Write},
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::Path,
};

/// What stands for a life without a name.
const UNNAMED: &str = "0";
const LONGEST_LIFE: usize = 128;

/// Whether a word can stand in the file: nothing that splits it.
pub fn is_life(word: &str) -> bool {
    (1..=LONGEST_LIFE).contains(&word.len()) && word.bytes().all(|byte| byte.is_ascii_graphic())
}

/// Replaces the file, which all may read, with one for `life`. Call it when all else of the new life is in force.
pub fn announce(path: &Path, life: Option<&str>) -> io::Result<()> {
    let mut id = [0; 16];
    fs::File::open("/dev/urandom")?.read_exact(&mut id)?;
    let id: String = id.iter().map(|byte| format!("{byte:02x}")).collect();
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    let draft = path.with_extension("new");
    let mut file = fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o644)
        .open(&draft)?;
    file.set_permissions(fs::Permissions::from_mode(0o644))?;
    file.write_all(format!("{} {id}\n", life.unwrap_or(UNNAMED)).as_bytes())?;
    fs::rename(&draft, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_announcement_has_an_id_of_its_own_and_replaces_the_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("made/generation");
        announce(&path, Some("7")).unwrap();
        let first = fs::read_to_string(&path).unwrap();
        let (life, id) = first.trim_end().split_once(' ').unwrap();
        assert_eq!((life, id.len()), ("7", 32));
        assert!(id.bytes().all(|byte| byte.is_ascii_hexdigit()));
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o644);
        let mut open = fs::File::open(&path).unwrap();
        announce(&path, None).unwrap();
        let second = fs::read_to_string(&path).unwrap();
        assert!(second.starts_with("0 "));
        assert_ne!(second.trim_end().split_once(' ').unwrap().1, id);
        let mut kept = String::new();
        open.read_to_string(&mut kept).unwrap();
        assert_eq!(kept, first, "readers see the old or the new file, whole");
    }

    #[test]
    fn lives_are_single_words() {
        assert!(is_life("12") && is_life("5f0c-ab"));
        for bad in ["", "a b", "a\n", "ä", &"x".repeat(129)] {
            assert!(!is_life(bad), "{bad:?}");
        }
    }
}
