//! Requests and answers: from JSON to calls of the daemon and back.
//!
//! No I/O. Everything that a client can get wrong is checked here; the daemon below relies on names and absolute paths.

use std::path::{Path, PathBuf};

use overlaybd::Uuid;
use serde::de::DeserializeOwned;
use serde::Deserialize;
use serde_json::{json, Value};

use crate::daemon::{Daemon, ExportRequest, SealedLayer};
use crate::error::{Error, Result};
use crate::export::{kernel_nbd, ublk};
use crate::state::{UpperMode, UpperRecord};

/// A request, its parameters not looked at yet.
#[derive(Debug)]
pub struct Request {
    /// The client's number.
    pub id: Value,
    method: String,
    params: Value,
}

/// What is to be done besides sending the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Nothing.
    Answer,
    /// The connection gets events from now on.
    Subscribe,
    /// The daemon ends.
    Shutdown,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Envelope {
    id: Value,
    method: String,
    #[serde(default = "no_parameters")]
    params: Value,
}

fn no_parameters() -> Value {
    json!({})
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Nothing {}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OpenParams {
    device: String,
    #[serde(default)]
    lowers: Vec<PathBuf>,
    #[serde(default)]
    upper: Option<UpperParams>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct UpperParams {
    directory: PathBuf,
    #[serde(default)]
    mode: UpperMode,
    #[serde(default)]
    virtual_size: u64,
}

#[derive(Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
enum ExportParams {
    Nbd {
        device: String,
        path: PathBuf,
    },
    Ublk {
        device: String,
        #[serde(default = "one")]
        queues: u16,
        #[serde(default = "default_depth")]
        depth: u16,
    },
    KernelNbd {
        device: String,
        #[serde(default = "one")]
        connections: u16,
    },
}

fn one() -> u16 {
    1
}

fn default_depth() -> u16 {
    64
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct UnexportParams {
    device: String,
    path: PathBuf,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DeviceParams {
    device: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StatsParams {
    #[serde(default)]
    device: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RestackParams {
    device: String,
    layer: PathBuf,
    #[serde(default)]
    uuid: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SealParams {
    device: String,
    layer: PathBuf,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ReplaceParams {
    device: String,
    first: usize,
    count: usize,
    layer: PathBuf,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ResizeParams {
    device: String,
    virtual_size: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CloseParams {
    device: String,
    #[serde(default)]
    remove_upper: bool,
}

impl Request {
    /// Parse a line. With the error comes the number of the request, as far as it could be found.
    ///
    /// # Errors
    /// `BadRequest`.
    pub fn parse(line: &[u8]) -> std::result::Result<Self, (Value, Error)> {
        let value: Value = serde_json::from_slice(line)
            .map_err(|error| (Value::Null, Error::BadRequest(format!("not JSON: {error}"))))?;
        let id = value.get("id").filter(|id| id.is_number()).cloned();
        let envelope: Envelope = serde_json::from_value(value).map_err(|error| {
            let id = id.clone().unwrap_or(Value::Null);
            (id, Error::BadRequest(format!("not a request: {error}")))
        })?;
        if id.is_none() {
            return Err((Value::Null, Error::BadRequest("id must be a number".into())));
        }
        Ok(Self {
            id: envelope.id,
            method: envelope.method,
            params: envelope.params,
        })
    }
}

/// Do what a request asks for.
///
/// # Errors
/// What the answer has to say.
pub fn dispatch(daemon: &Daemon, request: &Request) -> Result<(Value, Outcome)> {
    let params = &request.params;
    let result = match request.method.as_str() {
        "open" => {
            let params: OpenParams = parse(params)?;
            let name = device(&params.device)?;
            let lowers = params
                .lowers
                .into_iter()
                .map(absolute)
                .collect::<Result<_>>()?;
            let upper = params.upper.map(upper).transpose()?;
            daemon.open(name, lowers, upper)?;
            json(&daemon.describe(name)?)?
        }
        "export" => {
            let (name, wanted) = export(parse(params)?)?;
            let record = daemon.export(&name, &wanted)?;
            json!({"export": {"kind": record.kind(), "path": text(&record.path())}})
        }
        "unexport" => {
            let params: UnexportParams = parse(params)?;
            daemon.unexport(device(&params.device)?, &absolute(params.path)?)?;
            json!({})
        }
        "flush" => {
            let params: DeviceParams = parse(params)?;
            daemon.flush(device(&params.device)?)?;
            json!({})
        }
        "restack" => {
            let params: RestackParams = parse(params)?;
            let fresh = params.uuid.as_deref().map(uuid).transpose()?;
            let layer = absolute(params.layer)?;
            sealed(&daemon.restack(device(&params.device)?, &layer, fresh)?)
        }
        "seal" => {
            let params: SealParams = parse(params)?;
            let layer = absolute(params.layer)?;
            sealed(&daemon.seal(device(&params.device)?, &layer)?)
        }
        "replace" => {
            let params: ReplaceParams = parse(params)?;
            let layer = absolute(params.layer)?;
            daemon.replace(device(&params.device)?, params.first, params.count, &layer)?;
            json!({})
        }
        "resize" => {
            let params: ResizeParams = parse(params)?;
            daemon.resize(device(&params.device)?, params.virtual_size)?;
            json!({})
        }
        "close" => {
            let params: CloseParams = parse(params)?;
            daemon.close(device(&params.device)?, params.remove_upper)?;
            json!({})
        }
        "list" => {
            let Nothing {} = parse(params)?;
            json!({"devices": json(&daemon.list())?})
        }
        "stats" => {
            let params: StatsParams = parse(params)?;
            let name = params.device.as_deref().map(device).transpose()?;
            json(&daemon.numbers(name)?)?
        }
        "capabilities" => {
            let Nothing {} = parse(params)?;
            capabilities()
        }
        "subscribe" => {
            let Nothing {} = parse(params)?;
            return Ok((json!({}), Outcome::Subscribe));
        }
        "shutdown" => {
            let Nothing {} = parse(params)?;
            daemon.end();
            return Ok((json!({}), Outcome::Shutdown));
        }
        other => return Err(Error::BadRequest(format!("there is no method {other:?}"))),
    };
    Ok((result, Outcome::Answer))
}

/// Which kinds of export this host can make, and why not the others.
fn capabilities() -> Value {
    let kinds = [
        ("ublk", ublk::check_host()),
        ("kernel_nbd", kernel_nbd::check_host()),
    ];
    let reasons: serde_json::Map<_, _> = kinds
        .iter()
        .filter_map(|(kind, result)| {
            let error = result.as_ref().err()?;
            Some(((*kind).into(), error.to_string().into()))
        })
        .collect();
    let [(_, ublk), (_, kernel_nbd)] = &kinds;
    json!({"ublk": ublk.is_ok(), "kernel_nbd": kernel_nbd.is_ok(), "reasons": reasons})
}

fn parse<T: DeserializeOwned>(params: &Value) -> Result<T> {
    T::deserialize(params).map_err(|error| Error::BadRequest(format!("parameters: {error}")))
}

fn json(value: &impl serde::Serialize) -> Result<Value> {
    serde_json::to_value(value)
        .map_err(|error| Error::Internal(format!("an answer that is no JSON: {error}")))
}

fn device(name: &str) -> Result<&str> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
    if name.is_empty() || name.len() > 64 || name.starts_with('.') || !name.bytes().all(allowed) {
        return Err(Error::BadRequest(
            "device must be 1 to 64 characters of A-Z a-z 0-9 _ . -, not beginning with a dot"
                .into(),
        ));
    }
    Ok(name)
}

fn absolute(path: PathBuf) -> Result<PathBuf> {
    if !path.is_absolute() || path.as_os_str().as_encoded_bytes().contains(&0) {
        return Err(Error::BadRequest(format!(
            "{path:?} is not an absolute path"
        )));
    }
    Ok(path)
}

fn upper(params: UpperParams) -> Result<UpperRecord> {
    Ok(UpperRecord {
        directory: absolute(params.directory)?,
        mode: params.mode,
        virtual_size: params.virtual_size,
        created: false,
    })
}

fn export(params: ExportParams) -> Result<(String, ExportRequest)> {
    let in_range = |what: &str, value: u16, most: u16| {
        if (1..=most).contains(&value) {
            Ok(value)
        } else {
            Err(Error::BadRequest(format!("{what} must be 1 to {most}")))
        }
    };
    let (name, request) = match params {
        ExportParams::Nbd { device, path } => (
            device,
            ExportRequest::Nbd {
                path: absolute(path)?,
            },
        ),
        ExportParams::Ublk {
            device,
            queues,
            depth,
        } => (
            device,
            ExportRequest::Ublk {
                queues: in_range("queues", queues, 32)?,
                depth: in_range("depth", depth, 1024)?,
            },
        ),
        ExportParams::KernelNbd {
            device,
            connections,
        } => (
            device,
            ExportRequest::KernelNbd {
                connections: in_range("connections", connections, 32)?,
            },
        ),
    };
    device(&name)?;
    Ok((name, request))
}

fn uuid(text: &str) -> Result<Uuid> {
    text.parse()
        .map_err(|_| Error::BadRequest(format!("{text:?} is no UUID")))
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

fn sealed(layer: &SealedLayer) -> Value {
    json!({
        "layer": {
            "path": text(&layer.path),
            "uuid": layer.uuid.to_string(),
            "parent_uuid": layer.parent_uuid.map(|uuid| uuid.to_string()),
            "virtual_size": layer.virtual_size,
            "records": layer.records,
            "data_bytes": layer.data_bytes,
            "size": layer.size,
        },
        "paused_us": u64::try_from(layer.paused.as_micros()).unwrap_or(u64::MAX),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_leave_the_directory() {
        for name in ["", ".", "..", ".x", "a/b", "a\0", "ä", &"x".repeat(65)] {
            assert!(device(name).is_err(), "{name:?}");
        }
        for name in ["a", "A_b.c-9", &"x".repeat(64)] {
            assert!(device(name).is_ok(), "{name:?}");
        }
    }

    #[test]
    fn the_number_comes_back_even_with_an_error() {
        let parsed = |text: &str| Request::parse(text.as_bytes());
        assert_eq!(parsed("{").unwrap_err().0, Value::Null);
        assert_eq!(parsed(r#"{"id": 3}"#).unwrap_err().0, json!(3));
        assert_eq!(
            parsed(r#"{"id": 3, "method": "list", "more": 1}"#)
                .unwrap_err()
                .0,
            json!(3)
        );
        assert_eq!(
            parsed(r#"{"id": "x", "method": "list"}"#).unwrap_err().0,
            Value::Null
        );
        assert_eq!(
            parsed(r#"{"id": 3, "method": "list"}"#).unwrap().id,
            json!(3)
        );
    }
}
