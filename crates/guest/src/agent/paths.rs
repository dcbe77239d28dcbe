//! How a path that a client sends becomes an absolute one; the same rule for files, watches and `cwd`.

use std::path::{Component, Path, PathBuf};

use super::users::User;

/// Resolves `path` for `user`: empty is the default workdir (else the home), `~` and `~/x` are the home, relative
/// paths start at the home (not the workdir), `.` and `..` are folded without looking at the disk.
///
/// Fails, with a text for people, for another user's home (`~other`) and for NUL bytes.
pub fn resolve(path: &str, user: &User, default_workdir: Option<&str>) -> Result<PathBuf, String> {
    if path.contains('\0') {
        return Err("the path contains a NUL byte".into());
    }
    if path.is_empty() {
        return Ok(match default_workdir {
            Some(workdir) if !workdir.is_empty() => fold(&user.home.join(expand(workdir, user)?)),
            _ => fold(&user.home),
        });
    }
    Ok(fold(&user.home.join(expand(path, user)?)))
}

/// Replaces a leading `~`; what is relative stays so.
fn expand(path: &str, user: &User) -> Result<PathBuf, String> {
    match path.strip_prefix('~') {
        None => Ok(PathBuf::from(path)),
        Some("") => Ok(user.home.clone()),
        Some(rest) => match rest.strip_prefix('/') {
            Some(rest) => Ok(user.home.join(rest.trim_start_matches('/'))),
            None => Err(format!(
                "cannot expand '{path}': only the user's own home can be named by '~'"
            )),
        },
    }
}

fn fold(path: &Path) -> PathBuf {
    let mut folded = PathBuf::from("/");
    for component in path.components() {
        match component {
            Component::Normal(name) => folded.push(name),
            Component::ParentDir => {
                folded.pop();
            }
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    folded
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user() -> User {
        User {
            name: "user".into(),
            uid: 1000,
            gid: 1000,
            groups: vec![1000],
            home: "/home/user".into(),
            shell: "/bin/sh".into(),
        }
    }

    #[test]
    fn every_form_has_its_place() {
        for (path, workdir, expected) in [
            ("", None, "/home/user"),
            ("", Some("/srv"), "/srv"),
            ("", Some("code"), "/home/user/code"),
            ("~", Some("/srv"), "/home/user"),
            ("~/a//b", None, "/home/user/a/b"),
            ("~//etc", None, "/home/user/etc"),
            ("a/../b", Some("/srv"), "/home/user/b"),
            ("/x/./y/../z/", None, "/x/z"),
            ("../../../../etc", None, "/etc"),
        ] {
            assert_eq!(
                resolve(path, &user(), workdir),
                Ok(PathBuf::from(expected)),
                "{path:?}"
            );
        }
    }

    #[test]
    fn other_homes_and_nul_are_refused() {
        assert!(resolve("~root", &user(), None).is_err());
        assert!(resolve("a\0b", &user(), None).is_err());
    }
}
