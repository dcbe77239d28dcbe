//! What the agent knows about its sandbox: token, defaults, environment. Set by `/init`, kept in the state file so
//! that an agent that was killed and restarted goes on as before. Does no HTTP.

use std::{
    collections::BTreeMap,
    fs, io,
    io::Write,
    os::unix::fs::OpenOptionsExt,
    path::Path,
    sync::{Arc, PoisonError, RwLock, RwLockReadGuard},
};

use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq;

use tokio::sync::Mutex;

use super::{
    args::Args,
    host::Host,
    metrics::CpuMeter,
    users::{self, User, UserError},
};

/// The user of a sandbox whose template names none, if the image has it.
const USUAL_USER: &str = "user";

/// Everything that `/init` can set.
#[derive(Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Settings {
    pub access_token: Option<String>,
    pub default_user: Option<String>,
    pub default_workdir: Option<String>,
    /// Variables of the template and of the create call.
    pub env_vars: BTreeMap<String, String>,
    pub sandbox_id: Option<String>,
    pub template_id: Option<String>,
    pub events_address: Option<String>,
    pub lifecycle_id: Option<String>,
    /// Of the last request that was applied, in nanoseconds of unix time.
    pub timestamp: Option<i64>,
}

/// What all handlers share, behind one `Arc`. Locks are held only for the moment of a copy, never across an await.
pub struct AgentState {
    pub args: Args,
    /// What commands are started with.
    pub host: Host,
    pub cpu: CpuMeter,
    /// Held while an `/init` is being applied.
    pub initializing: Arc<Mutex<()>>,
    settings: RwLock<Settings>,
}

impl AgentState {
    pub fn new(args: Args, host: Host, settings: Settings) -> Self {
        Self {
            args,
            host,
            cpu: CpuMeter::default(),
            initializing: Arc::default(),
            settings: RwLock::new(settings),
        }
    }

    fn read(&self) -> RwLockReadGuard<'_, Settings> {
        // A copy of plain data cannot be left half done by a panic.
        self.settings.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// A copy of all settings.
    pub fn settings(&self) -> Settings {
        self.read().clone()
    }

    /// Replaces all settings.
    pub fn replace(&self, settings: Settings) {
        *self
            .settings
            .write()
            .unwrap_or_else(PoisonError::into_inner) = settings;
    }

    /// The token that requests must carry, if the sandbox has one. Never log it. Signatures are made with it.
    pub fn access_token(&self) -> Option<String> {
        self.read().access_token.clone()
    }

    /// Whether `candidate` is the token, compared in constant time; `true` when the sandbox has none.
    pub fn token_matches(&self, candidate: &[u8]) -> bool {
        match &self.read().access_token {
            None => true,
            Some(token) => secrets_equal(token.as_bytes(), candidate),
        }
    }

    /// The directory of commands and of the empty path, if the template has one.
    pub fn default_workdir(&self) -> Option<String> {
        self.read().default_workdir.clone()
    }

    /// The user named `name`; without a name the default user, which is `user` (else `root`) unless `/init` says
    /// otherwise. Reads `/etc/passwd`.
    pub fn resolve_user(&self, name: Option<&str>) -> Result<User, UserError> {
        if let Some(name) = name {
            return users::lookup(name);
        }
        let default = self.read().default_user.clone();
        match default {
            Some(name) => users::lookup(&name),
            None => match users::lookup(USUAL_USER) {
                Err(UserError::Unknown(_)) => users::lookup("root"),
                found => found,
            },
        }
    }

    /// The variables that every command gets: ours, then those of template and create call, which win.
    pub fn env(&self) -> BTreeMap<String, String> {
        let settings = self.read();
        let mut env = BTreeMap::from([("E2B_SANDBOX".to_owned(), "true".to_owned())]);
        for (name, value) in [
            ("E2B_SANDBOX_ID", &settings.sandbox_id),
            ("E2B_TEMPLATE_ID", &settings.template_id),
            ("E2B_EVENTS_ADDRESS", &settings.events_address),
        ] {
            if let Some(value) = value {
                env.insert(name.to_owned(), value.clone());
            }
        }
        env.extend(settings.env_vars.clone());
        env
    }
}

/// Compares secrets in a time that depends only on their lengths.
pub fn secrets_equal(a: &[u8], b: &[u8]) -> bool {
    a.ct_eq(b).into()
}

/// Reads the state file; a missing one means that `/init` has not been called yet.
pub fn load(path: &Path) -> io::Result<Settings> {
    match fs::read(path) {
        Ok(bytes) => serde_json::from_slice(&bytes).map_err(io::Error::from),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Settings::default()),
        Err(error) => Err(error),
    }
}

/// Writes the state file, whole or not at all, readable by us only.
pub fn save(path: &Path, settings: &Settings) -> io::Result<()> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    let temporary = path.with_extension("new");
    let mut file = fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&temporary)?;
    file.write_all(&serde_json::to_vec(settings)?)?;
    fs::rename(&temporary, path)
}
