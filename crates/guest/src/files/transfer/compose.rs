//! `POST /files/compose`: makes one file of several, which are removed.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{fchown, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::Arc,
};

use axum::{
    body::{to_bytes, Body},
    extract::{Request, State},
    response::Response,
};
use http::{header::CONTENT_TYPE, HeaderValue};
use serde::Deserialize;

use super::{
    super::{
        blocking::blocking,
        create::{make_parents, Owner, FILE_MODE},
        failure::{bad_request, from_io, internal, is_directory, not_regular},
        random_name,
    },
    Caller, Written,
};
use crate::agent::{error::HttpError, state::AgentState};

/// Longest request.
const MAX_REQUEST: usize = 4 << 20;

#[derive(Deserialize)]
struct ComposeRequest {
    source_paths: Vec<String>,
    destination: String,
    username: Option<String>,
}

/// Answers the request.
pub async fn serve(
    State(state): State<Arc<AgentState>>,
    request: Request,
) -> Result<Response, HttpError> {
    let body = to_bytes(request.into_body(), MAX_REQUEST)
        .await
        .map_err(|error| bad_request(format!("cannot read the request: {error}")))?;
    let wanted: ComposeRequest = serde_json::from_slice(&body)
        .map_err(|error| bad_request(format!("cannot read the request: {error}")))?;
    let username = wanted.username.as_deref().filter(|name| !name.is_empty());
    let caller = Caller::of(state, username).await?;
    if wanted.source_paths.is_empty() {
        return Err(bad_request("'source_paths' is empty"));
    }
    if wanted.destination.is_empty() {
        return Err(bad_request("'destination' is empty"));
    }
    let sources = wanted
        .source_paths
        .iter()
        .map(|path| caller.path(path))
        .collect::<Result<Vec<_>, _>>()?;
    let destination = caller.path(&wanted.destination)?;
    let written = Written::new(&destination, Default::default());
    let owner = caller.owner();
    blocking(move || compose(&sources, &destination, owner))
        .await
        .map_err(internal)??;
    let json = serde_json::to_string(&written).map_err(internal)?;
    let mut response = Response::new(Body::from(json));
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Ok(response)
}

/// Writes the sources, one after the other, to a new file that then takes the destination's place. The destination may be
/// one of them. On failure nothing has changed.
fn compose(sources: &[PathBuf], destination: &Path, owner: Owner) -> Result<(), HttpError> {
    let mut opened = Vec::new();
    let mut real_sources = Vec::new();
    for path in sources {
        opened.push(open_source(path)?);
        real_sources.push(fs::canonicalize(path).map_err(|error| from_io("read", path, &error))?);
    }
    let failed = |error: io::Error| from_io("write", destination, &error);
    make_parents(destination, owner).map_err(failed)?;
    // A link stays a link.
    let target = fs::canonicalize(destination).unwrap_or_else(|_| destination.to_path_buf());
    match fs::metadata(&target) {
        Ok(meta) if meta.is_dir() => return Err(is_directory(destination)),
        Ok(meta) if !meta.is_file() => return Err(not_regular(destination)),
        _ => {}
    }
    let temporary = target.with_file_name(random_name(".compose-").map_err(internal)?);
    let result = fill(&temporary, opened, owner).and_then(|()| fs::rename(&temporary, &target));
    if let Err(error) = result {
        // Not there if creating it was what failed.
        let _ = fs::remove_file(&temporary);
        return Err(failed(error));
    }
    for (path, real) in sources.iter().zip(&real_sources) {
        if *real != target {
            match fs::remove_file(path) {
                // Named twice.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                removed => removed.map_err(|error| from_io("remove", path, &error))?,
            }
        }
    }
    Ok(())
}

fn open_source(path: &Path) -> Result<File, HttpError> {
    let failed = |error: io::Error| from_io("read", path, &error);
    let meta = fs::metadata(path).map_err(failed)?;
    if meta.is_dir() {
        return Err(is_directory(path));
    }
    if !meta.is_file() {
        return Err(not_regular(path));
    }
    File::open(path).map_err(failed)
}

fn fill(path: &Path, sources: Vec<File>, owner: Owner) -> io::Result<()> {
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(FILE_MODE)
        .open(path)?;
    fchown(&file, Some(owner.uid), Some(owner.gid))?;
    for mut source in sources {
        io::copy(&mut source, &mut file)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn me() -> Owner {
        Owner {
            uid: nix::unistd::getuid().as_raw(),
            gid: nix::unistd::getgid().as_raw(),
        }
    }

    #[test]
    fn joins_and_removes_the_sources() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("a"), "one ").unwrap();
        fs::write(at("b"), "two").unwrap();
        compose(&[at("a"), at("b"), at("a")], &at("new/c"), me()).unwrap();
        assert_eq!(fs::read_to_string(at("new/c")).unwrap(), "one twoone ");
        assert!(!at("a").exists() && !at("b").exists());

        fs::write(at("d"), " more").unwrap();
        compose(&[at("new/c"), at("d")], &at("new/c"), me()).unwrap();
        assert_eq!(fs::read_to_string(at("new/c")).unwrap(), "one twoone  more");
        assert_eq!(fs::read_dir(at("new")).unwrap().count(), 1);
    }

    #[test]
    fn changes_nothing_on_failure() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("a"), "one").unwrap();
        fs::create_dir(at("dir")).unwrap();
        for (sources, destination, status) in [
            (vec![at("a"), at("none")], at("c"), 404),
            (vec![at("a"), at("dir")], at("c"), 400),
            (vec![at("a")], at("dir"), 400),
        ] {
            assert_eq!(
                compose(&sources, &destination, me()).unwrap_err().status,
                status
            );
            assert_eq!(fs::read_to_string(at("a")).unwrap(), "one");
            assert!(!at("c").exists());
        }
    }
}
