//! Users and groups of the image, read from `/etc/passwd` and `/etc/group` by ourselves: a static binary cannot use
//! the image's name services. Never changes a user.

use std::{fmt, fs, io, path::Path, path::PathBuf};

const PASSWD: &str = "/etc/passwd";
const GROUP: &str = "/etc/group";

/// A user of the image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    pub name: String,
    pub uid: u32,
    /// The primary group.
    pub gid: u32,
    /// All groups: the primary one first, then the supplementary ones.
    pub groups: Vec<u32>,
    pub home: PathBuf,
    pub shell: PathBuf,
}

/// Why there is no user.
#[derive(Debug)]
pub enum UserError {
    Unknown(String),
    Unreadable(io::Error),
}

impl fmt::Display for UserError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            UserError::Unknown(name) => write!(f, "unknown user {name}"),
            UserError::Unreadable(error) => write!(f, "cannot read {PASSWD} or {GROUP}: {error}"),
        }
    }
}

impl std::error::Error for UserError {}

/// Finds a user by name. `root` exists even in an image without `/etc/passwd`.
///
/// The files are read anew each time: commands in the sandbox add users while we run.
pub fn lookup(name: &str) -> Result<User, UserError> {
    let passwd = read(Path::new(PASSWD)).map_err(UserError::Unreadable)?;
    let group = read(Path::new(GROUP)).map_err(UserError::Unreadable)?;
    find(name, &passwd, &group).ok_or_else(|| UserError::Unknown(name.to_owned()))
}

/// The name of `uid`, or its number as text.
pub fn user_name(uid: u32) -> String {
    name_of(uid, &read(Path::new(PASSWD)).unwrap_or_default())
}

/// The name of group `gid`, or its number as text.
pub fn group_name(gid: u32) -> String {
    name_of(gid, &read(Path::new(GROUP)).unwrap_or_default())
}

/// The number of the group named `name`.
pub fn group_id(name: &str) -> Option<u32> {
    let text = read(Path::new(GROUP)).ok()?;
    text.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next()? == name).then(|| fields.nth(1)?.parse().ok())?
    })
}

fn read(path: &Path) -> io::Result<String> {
    match fs::read(path) {
        Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        Err(error) => Err(error),
    }
}

fn find(name: &str, passwd: &str, group: &str) -> Option<User> {
    let mut user = passwd
        .lines()
        .filter_map(parse_user)
        .find(|user| user.name == name)
        .or_else(|| (name == "root").then(root))?;
    for line in group.lines() {
        // name:password:gid:member,member
        let mut fields = line.split(':').skip(2);
        let Some(gid) = fields.next().and_then(|gid| gid.parse().ok()) else {
            continue;
        };
        let is_member = fields
            .next()
            .is_some_and(|members| members.split(',').any(|member| member.trim() == name));
        if is_member && !user.groups.contains(&gid) {
            user.groups.push(gid);
        }
    }
    Some(user)
}

/// Reads `name:password:uid:gid:gecos:home:shell`; `None` for a line that is none.
fn parse_user(line: &str) -> Option<User> {
    let fields: Vec<&str> = line.trim_end().split(':').collect();
    let [name, _, uid, gid, _, home, shell] = fields[..] else {
        return None;
    };
    let gid = gid.parse().ok()?;
    Some(User {
        name: name.to_owned(),
        uid: uid.parse().ok()?,
        gid,
        groups: vec![gid],
        home: PathBuf::from(if home.is_empty() { "/" } else { home }),
        shell: PathBuf::from(if shell.is_empty() { "/bin/sh" } else { shell }),
    })
}

fn root() -> User {
    User {
        name: "root".into(),
        uid: 0,
        gid: 0,
        groups: vec![0],
        home: "/root".into(),
        shell: "/bin/sh".into(),
    }
}

/// Both files have the name first and the number third.
fn name_of(id: u32, text: &str) -> String {
    text.lines()
        .find_map(|line| {
            let mut fields = line.split(':');
            let name = fields.next()?;
            (fields.nth(1)?.parse() == Ok(id)).then(|| name.to_owned())
        })
        .unwrap_or_else(|| id.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    const USERS: &str =
        "root:x:0:0:root:/root:/bin/bash\nbroken line\nuser:x:1000:1000::/home/user:\n\
                         big:x:4294967294:7::/:/bin/false\n";
    const GROUPS: &str =
        "root:x:0:\nsudo:x:27:user,big\nuser:x:1000:user\nodd:x:nan:user\nlast:x:9:a,user\n";

    #[test]
    fn supplementary_groups_follow_the_primary_one_once() {
        let user = find("user", USERS, GROUPS).unwrap();
        assert_eq!((user.uid, user.gid), (1000, 1000));
        assert_eq!(user.groups, [1000, 27, 9]);
        assert_eq!(user.home, Path::new("/home/user"));
        assert_eq!(user.shell, Path::new("/bin/sh"));
    }

    #[test]
    fn names_must_match_whole() {
        for name in ["use", "users", "", "user:x", "1000"] {
            assert_eq!(find(name, USERS, GROUPS), None, "{name:?}");
        }
    }

    #[test]
    fn root_exists_without_any_file() {
        assert_eq!(find("root", "", "").unwrap().uid, 0);
        assert_eq!(
            find("root", USERS, GROUPS).unwrap().shell,
            Path::new("/bin/bash")
        );
        assert_eq!(find("user", "", ""), None);
    }

    #[test]
    fn unknown_numbers_stay_numbers() {
        assert_eq!(name_of(1000, USERS), "user");
        assert_eq!(name_of(27, GROUPS), "sudo");
        assert_eq!(name_of(4242, USERS), "4242");
        assert_eq!(name_of(4_294_967_294, USERS), "big");
    }
}
