//! `filesystem.Filesystem` on the wire: resolves paths and users, and calls what does the work. Decides nothing else.

use std::{collections::VecDeque, path::PathBuf, sync::Arc};

use axum::Router;
use futures_util::{stream, Stream};

use super::{
    blocking::{blocking, CancelOnDrop},
    create::Owner,
    list, operations,
    owners::Owners,
    watch::{Watch, WatchOptions, Watchers},
};
use crate::{
    agent::{paths, state::AgentState, users::User},
    proto::filesystem::{
        watch_dir_response::{Event, KeepAlive, StartEvent},
        CreateWatcherRequest, CreateWatcherResponse, GetWatcherEventsRequest,
        GetWatcherEventsResponse, ListDirRequest, ListDirResponse, MakeDirRequest, MakeDirResponse,
        MoveRequest, MoveResponse, RemoveRequest, RemoveResponse, RemoveWatcherRequest,
        RemoveWatcherResponse, StatRequest, StatResponse, WatchDirRequest, WatchDirResponse,
    },
    rpc::{Code, Context, RpcError, RpcResult, Service},
};

/// The service's routes.
pub fn router(state: Arc<AgentState>) -> Router {
    let watchers = Arc::new(Watchers::default());
    let (creating, polling, removing) = (Arc::clone(&watchers), Arc::clone(&watchers), watchers);
    Service::new("filesystem.Filesystem", state)
        .unary("Stat", stat)
        .unary("MakeDir", make_dir)
        .unary("Move", move_entry)
        .unary("ListDir", list_dir)
        .unary("Remove", remove)
        .server_stream("WatchDir", keepalive, watch_dir)
        .unary(
            "CreateWatcher",
            move |call: Context, request: CreateWatcherRequest| {
                create_watcher(Arc::clone(&creating), call, request)
            },
        )
        .unary(
            "GetWatcherEvents",
            move |_: Context, request: GetWatcherEventsRequest| {
                let watchers = Arc::clone(&polling);
                async move {
                    let events = watchers.events(&request.watcher_id).await?;
                    Ok(GetWatcherEventsResponse { events })
                }
            },
        )
        .unary(
            "RemoveWatcher",
            move |_: Context, request: RemoveWatcherRequest| {
                let watchers = Arc::clone(&removing);
                async move {
                    watchers.remove(&request.watcher_id)?;
                    Ok(RemoveWatcherResponse {})
                }
            },
        )
        .into_router()
}

/// Whom a call acts for, and from where its paths start.
struct Caller {
    user: User,
    workdir: Option<String>,
}

impl Caller {
    async fn of(call: Context) -> RpcResult<Self> {
        let workdir = call.state.default_workdir();
        let user = blocking(move || call.user()).await??;
        Ok(Self { user, workdir })
    }

    fn path(&self, text: &str) -> RpcResult<PathBuf> {
        paths::resolve(text, &self.user, self.workdir.as_deref())
            .map_err(|message| RpcError::new(Code::InvalidArgument, message))
    }

    /// The path of a call that changes what is there. Empty, it would be the workdir, which nobody means to remove or
    /// move by a field that was left out.
    fn named_path(&self, field: &str, text: &str) -> RpcResult<PathBuf> {
        if text.is_empty() {
            return Err(RpcError::new(
                Code::InvalidArgument,
                format!("the field '{field}' is empty; name a file or directory"),
            ));
        }
        self.path(text)
    }

    fn owner(&self) -> Owner {
        Owner {
            uid: self.user.uid,
            gid: self.user.gid,
        }
    }
}

async fn stat(call: Context, request: StatRequest) -> RpcResult<StatResponse> {
    let path = Caller::of(call).await?.path(&request.path)?;
    let entry = blocking(move || operations::stat(&path)).await??;
    Ok(StatResponse { entry: Some(entry) })
}

async fn make_dir(call: Context, request: MakeDirRequest) -> RpcResult<MakeDirResponse> {
    let caller = Caller::of(call).await?;
    let (path, owner) = (caller.named_path("path", &request.path)?, caller.owner());
    let entry = blocking(move || operations::make_dir(&path, owner)).await??;
    Ok(MakeDirResponse { entry: Some(entry) })
}

async fn move_entry(call: Context, request: MoveRequest) -> RpcResult<MoveResponse> {
    let caller = Caller::of(call).await?;
    let owner = caller.owner();
    let (source, destination) = (
        caller.named_path("source", &request.source)?,
        caller.named_path("destination", &request.destination)?,
    );
    let entry = blocking(move || operations::move_entry(&source, &destination, owner)).await??;
    Ok(MoveResponse { entry: Some(entry) })
}

async fn list_dir(call: Context, request: ListDirRequest) -> RpcResult<ListDirResponse> {
    let path = Caller::of(call).await?.path(&request.path)?;
    let wanted = CancelOnDrop::default();
    let cancelled = wanted.flag();
    let entries =
        blocking(move || list::list(&path, request.depth, &Owners::default(), &cancelled))
            .await??;
    Ok(ListDirResponse { entries })
}

async fn remove(call: Context, request: RemoveRequest) -> RpcResult<RemoveResponse> {
    let path = Caller::of(call).await?.named_path("path", &request.path)?;
    blocking(move || operations::remove(&path)).await??;
    Ok(RemoveResponse {})
}

async fn create_watcher(
    watchers: Arc<Watchers>,
    call: Context,
    request: CreateWatcherRequest,
) -> RpcResult<CreateWatcherResponse> {
    let path = Caller::of(call).await?.path(&request.path)?;
    let options = WatchOptions {
        recursive: request.recursive,
        include_entry: request.include_entry,
        allow_network_mounts: request.allow_network_mounts,
    };
    let watcher_id = watchers.create(&path, options).await?;
    Ok(CreateWatcherResponse { watcher_id })
}

async fn watch_dir(
    call: Context,
    request: WatchDirRequest,
) -> RpcResult<impl Stream<Item = RpcResult<WatchDirResponse>> + Send + 'static> {
    let path = Caller::of(call).await?.path(&request.path)?;
    let options = WatchOptions {
        recursive: request.recursive,
        include_entry: request.include_entry,
        allow_network_mounts: request.allow_network_mounts,
    };
    let watch = Watch::open(&path, options).await?;
    Ok(responses(watch))
}

/// `start`, then every event for as long as somebody reads. While nobody does, events wait in the kernel's own bounded
/// queue.
fn responses(watch: Watch) -> impl Stream<Item = RpcResult<WatchDirResponse>> + Send + 'static {
    let first = VecDeque::from([Event::Start(StartEvent {})]);
    stream::unfold(Some((watch, first)), |state| async move {
        let (watch, mut waiting) = state?;
        loop {
            if let Some(event) = waiting.pop_front() {
                return Some((
                    Ok(WatchDirResponse { event: Some(event) }),
                    Some((watch, waiting)),
                ));
            }
            match watch.next().await {
                Ok(events) => waiting.extend(events.into_iter().map(Event::Filesystem)),
                Err(error) => return Some((Err(error), None)),
            }
        }
    })
}

fn keepalive() -> WatchDirResponse {
    WatchDirResponse {
        event: Some(Event::Keepalive(KeepAlive {})),
    }
}
