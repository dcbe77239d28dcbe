//! Follows a directory, or a whole tree, with inotify and turns what the kernel reports into events. Blocking, except for
//! reading: the descriptor never waits.

use std::{
    collections::{HashMap, HashSet},
    fs,
    os::{
        fd::{AsFd, AsRawFd, RawFd},
        unix::fs::MetadataExt,
    },
    path::{Path, PathBuf},
    sync::Arc,
};

use nix::{
    errno::Errno,
    sys::inotify::{AddWatchFlags, InitFlags, Inotify, InotifyEvent, WatchDescriptor},
};

use serde_json::json;

use super::{
    super::{blocking::Cancelled, operations::rpc_error, pseudo::Border},
    limit::{Limit, MAX_DIRECTORIES},
    network_mount,
    queue::EventQueue,
    WatchOptions,
};
use crate::{
    agent::log,
    proto::filesystem::EventType,
    rpc::{Code, RpcError, RpcResult},
};

/// Reads of the kernel's queue per call, so that a tree that never rests cannot hold a thread for ever.
const MAX_READS: usize = 512;

fn interesting() -> AddWatchFlags {
    AddWatchFlags::IN_CREATE
        | AddWatchFlags::IN_MODIFY
        | AddWatchFlags::IN_ATTRIB
        | AddWatchFlags::IN_DELETE
        | AddWatchFlags::IN_MOVED_FROM
        | AddWatchFlags::IN_MOVED_TO
        | AddWatchFlags::IN_DELETE_SELF
        | AddWatchFlags::IN_MOVE_SELF
        | AddWatchFlags::IN_ONLYDIR
}

/// An inotify instance that can be registered with the async reactor.
#[derive(Debug)]
pub struct Instance(Inotify);

impl AsRawFd for Instance {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

/// What one watch follows.
#[derive(Debug)]
pub struct Tree {
    instance: Arc<Instance>,
    root: PathBuf,
    root_device: u64,
    border: Border,
    cancelled: Cancelled,
    max_directories: usize,
    root_watch: WatchDescriptor,
    options: WatchOptions,
    /// Watched directories, relative to the root.
    directories: HashMap<WatchDescriptor, PathBuf>,
    /// Reported from looking into a new directory; the kernel may report it once more.
    foretold: HashSet<PathBuf>,
    /// Directories moved away, by cookie, whose arrival has not been seen.
    leaving: HashMap<u32, PathBuf>,
    /// The first limit that kept a directory from being followed.
    full: Option<Limit>,
}

impl Tree {
    /// Starts to follow the directory `root`.
    ///
    /// # Errors
    /// `not_found`, `invalid_argument` for what is no directory or a network mount that is not allowed,
    /// `resource_exhausted` at the kernel's limits for watches and for more than `MAX_DIRECTORIES` directories,
    /// `canceled` soon after `cancelled` is set.
    pub fn open(root: &Path, options: WatchOptions, cancelled: Cancelled) -> RpcResult<Self> {
        Self::open_bounded(root, options, cancelled, MAX_DIRECTORIES)
    }

    fn open_bounded(
        root: &Path,
        options: WatchOptions,
        cancelled: Cancelled,
        max_directories: usize,
    ) -> RpcResult<Self> {
        let failed = |errno: Errno| rpc_error("watch", root, &errno.into());
        let meta = fs::metadata(root).map_err(|error| rpc_error("watch", root, &error))?;
        if !meta.is_dir() {
            return Err(RpcError::new(
                Code::InvalidArgument,
                format!("path is not a directory: '{}'", root.display()),
            ));
        }
        if !options.allow_network_mounts && network_mount::is_network(root).map_err(failed)? {
            return Err(RpcError::new(
                Code::InvalidArgument,
                format!(
                    "'{}' is on a network file system, where changes made elsewhere are not seen; \
                     set allow_network_mounts to watch it anyway",
                    root.display()
                ),
            ));
        }
        let border = Border::around(root, &meta).map_err(failed)?;
        let inotify =
            Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK).map_err(|errno| {
                match errno {
                    Errno::EMFILE => Limit::Instances.error(root),
                    other => failed(other),
                }
            })?;
        let root_watch = inotify
            .add_watch(root, interesting())
            .map_err(|errno| match errno {
                Errno::ENOSPC => Limit::Watches.error(root),
                other => failed(other),
            })?;
        let mut tree = Self {
            instance: Arc::new(Instance(inotify)),
            root: root.to_path_buf(),
            root_device: meta.dev(),
            border,
            cancelled,
            max_directories,
            root_watch,
            options,
            directories: HashMap::from([(root_watch, PathBuf::new())]),
            foretold: HashSet::new(),
            leaving: HashMap::new(),
            full: None,
        };
        if options.recursive {
            tree.follow_below(Path::new(""), None);
            tree.cancelled.check()?;
            if let Some(limit) = tree.full {
                return Err(limit.error(root));
            }
        }
        Ok(tree)
    }

    /// The descriptor to wait on.
    pub fn instance(&self) -> Arc<Instance> {
        Arc::clone(&self.instance)
    }

    /// The watched directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Moves what the kernel has into `queue`; true if it may have more.
    ///
    /// # Errors
    /// `internal` if the descriptor cannot be read, `canceled` when the watch is no longer wanted.
    pub fn collect(&mut self, queue: &mut EventQueue) -> RpcResult<bool> {
        for _ in 0..MAX_READS {
            self.cancelled.check()?;
            match self.instance.0.read_events() {
                Ok(events) => {
                    for event in &events {
                        self.handle(event, queue);
                    }
                }
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => {
                    self.foretold.clear();
                    for (_, gone) in std::mem::take(&mut self.leaving) {
                        self.forget_below(&gone);
                    }
                    return Ok(false);
                }
                Err(errno) => {
                    return Err(RpcError::new(
                        Code::Internal,
                        format!("cannot read events of '{}': {errno}", self.root.display()),
                    ));
                }
            }
        }
        Ok(true)
    }

    fn handle(&mut self, event: &InotifyEvent, queue: &mut EventQueue) {
        let mask = event.mask;
        if mask.contains(AddWatchFlags::IN_Q_OVERFLOW) {
            log::warn(
                "the kernel dropped file events, too many came at once",
                json!({"path": self.root}),
            );
            if self.options.recursive {
                self.follow_below(Path::new(""), None);
            }
            return;
        }
        if mask.contains(AddWatchFlags::IN_IGNORED) {
            self.directories.remove(&event.wd);
            return;
        }
        let Some(directory) = self.directories.get(&event.wd) else {
            return;
        };
        let Some(name) = &event.name else {
            // About the directory itself. For those below the root its parent says the same.
            if event.wd == self.root_watch {
                self.handle_root(mask, queue);
            }
            return;
        };
        let path = directory.join(name);
        let created = mask.contains(AddWatchFlags::IN_CREATE);
        if created && self.foretold.remove(&path) {
            return;
        }
        let arrived = mask.contains(AddWatchFlags::IN_MOVED_TO);
        let left = mask.contains(AddWatchFlags::IN_MOVED_FROM);
        let kind = if created || arrived {
            EventType::Create
        } else if left {
            EventType::Rename
        } else if mask.contains(AddWatchFlags::IN_DELETE) {
            EventType::Remove
        } else if mask.contains(AddWatchFlags::IN_MODIFY) {
            EventType::Write
        } else if mask.contains(AddWatchFlags::IN_ATTRIB) {
            EventType::Chmod
        } else {
            return;
        };
        queue.push(&path, kind);
        if !self.options.recursive || !mask.contains(AddWatchFlags::IN_ISDIR) {
            return;
        }
        if created {
            self.follow(&path);
            self.follow_below(&path, Some(queue));
        } else if arrived {
            if let Some(former) = self.leaving.remove(&event.cookie) {
                self.rename_below(&former, &path);
            }
            self.follow(&path);
            self.follow_below(&path, None);
        } else if left {
            self.leaving.insert(event.cookie, path);
        }
    }

    fn handle_root(&self, mask: AddWatchFlags, queue: &mut EventQueue) {
        let itself = Path::new(".");
        if mask.contains(AddWatchFlags::IN_DELETE_SELF) {
            queue.push(itself, EventType::Remove);
        } else if mask.contains(AddWatchFlags::IN_MOVE_SELF) {
            queue.push(itself, EventType::Rename);
        } else if mask.contains(AddWatchFlags::IN_ATTRIB) && self.root.exists() {
            queue.push(itself, EventType::Chmod);
        }
    }

    /// Watches one directory below the root. One that is gone, or not to be watched, is left out.
    fn follow(&mut self, relative: &Path) -> bool {
        let path = self.root.join(relative);
        let Ok(meta) = fs::symlink_metadata(&path) else {
            return false;
        };
        if !self.border.admits(&path, &meta) {
            return false;
        }
        let elsewhere = meta.dev() != self.root_device;
        if elsewhere
            && !self.options.allow_network_mounts
            && network_mount::is_network(&path).unwrap_or(true)
        {
            return false;
        }
        if self.directories.len() >= self.max_directories {
            self.refuse(&path, Limit::Directories(self.max_directories));
            return false;
        }
        match self
            .instance
            .0
            .add_watch(&path, interesting() | AddWatchFlags::IN_DONT_FOLLOW)
        {
            Ok(watch) => {
                self.directories.insert(watch, relative.to_path_buf());
                true
            }
            Err(Errno::ENOSPC) => {
                self.refuse(&path, Limit::Watches);
                false
            }
            // Gone, replaced by a link, or deeper than a path can say.
            Err(_) => false,
        }
    }

    fn refuse(&mut self, path: &Path, limit: Limit) {
        if self.full.is_none() {
            self.full = Some(limit);
            log::warn(
                "cannot watch a directory, a limit is reached",
                json!({"path": path, "limit": limit.name()}),
            );
        }
    }

    /// Watches every directory below `start`. With a queue it reports what it finds as created: `start` is new, so all of
    /// it appeared after `start` did, maybe before it was watched.
    fn follow_below(&mut self, start: &Path, mut queue: Option<&mut EventQueue>) {
        let mut pending = vec![start.to_path_buf()];
        while let Some(directory) = pending.pop() {
            let Ok(entries) = fs::read_dir(self.root.join(&directory)) else {
                continue;
            };
            for entry in entries.flatten() {
                if self.cancelled.check().is_err() {
                    return;
                }
                let relative = directory.join(entry.file_name());
                if let Some(queue) = queue.as_deref_mut() {
                    queue.push(&relative, EventType::Create);
                    self.foretold.insert(relative.clone());
                }
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    if self.follow(&relative) {
                        pending.push(relative);
                    } else if self.full.is_some() && queue.is_none() {
                        return;
                    }
                }
            }
        }
    }

    fn rename_below(&mut self, from: &Path, to: &Path) {
        for path in self.directories.values_mut() {
            if let Ok(rest) = path.strip_prefix(from) {
                *path = if rest.as_os_str().is_empty() {
                    to.to_path_buf()
                } else {
                    to.join(rest)
                };
            }
        }
    }

    fn forget_below(&mut self, gone: &Path) {
        let watches: Vec<_> = self
            .directories
            .iter()
            .filter(|(_, path)| path.starts_with(gone))
            .map(|(watch, _)| *watch)
            .collect();
        for watch in watches {
            self.directories.remove(&watch);
            // It may have been deleted since; then the kernel has forgotten it already.
            let _ = self.instance.0.rm_watch(watch);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::super::blocking::CancelOnDrop, *};
    use EventType::{Chmod, Create, Remove, Rename, Write};

    struct Watched {
        dir: tempfile::TempDir,
        tree: Tree,
    }

    impl Watched {
        fn new(recursive: bool) -> Self {
            let dir = tempfile::tempdir().unwrap();
            fs::create_dir_all(dir.path().join("sub/deep")).unwrap();
            let options = WatchOptions {
                recursive,
                ..WatchOptions::default()
            };
            let tree = Tree::open(dir.path(), options, Cancelled::default()).unwrap();
            Self { dir, tree }
        }

        fn at(&self, name: &str) -> PathBuf {
            self.dir.path().join(name)
        }

        fn seen(&mut self) -> Vec<(String, EventType)> {
            let mut queue = EventQueue::default();
            assert!(!self.tree.collect(&mut queue).unwrap());
            let (events, _) = queue.drain();
            events
                .into_iter()
                .map(|event| (event.name.clone(), event.r#type()))
                .collect()
        }
    }

    fn owned(expected: &[(&str, EventType)]) -> Vec<(String, EventType)> {
        expected
            .iter()
            .map(|(name, kind)| ((*name).to_owned(), *kind))
            .collect()
    }

    #[test]
    fn reports_each_kind() {
        let mut watched = Watched::new(false);
        fs::write(watched.at("f"), "x").unwrap();
        assert_eq!(watched.seen(), owned(&[("f", Create), ("f", Write)]));
        fs::rename(watched.at("f"), watched.at("g")).unwrap();
        assert_eq!(watched.seen(), owned(&[("f", Rename), ("g", Create)]));
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        fs::set_permissions(watched.at("g"), mode).unwrap();
        fs::remove_file(watched.at("g")).unwrap();
        assert_eq!(watched.seen(), owned(&[("g", Chmod), ("g", Remove)]));
        fs::write(watched.at("sub/f"), "x").unwrap();
        assert_eq!(watched.seen(), []);
    }

    #[test]
    fn follows_new_directories_and_what_was_already_in_them() {
        let mut watched = Watched::new(true);
        fs::write(watched.at("sub/deep/f"), "").unwrap();
        assert_eq!(watched.seen(), owned(&[("sub/deep/f", Create)]));
        fs::create_dir_all(watched.at("new/er")).unwrap();
        fs::write(watched.at("new/er/early"), "x").unwrap();
        assert_eq!(
            watched.seen(),
            owned(&[
                ("new", Create),
                ("new/er", Create),
                ("new/er/early", Create)
            ])
        );
        fs::write(watched.at("new/er/late"), "").unwrap();
        assert_eq!(watched.seen(), owned(&[("new/er/late", Create)]));
    }

    #[test]
    fn follows_renamed_directories_and_forgets_those_that_left() {
        let elsewhere = tempfile::tempdir().unwrap();
        let mut watched = Watched::new(true);
        fs::rename(watched.at("sub"), watched.at("moved")).unwrap();
        fs::write(watched.at("moved/deep/f"), "").unwrap();
        assert_eq!(
            watched.seen(),
            owned(&[("sub", Rename), ("moved", Create), ("moved/deep/f", Create)])
        );
        fs::rename(watched.at("moved"), elsewhere.path().join("gone")).unwrap();
        assert_eq!(watched.seen(), owned(&[("moved", Rename)]));
        fs::write(elsewhere.path().join("gone/deep/g"), "").unwrap();
        assert_eq!(watched.seen(), []);
        fs::rename(elsewhere.path().join("gone"), watched.at("back")).unwrap();
        assert_eq!(watched.seen(), owned(&[("back", Create)]));
        fs::write(watched.at("back/deep/h"), "").unwrap();
        assert_eq!(watched.seen(), owned(&[("back/deep/h", Create)]));
    }

    #[test]
    fn tells_when_the_root_goes() {
        let mut watched = Watched::new(false);
        fs::remove_dir_all(watched.dir.path()).unwrap();
        assert_eq!(watched.seen().last(), owned(&[(".", Remove)]).last());
    }

    #[test]
    fn refuses_what_is_no_directory() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("f"), "").unwrap();
        for (name, code) in [("none", Code::NotFound), ("f", Code::InvalidArgument)] {
            let (options, flag) = (WatchOptions::default(), Cancelled::default());
            let error = Tree::open(&dir.path().join(name), options, flag).unwrap_err();
            assert_eq!(error.code, code);
        }
    }

    #[test]
    fn is_bounded_and_stops_when_nobody_wants_it() {
        let dir = tempfile::tempdir().unwrap();
        for number in 0..5 {
            fs::create_dir(dir.path().join(number.to_string())).unwrap();
        }
        let options = WatchOptions {
            recursive: true,
            ..WatchOptions::default()
        };
        let wanted = CancelOnDrop::default();
        let open = |most| Tree::open_bounded(dir.path(), options, wanted.flag(), most);
        assert_eq!(open(6).unwrap().directories.len(), 6);
        let error = open(5).unwrap_err();
        assert_eq!(error.code, Code::ResourceExhausted);
        assert!(error.message.contains("more than 5 directories"));
        let flag = wanted.flag();
        drop(wanted);
        let error = Tree::open(dir.path(), options, flag).unwrap_err();
        assert_eq!(error.code, Code::Canceled);
    }

    #[test]
    fn does_not_enter_pseudo_file_systems_from_outside() {
        let mut watched = Watched::new(true);
        let border = |root: &Path| Border::around(root, &fs::metadata(root).unwrap()).unwrap();
        watched.tree.root = PathBuf::from("/");
        watched.tree.border = border(Path::new("/"));
        assert!(!watched.tree.follow(Path::new("proc")));
        assert!(watched.tree.follow(Path::new("etc")));
        watched.tree.border = border(Path::new("/proc"));
        assert!(watched.tree.follow(Path::new("proc")));
    }

    #[test]
    fn does_not_follow_links_out_of_the_tree() {
        let outside = tempfile::tempdir().unwrap();
        let mut watched = Watched::new(true);
        std::os::unix::fs::symlink(outside.path(), watched.at("link")).unwrap();
        std::os::unix::fs::symlink(".", watched.at("loop")).unwrap();
        assert_eq!(watched.seen(), owned(&[("link", Create), ("loop", Create)]));
        fs::write(outside.path().join("f"), "").unwrap();
        assert_eq!(watched.seen(), []);
    }
}
