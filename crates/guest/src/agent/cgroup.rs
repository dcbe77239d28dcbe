//! The cgroup v2 tree of a guest: the agent in `<root>/agent`, commands below `<root>/user`, each in one of its own.
//!
//! It keeps a fork bomb or a hungry command from taking the process numbers, memory and processor time that the agent
//! needs. All of it is best effort: what a kernel lacks is logged once and done without.

use std::{
    fs, io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{
        atomic::{AtomicU64, Ordering},
        Mutex, PoisonError,
    },
};

use serde_json::json;

use super::log;

/// Memory that commands cannot have, so that kernel and agent keep working when they use up the rest.
const MIN_RESERVE: u64 = 24 << 20;
const MAX_RESERVE: u64 = 128 << 20;
/// Memory of the agent that the kernel does not reclaim.
const AGENT_MEMORY: u64 = 24 << 20;
/// How many left-over groups one command's end tries to remove.
const SWEEP: usize = 32;

/// The part of the tree where commands live.
pub struct Cgroups {
    user: PathBuf,
    next: AtomicU64,
    /// Groups whose command is over but in which background children live on.
    leftovers: Mutex<Vec<PathBuf>>,
}

impl Cgroups {
    /// Divides the tree at `root` and moves this process into its own part.
    ///
    /// Fails when `root` is no cgroup v2 or cannot be divided; missing controllers only cost their protection.
    pub fn set_up(root: &Path) -> io::Result<Self> {
        let controllers = fs::read_to_string(root.join("cgroup.controllers"))?;
        let agent = root.join("agent");
        let user = root.join("user");
        for group in [&agent, &user] {
            match fs::create_dir(group) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                _ => {}
            }
        }
        fs::write(agent.join("cgroup.procs"), "0")?;
        let mut missing = Vec::new();
        for controller in ["cpu", "memory", "pids"] {
            let has = controllers
                .split_whitespace()
                .any(|name| name == controller);
            if !has
                || fs::write(
                    root.join("cgroup.subtree_control"),
                    format!("+{controller}"),
                )
                .is_err()
            {
                missing.push(controller);
            }
        }
        let mut limits = vec![
            (agent.join("cpu.weight"), 10_000),
            (agent.join("memory.min"), AGENT_MEMORY),
        ];
        if let Some(total) = total_memory() {
            limits.push((user.join("memory.max"), memory_limit(total)));
        }
        if let Some(pids) = total_pids() {
            limits.push((user.join("pids.max"), pids / 4 * 3));
        }
        for (file, value) in limits {
            if file.exists() {
                fs::write(file, value.to_string())?;
            }
        }
        if !missing.is_empty() {
            log::warn(
                "commands are not limited by some controllers",
                json!({"missing": missing, "root": root}),
            );
        }
        let cgroups = Self {
            user,
            next: AtomicU64::new(0),
            leftovers: Mutex::default(),
        };
        cgroups.adopt_leftovers();
        Ok(cgroups)
    }

    /// Groups of a former life of the agent; their commands may still run.
    fn adopt_leftovers(&self) {
        let Ok(entries) = fs::read_dir(&self.user) else {
            return;
        };
        let groups = entries
            .flatten()
            .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
            .map(|entry| entry.path());
        self.leftovers().extend(groups);
    }

    fn leftovers(&self) -> std::sync::MutexGuard<'_, Vec<PathBuf>> {
        self.leftovers
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a group for one command.
    pub fn create(&self) -> io::Result<CommandCgroup> {
        // The process number keeps the names of two lives of the agent apart.
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let path = self.user.join(format!("{}-{number}", std::process::id()));
        fs::create_dir(&path)?;
        match fs::File::open(&path) {
            Ok(directory) => Ok(CommandCgroup {
                path,
                directory: directory.into(),
            }),
            Err(error) => {
                fs::remove_dir(&path)?;
                Err(error)
            }
        }
    }

    /// Gives back the group of a command that is over. While background children live in it, it stays.
    pub fn release(&self, group: CommandCgroup) {
        let mut leftovers = self.leftovers();
        leftovers.push(group.path);
        let tail = leftovers.len().saturating_sub(SWEEP);
        let mut tried = leftovers.split_off(tail);
        tried.retain(|path| {
            matches!(fs::remove_dir(path), Err(error) if error.kind() != io::ErrorKind::NotFound)
        });
        // What stays goes to the front, so that the next sweep tries others.
        tried.append(&mut leftovers);
        *leftovers = tried;
    }
}

/// The group of one command.
pub struct CommandCgroup {
    path: PathBuf,
    directory: OwnedFd,
}

impl CommandCgroup {
    /// Kills everything in the group (Linux 5.14 and later).
    pub fn kill(&self) -> io::Result<()> {
        fs::write(self.path.join("cgroup.kill"), "1")
    }
}

impl AsFd for CommandCgroup {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }
}

/// What commands may use of `total` bytes.
fn memory_limit(total: u64) -> u64 {
    total - (total / 16).clamp(MIN_RESERVE, MAX_RESERVE).min(total / 2)
}

fn total_memory() -> Option<u64> {
    super::metrics::memory().ok().map(|memory| memory.total)
}

/// How many processes and threads the kernel allows.
fn total_pids() -> Option<u64> {
    let read = |name: &str| -> Option<u64> {
        fs::read_to_string(Path::new("/proc/sys/kernel").join(name))
            .ok()?
            .trim()
            .parse()
            .ok()
    };
    Some(read("pid_max")?.min(read("threads-max")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_get_most_of_any_memory() {
        assert_eq!(memory_limit(512 << 20), 480 << 20);
        assert_eq!(memory_limit(128 << 20), 104 << 20);
        assert_eq!(memory_limit(16 << 30), (16 << 30) - (128 << 20));
        assert_eq!(memory_limit(32 << 20), 16 << 20);
    }
}
