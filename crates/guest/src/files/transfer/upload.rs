//! `POST /files`: one file as the raw body, or several as form data.

use std::{
    collections::HashSet,
    io,
    path::{Path, PathBuf},
    pin::pin,
    sync::Arc,
};

use axum::{
    body::Body,
    extract::{Request, State},
    response::Response,
};
use bytes::Bytes;
use futures_util::{stream, Stream, StreamExt};
use http::{
    header::{CONTENT_TYPE, EXPECT},
    request, HeaderMap, HeaderValue, StatusCode,
};

use super::{
    super::{
        blocking::blocking,
        create::{open_target, Target},
        failure::{bad_request, from_io, internal},
        metadata::Metadata,
        signature::Operation,
    },
    authorize, multipart,
    multipart::Parts,
    query::Query,
    receive::{self, Incoming, ReceiveError, Source},
    Caller, Written,
};
use crate::agent::{error::HttpError, state::AgentState};

/// Answers the request.
pub async fn serve(
    State(state): State<Arc<AgentState>>,
    request: Request,
) -> Result<Response, HttpError> {
    let (head, body) = request.into_parts();
    let source = Source::new(body);
    match receive_files(state, &head, &source).await {
        Ok(written) => {
            let json = serde_json::to_string(&written).map_err(internal)?;
            let mut response = Response::new(Body::from(json));
            response
                .headers_mut()
                .insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
            Ok(response)
        }
        Err(error) => {
            // A client that waits for permission to send has nothing under way.
            if !head.headers.contains_key(EXPECT) {
                source.drain();
            }
            Err(error)
        }
    }
}

async fn receive_files(
    state: Arc<AgentState>,
    head: &request::Parts,
    source: &Source,
) -> Result<Vec<Written>, HttpError> {
    let query = Query::parse(head.uri.query())?;
    authorize(&state, &head.headers, &query, Operation::Write)?;
    let caller = Caller::of(state, query.user()).await?;
    let upload = Upload {
        caller,
        metadata: Metadata::from_headers(&head.headers)?,
        path: query.named_path().map(ToOwned::to_owned),
    };
    let incoming = source.decoded(&head.headers)?;
    let content_type = content_type(&head.headers);
    if let Some(boundary) = multipart::boundary(content_type) {
        return upload.form(Parts::new(incoming, &boundary)).await;
    }
    let essence = content_type.split(';').next().unwrap_or_default().trim();
    if essence.eq_ignore_ascii_case("application/octet-stream") {
        return upload.raw(incoming).await;
    }
    Err(bad_request(format!(
        "content type '{content_type}' is not supported: send application/octet-stream, or multipart/form-data \
         with a boundary"
    )))
}

fn content_type(headers: &HeaderMap) -> &str {
    headers
        .get(CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .unwrap_or_default()
}

/// What holds for all files of one request.
struct Upload {
    caller: Caller,
    metadata: Metadata,
    path: Option<String>,
}

impl Upload {
    async fn raw(&self, incoming: Incoming) -> Result<Vec<Written>, HttpError> {
        let Some(path) = &self.path else {
            return Err(bad_request("the query parameter 'path' is missing"));
        };
        let path = self.caller.path(path)?;
        Ok(vec![self.store(path, incoming).await?])
    }

    async fn form(&self, mut parts: Parts<Incoming>) -> Result<Vec<Written>, HttpError> {
        let mut written = Vec::new();
        let mut targets = HashSet::new();
        while let Some(part) = parts
            .next_part()
            .await
            .map_err(|error| body_failed(&error))?
        {
            if part.name != "file" {
                continue;
            }
            let path = match (&self.path, &part.filename) {
                (Some(path), _) => path,
                (None, Some(filename)) if !filename.is_empty() => filename,
                _ => {
                    return Err(bad_request(
                        "a part has no file name, and the query has no 'path'",
                    ))
                }
            };
            let path = self.caller.path(path)?;
            if !targets.insert(path.clone()) {
                return Err(bad_request(format!(
                    "two files of the upload have the same path '{}'",
                    path.display()
                )));
            }
            let content = stream::unfold(&mut parts, |parts| async move {
                let data = parts.next_data().await.transpose()?;
                Some((data, parts))
            });
            written.push(self.store(path, pin!(content)).await?);
        }
        if written.is_empty() {
            return Err(bad_request("the form has no part named 'file'"));
        }
        Ok(written)
    }

    async fn store(
        &self,
        path: PathBuf,
        content: impl Stream<Item = io::Result<Bytes>> + Unpin,
    ) -> Result<Written, HttpError> {
        let mut content = content.fuse();
        // A body that is broken from its first byte must not cost the file that is there.
        let first = content
            .next()
            .await
            .transpose()
            .map_err(|error| body_failed(&error))?;
        let (target, owner, metadata) = (path.clone(), self.caller.owner(), self.metadata.clone());
        let opened = blocking(move || {
            let Target { file, created } = open_target(&target, owner)?;
            if let Err(error) = metadata.replace(&file) {
                if created {
                    remove_created(&target);
                }
                return Err(error);
            }
            Ok(file)
        });
        let file = opened.await.map_err(internal)??;
        let content = stream::iter(first.map(Ok)).chain(content);
        match receive::write(file, content).await {
            Ok(()) => Ok(Written::new(&path, self.metadata.0.clone())),
            Err(ReceiveError::Body(error)) => Err(body_failed(&error)),
            Err(ReceiveError::Disk(error)) => Err(from_io("write", &path, &error)),
        }
    }
}

fn remove_created(path: &Path) {
    // The answer is an error already, and an empty file that stays does no harm.
    let _ = std::fs::remove_file(path);
}

fn body_failed(error: &io::Error) -> HttpError {
    let status = match error.kind() {
        io::ErrorKind::TimedOut => StatusCode::REQUEST_TIMEOUT,
        _ => StatusCode::BAD_REQUEST,
    };
    HttpError::new(status, format!("cannot read the upload: {error}"))
}
