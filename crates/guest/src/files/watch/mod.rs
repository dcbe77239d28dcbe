//! Watches on directories: a stream of events, or a watcher that a client polls. The kernel's side is in `tree`.

mod limit;
mod network_mount;
mod queue;
mod registry;
mod tree;

use std::{
    path::Path,
    sync::{
        atomic::{AtomicBool, Ordering},
        Arc, Mutex, PoisonError,
    },
    time::Duration,
};

use serde_json::json;
use tokio::io::unix::AsyncFd;

use self::{
    queue::EventQueue,
    tree::{Instance, Tree},
};
use super::blocking::{blocking, CancelOnDrop};
use crate::{
    agent::log,
    proto::filesystem::FilesystemEvent,
    rpc::{Code, RpcError, RpcResult},
};

pub use self::registry::Watchers;

/// How long events are gathered after the first one, so that the parts of one change arrive together and are merged.
const GATHER: Duration = Duration::from_millis(15);

/// What a client can choose.
#[derive(Clone, Copy, Debug, Default)]
pub struct WatchOptions {
    pub recursive: bool,
    pub include_entry: bool,
    pub allow_network_mounts: bool,
}

#[derive(Debug)]
struct Contents {
    tree: Tree,
    queue: EventQueue,
    include_entry: bool,
}

impl Contents {
    /// Moves the kernel's events into the queue; true if there may be more.
    fn collect(&mut self) -> RpcResult<bool> {
        let more = self.tree.collect(&mut self.queue)?;
        if self.include_entry {
            self.queue.resolve(self.tree.root());
        }
        Ok(more)
    }

    fn drain(&mut self) -> Vec<FilesystemEvent> {
        let (events, dropped) = self.queue.drain();
        if dropped > 0 {
            log::warn(
                "dropped file events that were not collected in time",
                json!({"path": self.tree.root(), "dropped": dropped}),
            );
        }
        events
    }
}

/// A watch that is armed. Dropping it ends it.
#[derive(Debug)]
pub struct Watch {
    ready: AsyncFd<Arc<Instance>>,
    contents: Arc<Mutex<Contents>>,
    /// The last collection stopped before the kernel had nothing left.
    more: AtomicBool,
    /// Stops a walk through the tree that runs when the watch is dropped.
    _wanted: CancelOnDrop,
}

impl Watch {
    /// Starts to watch the directory `path`.
    ///
    /// # Errors
    /// As `Tree::open`.
    pub async fn open(path: &Path, options: WatchOptions) -> RpcResult<Self> {
        let path = path.to_path_buf();
        let wanted = CancelOnDrop::default();
        let cancelled = wanted.flag();
        let tree = blocking(move || Tree::open(&path, options, cancelled)).await??;
        // SAFETY: the instance is shared and its descriptor stays open, and the same, until the last share is dropped;
        // this registration holds one.
        let registered = unsafe { AsyncFd::register(tree.instance()) };
        let ready = registered.map_err(|error| cannot_wait(error.into()))?;
        Ok(Self {
            ready,
            contents: Arc::new(Mutex::new(Contents {
                tree,
                queue: EventQueue::default(),
                include_entry: options.include_entry,
            })),
            more: AtomicBool::new(false),
            _wanted: wanted,
        })
    }

    /// Waits for changes and returns them.
    ///
    /// # Errors
    /// `internal` if the kernel's events cannot be read.
    pub async fn next(&self) -> RpcResult<Vec<FilesystemEvent>> {
        loop {
            self.wait().await?;
            let events = self.collect(true).await?;
            if !events.is_empty() {
                return Ok(events);
            }
        }
    }

    /// Everything up to now, without waiting: what was changed before this call is in it.
    ///
    /// # Errors
    /// As `next`.
    pub async fn now(&self) -> RpcResult<Vec<FilesystemEvent>> {
        self.collect(true).await
    }

    /// Keeps the queue filled and new directories followed, for a watch that is polled. Ends only with an error.
    async fn keep_collecting(&self) -> RpcError {
        loop {
            let step = async {
                self.wait().await?;
                self.collect(false).await
            };
            if let Err(error) = step.await {
                return error;
            }
        }
    }

    /// Waits until the kernel has events, and a moment longer.
    async fn wait(&self) -> RpcResult<()> {
        if self.more.swap(false, Ordering::Relaxed) {
            return Ok(());
        }
        let mut ready = self.ready.readable().await.map_err(cannot_wait)?;
        tokio::time::sleep(GATHER).await;
        // Before reading: what arrives after this sets it again.
        ready.clear_ready();
        Ok(())
    }

    /// Moves the kernel's events into the queue, and all of them out of it if `drain` is set.
    async fn collect(&self, drain: bool) -> RpcResult<Vec<FilesystemEvent>> {
        let contents = Arc::clone(&self.contents);
        let (more, events) = blocking(move || {
            let mut contents = contents.lock().unwrap_or_else(PoisonError::into_inner);
            let more = contents.collect()?;
            let events = if drain { contents.drain() } else { Vec::new() };
            RpcResult::Ok((more, events))
        })
        .await??;
        if more {
            self.more.store(true, Ordering::Relaxed);
        }
        Ok(events)
    }
}

fn cannot_wait(error: std::io::Error) -> RpcError {
    RpcError::new(
        Code::Internal,
        format!("cannot wait for file events: {error}"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::filesystem::EventType;

    #[tokio::test]
    async fn waits_for_changes_and_completes_them() {
        let dir = tempfile::tempdir().unwrap();
        let options = WatchOptions {
            include_entry: true,
            ..WatchOptions::default()
        };
        let watch = Watch::open(dir.path(), options).await.unwrap();
        assert!(watch.now().await.unwrap().is_empty());
        let path = dir.path().join("f");
        let writer = tokio::task::spawn_blocking(move || std::fs::write(path, "123").unwrap());
        let mut seen = Vec::new();
        while seen
            .last()
            .is_none_or(|(kind, _)| *kind != EventType::Write)
        {
            for event in watch.next().await.unwrap() {
                seen.push((event.r#type(), event.entry.map(|entry| entry.size)));
            }
        }
        writer.await.unwrap();
        assert_eq!(seen[0].0, EventType::Create);
        assert_eq!(seen.last(), Some(&(EventType::Write, Some(3))));
    }
}
