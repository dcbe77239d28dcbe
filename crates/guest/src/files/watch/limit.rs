//! What bounds the directories that are watched, and how clients are told.

use std::path::Path;

use crate::rpc::{Code, RpcError};

/// Most directories in one watch. The kernel keeps each in memory, about 1 KiB, for as long as it is watched.
pub const MAX_DIRECTORIES: usize = 65_536;

/// A limit that kept a directory from being watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// The kernel's, for watches.
    Watches,
    /// The kernel's, for inotify instances.
    Instances,
    /// Ours, for one watch.
    Directories(usize),
}

impl Limit {
    /// The limit as text, for people.
    pub fn name(self) -> String {
        match self {
            Limit::Watches => "fs.inotify.max_user_watches".into(),
            Limit::Instances => "fs.inotify.max_user_instances".into(),
            Limit::Directories(most) => format!("{most} directories in one watch"),
        }
    }

    /// The `resource_exhausted` for a watch on `root` that cannot start.
    pub fn error(self, root: &Path) -> RpcError {
        let message = match self {
            Limit::Directories(most) => format!(
                "'{}' has more than {most} directories, too many to watch; watch a smaller tree",
                root.display()
            ),
            Limit::Watches | Limit::Instances => format!(
                "too many watches: {} is reached; remove watchers or raise it",
                self.name()
            ),
        };
        RpcError::new(Code::ResourceExhausted, message)
    }
}
