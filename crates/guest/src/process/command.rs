//! Turns a request into everything that the kernel needs to start a command: user, environment, directory, program.
//! Looks at the disk only to check the directory; starts nothing.

use std::{
    collections::BTreeMap,
    env,
    ffi::CString,
    fs, io,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

use crate::{
    agent::{paths, users::User},
    proto::process::ProcessConfig,
    rpc::{Code, RpcError, RpcResult},
};

/// Where programs are looked for when nobody says otherwise.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A command that can be started.
pub struct Command {
    pub argv: Vec<CString>,
    /// The files to try, in order, as a shell does.
    pub programs: Vec<CString>,
    pub env: Vec<CString>,
    pub cwd: CString,
    pub user: User,
}

impl Command {
    /// Builds the command of `config` for `user`.
    ///
    /// `sandbox_env` are the variables of the sandbox; those of the request win. Without `cwd` it runs in the default
    /// workdir, else in the home, else in `/`. Fails with `invalid_argument`.
    pub fn new(
        config: &ProcessConfig,
        user: User,
        sandbox_env: BTreeMap<String, String>,
        default_workdir: Option<&str>,
    ) -> RpcResult<Self> {
        if config.cmd.is_empty() {
            return Err(invalid("the command is empty"));
        }
        let env = environment(config, &user, sandbox_env)?;
        let cwd = directory(config.cwd.as_deref(), &user, default_workdir)?;
        let path = env.get("PATH").map_or("", String::as_str);
        let mut argv = vec![c_string(&config.cmd, "the command")?];
        for arg in &config.args {
            argv.push(c_string(arg, "an argument")?);
        }
        Ok(Self {
            programs: programs(&config.cmd, path)?,
            argv,
            env: env
                .iter()
                .map(|(name, value)| c_string(&format!("{name}={value}"), "a variable"))
                .collect::<RpcResult<_>>()?,
            cwd: CString::new(cwd.as_os_str().as_bytes())
                .map_err(|_| invalid("the working directory contains a NUL byte"))?,
            user,
        })
    }
}

fn invalid(message: impl Into<String>) -> RpcError {
    RpcError::new(Code::InvalidArgument, message)
}

fn c_string(text: &str, what: &str) -> RpcResult<CString> {
    CString::new(text).map_err(|_| invalid(format!("{what} contains a NUL byte")))
}

/// Later ones win: `PATH`, the user's, the sandbox's, the request's. Nothing else of ours is passed on.
fn environment(
    config: &ProcessConfig,
    user: &User,
    sandbox_env: BTreeMap<String, String>,
) -> RpcResult<BTreeMap<String, String>> {
    let path = env::var("PATH")
        .ok()
        .filter(|path| !path.is_empty())
        .unwrap_or_else(|| DEFAULT_PATH.to_owned());
    let mut env = BTreeMap::from([
        ("PATH".to_owned(), path),
        ("HOME".to_owned(), user.home.to_string_lossy().into_owned()),
        ("USER".to_owned(), user.name.clone()),
        ("LOGNAME".to_owned(), user.name.clone()),
    ]);
    env.extend(sandbox_env);
    for (name, value) in &config.envs {
        if name.is_empty() || name.contains('=') {
            return Err(invalid(format!(
                "'{name}' cannot be the name of a variable"
            )));
        }
        env.insert(name.clone(), value.clone());
    }
    Ok(env)
}

/// A directory that the request names must exist. One that nobody asked for must not be in the way.
fn directory(cwd: Option<&str>, user: &User, default_workdir: Option<&str>) -> RpcResult<PathBuf> {
    if let Some(cwd) = cwd.filter(|cwd| !cwd.is_empty()) {
        let path = paths::resolve(cwd, user, default_workdir).map_err(invalid)?;
        return match fs::metadata(&path) {
            Ok(metadata) if metadata.is_dir() => Ok(path),
            Ok(_) => Err(invalid(format!(
                "cwd '{}' is not a directory",
                path.display()
            ))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(invalid(format!("cwd '{}' does not exist", path.display())))
            }
            Err(error) => Err(invalid(format!("cwd '{}': {error}", path.display()))),
        };
    }
    let candidates = [
        paths::resolve("", user, default_workdir),
        Ok(user.home.clone()),
    ];
    Ok(candidates
        .into_iter()
        .flatten()
        .find(|path| path.is_dir())
        .unwrap_or_else(|| Path::new("/").to_owned()))
}

/// A name with a slash is a path; any other is looked for in each directory of `path`.
fn programs(cmd: &str, path: &str) -> RpcResult<Vec<CString>> {
    if cmd.contains('/') {
        return Ok(vec![c_string(cmd, "the command")?]);
    }
    path.split(':')
        .map(|directory| {
            let directory = if directory.is_empty() { "." } else { directory };
            c_string(&format!("{directory}/{cmd}"), "the command")
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user(home: &str) -> User {
        User {
            name: "u".into(),
            uid: 1,
            gid: 1,
            groups: vec![1],
            home: home.into(),
            shell: "/bin/sh".into(),
        }
    }

    fn config() -> ProcessConfig {
        ProcessConfig {
            cmd: "prog".into(),
            ..Default::default()
        }
    }

    fn variable(command: &Command, name: &str) -> Option<String> {
        command.env.iter().find_map(|entry| {
            let text = entry.to_str().ok()?;
            text.strip_prefix(name)?
                .strip_prefix('=')
                .map(str::to_owned)
        })
    }

    #[test]
    fn later_variables_win() {
        let mut config = config();
        config.envs.insert("B".into(), "request".into());
        config.envs.insert("HOME".into(), "/elsewhere".into());
        let sandbox = [("A", "sandbox"), ("B", "sandbox"), ("USER", "sandbox")]
            .map(|(name, value)| (name.to_owned(), value.to_owned()));
        let command = Command::new(&config, user("/"), sandbox.into(), None).unwrap();
        for (name, value) in [
            ("A", "sandbox"),
            ("B", "request"),
            ("HOME", "/elsewhere"),
            ("USER", "sandbox"),
            ("LOGNAME", "u"),
        ] {
            assert_eq!(variable(&command, name).as_deref(), Some(value), "{name}");
        }
    }

    #[test]
    fn programs_are_looked_for_in_the_path_of_the_request() {
        let mut config = config();
        config.envs.insert("PATH".into(), "/a::/b".into());
        let command = Command::new(&config, user("/"), BTreeMap::new(), None).unwrap();
        assert_eq!(
            command.programs,
            [c"/a/prog", c"./prog", c"/b/prog"].map(CString::from)
        );
        config.cmd = "./prog".into();
        let command = Command::new(&config, user("/"), BTreeMap::new(), None).unwrap();
        assert_eq!(command.programs, [CString::from(c"./prog")]);
    }

    #[test]
    fn a_named_directory_must_exist_and_others_are_passed_over() {
        let home = tempfile::tempdir().unwrap();
        let user = user(home.path().to_str().unwrap());
        let gone = home.path().join("gone");
        let error = directory(Some("gone"), &user, None).unwrap_err();
        assert_eq!(
            error.message,
            format!("cwd '{}' does not exist", gone.display())
        );
        fs::write(home.path().join("file"), "").unwrap();
        assert!(directory(Some("file"), &user, None)
            .unwrap_err()
            .message
            .contains("not a directory"));
        assert_eq!(directory(None, &user, Some("/gone")).unwrap(), home.path());
        assert_eq!(
            directory(None, &user, Some("/usr")).unwrap(),
            Path::new("/usr")
        );
        let homeless = User { home: gone, ..user };
        assert_eq!(directory(None, &homeless, None).unwrap(), Path::new("/"));
    }

    #[test]
    fn what_the_kernel_cannot_take_is_refused() {
        let bad = [
            ProcessConfig::default(),
            ProcessConfig {
                cmd: "a\0".into(),
                ..Default::default()
            },
            ProcessConfig {
                args: vec!["\0".into()],
                ..config()
            },
            ProcessConfig {
                envs: [("A=B".to_owned(), String::new())].into(),
                ..config()
            },
        ];
        for config in bad {
            let result = Command::new(&config, user("/"), BTreeMap::new(), None);
            assert_eq!(
                result.err().map(|error| error.code),
                Some(Code::InvalidArgument)
            );
        }
    }
}
