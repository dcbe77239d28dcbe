//! `POST /init`: the host tells the agent whose sandbox it is in now. Called after every start, resume and fork.

use std::{
    collections::BTreeMap,
    io,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use axum::{
    body::Body,
    extract::{Request, State},
    response::{IntoResponse, Response},
};
use base64::{engine::general_purpose::STANDARD, Engine};
use http::StatusCode;
use http_body_util::{BodyExt, Limited};
use pbjson_types::Timestamp;
use serde::Deserialize;
use serde_json::json;

use super::{
    auth::{Peer, TOKEN_HEADER},
    connections,
    error::HttpError,
    generation, guest, log,
    state::{save, secrets_equal, AgentState, Settings},
    volumes::{VolumeError, VolumeMount},
    VERSION,
};

/// Larger than any environment that a process could be started with.
const MAX_BODY: usize = 8 << 20;

/// The body; everything is optional, unknown fields are ignored.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct InitRequest {
    env_vars: Option<BTreeMap<String, String>>,
    access_token: Option<String>,
    timestamp: Option<Timestamp>,
    default_user: Option<String>,
    default_workdir: Option<String>,
    #[serde(rename = "hyperloopIP")]
    hyperloop_ip: Option<String>,
    volume_mounts: Option<Vec<VolumeMount>>,
    #[serde(rename = "lifecycleID")]
    lifecycle_id: Option<String>,
    ca_bundle: Option<String>,
    sandbox_id: Option<String>,
    template_id: Option<String>,
    hostname: Option<String>,
    /// Base64.
    entropy: Option<String>,
}

/// The guest's wall clock at the moment of the answer, in nanoseconds of unix time.
const CLOCK_HEADER: &str = "x-aenv-clock";

/// Applies the request: 204 when done or when a younger one of this life was applied before, 400 for what makes no sense,
/// 401 for the wrong token, 503 while another one is being applied, 500 when the guest refuses a change, which the
/// message names; then the sandbox must not be used.
///
/// Another `lifecycleID` or `sandboxId` than before begins a new life of this memory: what it shares with its former
/// life, and with other copies, ends (see [`Plan::execute`]).
///
/// Once a token is set a request must know it: in its body, or in `X-Access-Token`, in which case the body may bring
/// a new one (a fork gets a new token).
pub async fn handler(State(state): State<Arc<AgentState>>, request: Request) -> Response {
    let mut response = match apply(state, request).await {
        Ok(()) => StatusCode::NO_CONTENT.into_response(),
        Err(error) => error.into_response(),
    };
    let headers = response.headers_mut();
    headers.insert("x-envd-version", http::HeaderValue::from_static(VERSION));
    let clock = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    if let Ok(clock) = u64::try_from(clock.as_nanos()) {
        headers.insert(CLOCK_HEADER, clock.into());
    }
    response
}

async fn apply(state: Arc<AgentState>, request: Request) -> Result<(), HttpError> {
    let (parts, body) = request.into_parts();
    let header = parts
        .headers
        .get(TOKEN_HEADER)
        .map(|value| value.as_bytes().to_vec());
    let peer = parts.extensions.get::<Peer>().map(|Peer(peer)| *peer);
    let request = read(body).await?;
    let received = Instant::now();
    check_token(&state, &request, header.as_deref())?;
    let guard = Arc::clone(&state.initializing)
        .try_lock_owned()
        .map_err(|_| {
            HttpError::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "another /init is being applied",
            )
        })?;
    // Detached from the connection: a host that gives up must not leave half of it done.
    let applied = tokio::task::spawn_blocking(move || {
        let result = Plan::new(&state.settings(), request)?
            .map_or(Ok(()), |plan| plan.execute(&state, received, peer));
        drop(guard);
        result
    });
    applied
        .await
        .map_err(|error| failed("apply the request", &io::Error::other(error)))?
}

async fn read(body: Body) -> Result<InitRequest, HttpError> {
    let bytes = Limited::new(body, MAX_BODY)
        .collect()
        .await
        .map_err(|error| bad(format!("cannot read the body: {error}")))?
        .to_bytes();
    if bytes.is_empty() {
        return Ok(InitRequest::default());
    }
    serde_json::from_slice(&bytes).map_err(|error| bad(format!("cannot read the body: {error}")))
}

fn bad(message: impl Into<String>) -> HttpError {
    HttpError::new(StatusCode::BAD_REQUEST, message)
}

fn failed(what: &str, error: &io::Error) -> HttpError {
    HttpError::new(
        StatusCode::INTERNAL_SERVER_ERROR,
        format!("cannot {what}: {error}"),
    )
}

fn check_token(
    state: &AgentState,
    request: &InitRequest,
    header: Option<&[u8]>,
) -> Result<(), HttpError> {
    let Some(current) = state.access_token() else {
        return Ok(());
    };
    let knows = |candidate: Option<&[u8]>| {
        candidate.is_some_and(|token| secrets_equal(token, current.as_bytes()))
    };
    if knows(header) || knows(request.access_token.as_deref().map(str::as_bytes)) {
        return Ok(());
    }
    Err(HttpError::new(
        StatusCode::UNAUTHORIZED,
        "the access token does not match the one that is set",
    ))
}

/// A request that was checked as a whole, with the settings that will be in force.
struct Plan {
    settings: Settings,
    request: InitRequest,
    time: Option<Duration>,
    entropy: Option<Vec<u8>>,
    new_sandbox: bool,
    new_life: bool,
    /// This memory has lived before: it was not booted just now.
    lived_before: bool,
}

impl Plan {
    /// `None` for a request older than the last one that was applied in the same life. Times of different lives prove
    /// nothing: this one may be on a host whose clock is behind.
    fn new(before: &Settings, request: InitRequest) -> Result<Option<Self>, HttpError> {
        let time = request.timestamp.as_ref().map(since_epoch).transpose()?;
        let nanos = time.and_then(|time| i64::try_from(time.as_nanos()).ok());
        let differs = |new: &Option<String>, old: &Option<String>| {
            new.as_ref().is_some_and(|new| !new.is_empty()) && new != old
        };
        let new_sandbox = differs(&request.sandbox_id, &before.sandbox_id);
        let new_life = new_sandbox || differs(&request.lifecycle_id, &before.lifecycle_id);
        let is_older = matches!((nanos, before.timestamp), (Some(now), Some(last)) if now < last);
        if is_older && !new_life {
            return Ok(None);
        }
        let entropy = request
            .entropy
            .as_ref()
            .map(|text| STANDARD.decode(text))
            .transpose()
            .map_err(|error| bad(format!("entropy is not base64: {error}")))?;
        if entropy
            .as_ref()
            .is_some_and(|bytes| bytes.len() > guest::MAX_ENTROPY)
        {
            return Err(bad(format!(
                "entropy has more than {} bytes",
                guest::MAX_ENTROPY
            )));
        }
        if let Some(name) = request
            .hostname
            .as_ref()
            .filter(|name| !guest::is_hostname(name))
        {
            return Err(bad(format!("'{name}' cannot be a hostname")));
        }
        if let Some(life) = request
            .lifecycle_id
            .as_ref()
            .filter(|life| !life.is_empty() && !generation::is_life(life))
        {
            return Err(bad(format!("'{life}' cannot be a lifecycleID")));
        }
        let bad_name = |name: &&String| name.is_empty() || name.contains(['=', '\0']);
        if let Some(name) = request
            .env_vars
            .iter()
            .flat_map(BTreeMap::keys)
            .find(bad_name)
        {
            return Err(bad(format!("'{name}' cannot be the name of a variable")));
        }
        if request
            .env_vars
            .iter()
            .flat_map(BTreeMap::values)
            .any(|value| value.contains('\0'))
        {
            return Err(bad("a variable contains a NUL byte"));
        }
        let mut settings = before.clone();
        let set = |setting: &mut Option<String>, value: &Option<String>| {
            if let Some(value) = value.as_ref().filter(|value| !value.is_empty()) {
                *setting = Some(value.clone());
            }
        };
        set(&mut settings.access_token, &request.access_token);
        set(&mut settings.default_user, &request.default_user);
        set(&mut settings.default_workdir, &request.default_workdir);
        set(&mut settings.lifecycle_id, &request.lifecycle_id);
        set(&mut settings.sandbox_id, &request.sandbox_id);
        set(&mut settings.template_id, &request.template_id);
        if let Some(address) = request
            .hyperloop_ip
            .as_ref()
            .filter(|address| !address.is_empty())
        {
            settings.events_address = Some(format!("http://{address}"));
        }
        if let Some(variables) = &request.env_vars {
            settings.env_vars.clone_from(variables);
        }
        settings.timestamp = nanos.or(before.timestamp);
        Ok(Some(Self {
            new_sandbox,
            new_life,
            lived_before: before.sandbox_id.is_some() || before.lifecycle_id.is_some(),
            settings,
            request,
            time,
            entropy,
        }))
    }

    /// Makes the changes; the settings come last, so that a request that failed can be repeated.
    ///
    /// A new life gets the time, entropy and names, and loses the connections of the former one; a new sandbox also gets a machine
    /// id. Programs are told when all of it is done.
    fn execute(
        self,
        state: &AgentState,
        received: Instant,
        peer: Option<SocketAddr>,
    ) -> Result<(), HttpError> {
        let (etc, run) = (&state.args.etc_dir, &state.args.run_dir);
        if let Some(time) = self.time {
            // The request may have waited for a thread.
            let now = time + received.elapsed();
            if guest::set_clock(now, self.new_life)
                .map_err(|error| failed("set the clock", &error))?
            {
                log::info("the clock was set", json!({}));
            }
        }
        if let Some(bytes) = &self.entropy {
            guest::add_entropy(bytes)
                .map_err(|error| failed("reseed the random generator", &error))?;
        }
        if self.new_sandbox {
            guest::renew_machine_id(etc).map_err(|error| failed("renew the machine id", &error))?;
        }
        if let Some(name) = &self.request.hostname {
            guest::set_hostname(name, etc).map_err(|error| failed("set the hostname", &error))?;
        }
        if let (true, true, Some(uplink), Some(peer)) =
            (self.new_life, self.lived_before, &state.args.uplink, peer)
        {
            let closed = connections::close_stale(uplink, peer)
                .map_err(|error| failed("close the connections of the former life", &error))?;
            if closed > 0 {
                log::info("stale connections were closed", json!({"count": closed}));
            }
        }
        if let Some(bundle) = self
            .request
            .ca_bundle
            .as_ref()
            .filter(|bundle| !bundle.is_empty())
        {
            guest::trust_certificates(bundle, etc)
                .map_err(|error| failed("install the certificates", &error))?;
        }
        for volume in self.request.volume_mounts.iter().flatten() {
            volume.mount().map_err(|error| match error {
                VolumeError::Invalid(message) => bad(message),
                VolumeError::Failed(message) => {
                    HttpError::new(StatusCode::INTERNAL_SERVER_ERROR, message)
                }
            })?;
        }
        let mut facts = vec![("E2B_SANDBOX", "true")];
        facts.extend(
            self.settings
                .sandbox_id
                .as_deref()
                .map(|id| ("E2B_SANDBOX_ID", id)),
        );
        facts.extend(
            self.settings
                .template_id
                .as_deref()
                .map(|id| ("E2B_TEMPLATE_ID", id)),
        );
        guest::write_facts(run, &facts)
            .map_err(|error| failed("write the sandbox's facts", &error))?;
        if self.new_life {
            let life = self.settings.lifecycle_id.as_deref();
            generation::announce(&state.args.generation_file, life)
                .map_err(|error| failed("write the generation file", &error))?;
        }
        save(&state.args.state_file, &self.settings)
            .map_err(|error| failed("keep the settings", &error))?;
        state.replace(self.settings);
        log::info(
            "initialized",
            json!({"sandbox": state.settings().sandbox_id}),
        );
        Ok(())
    }
}

fn since_epoch(timestamp: &Timestamp) -> Result<Duration, HttpError> {
    let seconds =
        u64::try_from(timestamp.seconds).map_err(|_| bad("the timestamp lies before 1970"))?;
    let nanos = u32::try_from(timestamp.nanos).map_err(|_| bad("the timestamp is malformed"))?;
    Ok(Duration::new(seconds, nanos))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(before: &Settings, body: &str) -> Result<Option<Settings>, StatusCode> {
        let request: InitRequest = serde_json::from_str(body).unwrap();
        Plan::new(before, request)
            .map(|plan| plan.map(|plan| plan.settings))
            .map_err(|error| error.status)
    }

    #[test]
    fn settings_are_kept_unless_the_request_has_them() {
        let before = plan(
            &Settings::default(),
            r#"{"envVars":{"A":"1"},"accessToken":"t","defaultUser":"u","timestamp":"2026-01-02T03:04:05.5Z"}"#,
        )
        .unwrap()
        .unwrap();
        let after = plan(
            &before,
            r#"{"defaultWorkdir":"/w","defaultUser":"","unknown":[1]}"#,
        )
        .unwrap()
        .unwrap();
        assert_eq!(after.env_vars, before.env_vars);
        assert_eq!(after.access_token.as_deref(), Some("t"));
        assert_eq!(after.default_user.as_deref(), Some("u"));
        assert_eq!(after.default_workdir.as_deref(), Some("/w"));
        assert_eq!(after.timestamp, Some(1_767_323_045_500_000_000));
        let replaced = plan(&after, r#"{"envVars":{"B":"2"}}"#).unwrap().unwrap();
        assert_eq!(replaced.env_vars.keys().collect::<Vec<_>>(), ["B"]);
    }

    #[test]
    fn only_older_requests_are_ignored() {
        let before = Settings {
            timestamp: Some(1_767_323_045_000_000_000),
            ..Settings::default()
        };
        let at = |time: &str| {
            plan(&before, &format!(r#"{{"timestamp":"{time}"}}"#))
                .unwrap()
                .is_some()
        };
        assert!(!at("2026-01-02T03:04:04.999Z"));
        assert!(at("2026-01-02T03:04:05Z"));
        assert!(!at("2026-01-02T04:04:04+01:00"));
        assert!(plan(&before, "{}").unwrap().is_some());
        let old = |life: &str, sandbox: &str| {
            let before = Settings {
                lifecycle_id: Some("1".into()),
                sandbox_id: Some("a".into()),
                ..before.clone()
            };
            let body = json!({"timestamp": "2020-01-01T00:00:00Z", "lifecycleID": life, "sandboxId": sandbox});
            plan(&before, &body.to_string()).unwrap().is_some()
        };
        assert!(!old("1", "a") && !old("", "a"));
        assert!(
            old("2", "a") && old("1", "b"),
            "a new life is never ignored"
        );
    }

    #[test]
    fn nonsense_is_refused_before_anything_changes() {
        for body in [
            r#"{"entropy":"%%"}"#,
            r#"{"hostname":"a b"}"#,
            r#"{"lifecycleID":"a b"}"#,
            r#"{"envVars":{"A=B":""}}"#,
            r#"{"envVars":{"A":"\u0000"}}"#,
            r#"{"timestamp":"1960-01-01T00:00:00Z"}"#,
        ] {
            assert_eq!(
                plan(&Settings::default(), body).err(),
                Some(StatusCode::BAD_REQUEST),
                "{body}"
            );
        }
    }
}
