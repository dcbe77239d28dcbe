//! The watchers that clients poll (`CreateWatcher`, `GetWatcherEvents`, `RemoveWatcher`), by identifier.

use std::{
    collections::HashMap,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use serde_json::json;
use tokio::task::AbortHandle;

use super::{super::random_name, Watch, WatchOptions};
use crate::{
    agent::log,
    proto::filesystem::FilesystemEvent,
    rpc::{Code, RpcError, RpcResult},
};

/// A watcher and the task that collects for it.
#[derive(Debug)]
struct Watcher {
    watch: Arc<Watch>,
    collecting: AbortHandle,
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.collecting.abort();
    }
}

/// All watchers of the agent. They live until they are removed; the kernel's limit for inotify instances bounds them.
#[derive(Debug, Default)]
pub struct Watchers(Mutex<HashMap<String, Watcher>>);

impl Watchers {
    /// Creates a watcher and returns its identifier.
    ///
    /// # Errors
    /// As `Watch::open`.
    pub async fn create(&self, path: &Path, options: WatchOptions) -> RpcResult<String> {
        let watch = Arc::new(Watch::open(path, options).await?);
        let id = random_name("w").map_err(|error| {
            RpcError::new(Code::Internal, format!("cannot name the watcher: {error}"))
        })?;
        let collecting = tokio::spawn({
            let watch = Arc::clone(&watch);
            let path = path.to_path_buf();
            async move {
                let error = watch.keep_collecting().await;
                log::error(
                    "a watcher stopped",
                    json!({"path": path, "error": error.to_string()}),
                );
            }
        })
        .abort_handle();
        self.locked()
            .insert(id.clone(), Watcher { watch, collecting });
        Ok(id)
    }

    /// Takes the events that watcher `id` has gathered, up to what was changed before this call.
    ///
    /// # Errors
    /// `not_found` for an unknown watcher.
    pub async fn events(&self, id: &str) -> RpcResult<Vec<FilesystemEvent>> {
        let watch = self
            .locked()
            .get(id)
            .map(|watcher| Arc::clone(&watcher.watch))
            .ok_or_else(|| unknown(id))?;
        watch.now().await
    }

    /// Ends watcher `id`.
    ///
    /// # Errors
    /// `not_found` for an unknown watcher.
    pub fn remove(&self, id: &str) -> RpcResult<()> {
        let removed = self.locked().remove(id);
        removed.map(drop).ok_or_else(|| unknown(id))
    }

    fn locked(&self) -> MutexGuard<'_, HashMap<String, Watcher>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn unknown(id: &str) -> RpcError {
    RpcError::new(Code::NotFound, format!("there is no watcher '{id}'"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::filesystem::EventType;

    #[tokio::test]
    async fn events_are_there_at_once_and_only_once() {
        let dir = tempfile::tempdir().unwrap();
        let watchers = Watchers::default();
        let id = watchers
            .create(dir.path(), WatchOptions::default())
            .await
            .unwrap();
        std::fs::write(dir.path().join("f"), "x").unwrap();
        let events = watchers.events(&id).await.unwrap();
        let kinds: Vec<_> = events.iter().map(FilesystemEvent::r#type).collect();
        assert_eq!(kinds, [EventType::Create, EventType::Write]);
        assert!(watchers.events(&id).await.unwrap().is_empty());
        watchers.remove(&id).unwrap();
        assert_eq!(watchers.events(&id).await.unwrap_err().code, Code::NotFound);
        assert_eq!(watchers.remove(&id).unwrap_err().code, Code::NotFound);
    }
}
