//! `GET /files`: which file, in which encoding, which part of it.

use std::{
    fs::{self, File, Metadata, OpenOptions},
    io::{Seek, SeekFrom, Write},
    os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::Arc,
    time::SystemTime,
};

use axum::{
    body::Body,
    extract::{Request, State},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use flate2::{write::GzEncoder, Compression};
use http::{
    header::{
        ACCEPT_RANGES, CONTENT_DISPOSITION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE,
        CONTENT_TYPE, ETAG, LAST_MODIFIED, VARY,
    },
    HeaderMap, HeaderName, HeaderValue, StatusCode,
};

use super::{
    super::{
        blocking::blocking,
        failure::{from_io, internal, is_directory, missing, not_regular},
        signature::Operation,
    },
    authorize,
    conditions::{self, Outcome, Validators},
    content_type,
    encoding::{Accepted, Encoding},
    outgoing::Outgoing,
    query::Query,
    Caller,
};
use crate::agent::{error::HttpError, state::AgentState};

/// How much of a file's begin is looked at for its type, and whether compressing it is worth anything.
const SAMPLE: usize = 64 << 10;
/// Larger files are only compressed for clients that refuse plain bytes. Clients ask for gzip without meaning it, and a
/// guest's processor compresses slower than its network sends.
const GZIP_AT_MOST: u64 = 4 << 20;

/// A file that has been found and opened.
struct Opened {
    file: File,
    path: PathBuf,
    /// None if the file's size says nothing, as in `/proc`.
    size: Option<u64>,
    sample: Vec<u8>,
    validators: Validators,
}

/// Answers the request.
pub async fn serve(
    State(state): State<Arc<AgentState>>,
    request: Request,
) -> Result<Response, HttpError> {
    let headers = request.headers();
    let query = Query::parse(request.uri().query())?;
    authorize(&state, headers, &query, Operation::Read)?;
    let caller = Caller::of(state, query.user()).await?;
    let path = caller.path(query.path.as_deref().unwrap_or_default())?;
    let wanted = headers.clone();
    let found = blocking(move || {
        let opened = open(path)?;
        let encoding = choose(&wanted, &opened)?;
        Ok((opened, encoding))
    });
    let (opened, encoding) = found.await.map_err(internal)??;
    match encoding {
        Encoding::Identity => plain(headers, opened),
        Encoding::Gzip => compressed(headers, opened),
    }
}

fn plain(headers: &HeaderMap, mut opened: Opened) -> Result<Response, HttpError> {
    let mut fields = common_fields(&opened);
    let Some(size) = opened.size else {
        return Ok(respond(
            StatusCode::OK,
            fields,
            body(opened, 0, None, false)?,
        ));
    };
    set(&mut fields, ACCEPT_RANGES, "bytes");
    set(&mut fields, ETAG, &opened.validators.etag);
    let (status, range) = match conditions::evaluate(headers, &opened.validators, size) {
        Outcome::Whole => (StatusCode::OK, 0..size),
        Outcome::Part(range) => {
            let text = format!("bytes {}-{}/{size}", range.start, range.end - 1);
            set(&mut fields, CONTENT_RANGE, &text);
            (StatusCode::PARTIAL_CONTENT, range)
        }
        Outcome::Unsatisfiable => {
            let error = HttpError::new(
                StatusCode::RANGE_NOT_SATISFIABLE,
                format!("the file has {size} bytes, none of them is in the range"),
            );
            let mut response = error.into_response();
            set(
                response.headers_mut(),
                CONTENT_RANGE,
                &format!("bytes */{size}"),
            );
            return Ok(response);
        }
        refused => return Ok(without_body(&refused, fields)),
    };
    set(
        &mut fields,
        CONTENT_LENGTH,
        &(range.end - range.start).to_string(),
    );
    // Small files have been read already.
    if range.end <= opened.sample.len() as u64 {
        let sample = Bytes::from(std::mem::take(&mut opened.sample));
        let content = sample.slice(range.start as usize..range.end as usize);
        return Ok(respond(status, fields, content.into()));
    }
    let body = body(opened, range.start, Some(range.end - range.start), false)?;
    Ok(respond(status, fields, body))
}

fn compressed(headers: &HeaderMap, mut opened: Opened) -> Result<Response, HttpError> {
    // Other bytes than the plain ones, so another tag. No length: it is known only at the end.
    let tag = opened.validators.etag.trim_end_matches('"').to_owned();
    opened.validators.etag = format!("{tag}-gzip\"");
    let mut fields = common_fields(&opened);
    set(&mut fields, ETAG, &opened.validators.etag);
    match conditions::preconditions(headers, &opened.validators) {
        Outcome::Whole => {}
        refused => return Ok(without_body(&refused, fields)),
    }
    set(&mut fields, CONTENT_ENCODING, "gzip");
    let size = opened.size;
    let body = body(opened, 0, size, true)?;
    Ok(respond(StatusCode::OK, fields, body))
}

fn common_fields(opened: &Opened) -> HeaderMap {
    let mut fields = HeaderMap::new();
    set(
        &mut fields,
        CONTENT_TYPE,
        content_type::guess(&opened.path, &opened.sample),
    );
    set(
        &mut fields,
        CONTENT_DISPOSITION,
        &content_type::disposition(&opened.path),
    );
    set(&mut fields, VARY, "Accept-Encoding");
    set(
        &mut fields,
        LAST_MODIFIED,
        &httpdate::fmt_http_date(opened.validators.modified),
    );
    fields
}

fn set(fields: &mut HeaderMap, name: HeaderName, value: &str) {
    // All values are made here, from ASCII without control characters.
    if let Ok(value) = HeaderValue::from_str(value) {
        fields.insert(name, value);
    }
}

fn without_body(outcome: &Outcome, fields: HeaderMap) -> Response {
    let status = match outcome {
        Outcome::NotModified => StatusCode::NOT_MODIFIED,
        _ => {
            return HttpError::new(StatusCode::PRECONDITION_FAILED, "the file has changed")
                .into_response()
        }
    };
    respond(status, fields, Body::empty())
}

fn body(opened: Opened, start: u64, length: Option<u64>, gzip: bool) -> Result<Body, HttpError> {
    let mut file = opened.file;
    file.seek(SeekFrom::Start(start))
        .map_err(|error| from_io("read", &opened.path, &error))?;
    Ok(Body::from_stream(
        Outgoing::new(file, length, gzip).into_stream(),
    ))
}

fn respond(status: StatusCode, fields: HeaderMap, body: Body) -> Response {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    *response.headers_mut() = fields;
    response
}

fn open(path: PathBuf) -> Result<Opened, HttpError> {
    let failed = |error: std::io::Error| match error.raw_os_error() {
        // Below a file there is nothing.
        Some(libc::ENOTDIR) => missing(&path),
        _ => from_io("read", &path, &error),
    };
    // Before opening: that alone can block, or do something, with what is no file.
    require_regular(&path, &fs::metadata(&path).map_err(failed)?)?;
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_CLOEXEC | libc::O_NOCTTY | libc::O_NONBLOCK)
        .open(&path)
        .map_err(failed)?;
    let meta = file.metadata().map_err(failed)?;
    require_regular(&path, &meta)?;
    let mut sample = vec![0; SAMPLE];
    let got = file.read_at(&mut sample, 0).map_err(failed)?;
    sample.truncate(got);
    Ok(Opened {
        // Files the kernel makes up when they are read have a size of nothing, or of a page.
        size: (got as u64 == meta.len().min(SAMPLE as u64)).then_some(meta.len()),
        validators: Validators {
            etag: format!(
                "\"{:x}-{:x}.{:x}-{:x}\"",
                meta.ino(),
                meta.mtime(),
                meta.mtime_nsec(),
                meta.len()
            ),
            modified: meta.modified().unwrap_or(SystemTime::UNIX_EPOCH),
        },
        file,
        path,
        sample,
    })
}

fn require_regular(path: &Path, meta: &Metadata) -> Result<(), HttpError> {
    if meta.is_dir() {
        return Err(is_directory(path));
    }
    if !meta.is_file() {
        return Err(not_regular(path));
    }
    Ok(())
}

fn choose(headers: &HeaderMap, opened: &Opened) -> Result<Encoding, HttpError> {
    let accepted = Accepted::of(headers);
    let best = accepted.best().ok_or_else(|| {
        HttpError::new(
            StatusCode::NOT_ACCEPTABLE,
            "no acceptable encoding: this server sends 'identity' and 'gzip'",
        )
    })?;
    let plain_is_better = || {
        conditions::is_conditional(headers)
            || opened.size.is_some_and(|size| size > GZIP_AT_MOST)
            || !shrinks(&opened.sample)
    };
    if best == Encoding::Gzip && accepted.identity() && plain_is_better() {
        return Ok(Encoding::Identity);
    }
    Ok(best)
}

/// Whether compression saves a tenth.
fn shrinks(sample: &[u8]) -> bool {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(sample).is_ok()
        && encoder
            .finish()
            .is_ok_and(|coded| coded.len() < sample.len() - sample.len() / 10)
}
