//! The HTTP routes under `/files`: who may ask, for which user, and the shape of answers. The work is in the siblings.

mod compose;
mod conditions;
mod content_type;
mod download;
mod encoding;
mod multipart;
mod outgoing;
mod query;
mod receive;
mod upload;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use axum::{
    routing::{get, post},
    Router,
};
use http::HeaderMap;
use serde::Serialize;

use self::query::Query;
use super::{
    blocking::blocking,
    create::Owner,
    failure::{bad_request, internal, unauthorized},
    signature::Operation,
};
use crate::agent::{
    auth::TOKEN_HEADER,
    error::HttpError,
    paths,
    state::AgentState,
    users::{User, UserError},
};

/// The routes. `GET|POST /files` check token or signature themselves, since the server leaves that to them.
pub fn router(state: Arc<AgentState>) -> Router {
    Router::new()
        .route("/files", get(download::serve).post(upload::serve))
        .route("/files/compose", post(compose::serve))
        .with_state(state)
}

/// A file that a request has made.
#[derive(Debug, Serialize)]
struct Written {
    name: String,
    path: String,
    #[serde(rename = "type")]
    kind: &'static str,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    metadata: BTreeMap<String, String>,
}

impl Written {
    fn new(path: &Path, metadata: BTreeMap<String, String>) -> Self {
        Self {
            name: path
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned(),
            path: path.to_string_lossy().into_owned(),
            kind: "file",
            metadata,
        }
    }
}

/// Checks the token header or, if there is none, the signature.
fn authorize(
    state: &AgentState,
    headers: &HeaderMap,
    query: &Query,
    operation: Operation,
) -> Result<(), HttpError> {
    if let Some(token) = headers.get(TOKEN_HEADER) {
        if state.token_matches(token.as_bytes()) {
            return Ok(());
        }
        return Err(unauthorized("the access token is wrong"));
    }
    let Some(token) = state.access_token() else {
        return Ok(());
    };
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| {
            i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
        });
    query.signed().verify(operation, &token, now)
}

/// Whom a request acts for, and from where its paths start.
struct Caller {
    user: User,
    workdir: Option<String>,
}

impl Caller {
    async fn of(state: Arc<AgentState>, name: Option<&str>) -> Result<Self, HttpError> {
        let workdir = state.default_workdir();
        let name = name.map(ToOwned::to_owned);
        let found = blocking(move || state.resolve_user(name.as_deref()))
            .await
            .map_err(internal)?;
        match found {
            Ok(user) => Ok(Self { user, workdir }),
            Err(UserError::Unknown(name)) => Err(unauthorized(format!(
                "error looking up user '{name}': no such user"
            ))),
            Err(error) => Err(internal(error)),
        }
    }

    fn path(&self, text: &str) -> Result<PathBuf, HttpError> {
        paths::resolve(text, &self.user, self.workdir.as_deref()).map_err(bad_request)
    }

    fn owner(&self) -> Owner {
        Owner {
            uid: self.user.uid,
            gid: self.user.gid,
        }
    }
}
