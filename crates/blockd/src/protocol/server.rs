//! The control socket: a thread per connection, lines in, lines out.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde_json::{json, Value};

use super::{dispatch, Outcome, Request, LINE_LIMIT, VERSION};
use crate::daemon::Daemon;
use crate::error::{Error, Result};
use crate::events::Event;
use crate::socket;

/// Clients at a time.
const CLIENTS: usize = 256;
/// Stack of a client's thread, bytes: deeply nested JSON is read on it.
const STACK: usize = 1 << 20;
/// Wait after a failed accept, for want of anything to wait for.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The control socket of a daemon.
pub struct Server {
    listener: UnixListener,
    daemon: Arc<Daemon>,
    clients: Arc<AtomicUsize>,
    end: Arc<dyn Fn() + Send + Sync>,
}

/// Counts a client as long as its thread lives.
struct Client(Arc<AtomicUsize>);

impl Drop for Client {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Server {
    /// Listen at `path`, which only this user can reach. `end` is called when a client asked for shutdown.
    ///
    /// # Errors
    /// The socket could not be made.
    pub fn bind(
        path: &Path,
        daemon: Arc<Daemon>,
        end: impl Fn() + Send + Sync + 'static,
    ) -> Result<Self> {
        let failed = |error| Error::io(format_args!("listen at {}", path.display()), &error);
        let listener = socket::listen(path, 0o600, false).map_err(failed)?;
        listener.set_nonblocking(false).map_err(failed)?;
        Ok(Self {
            listener,
            daemon,
            clients: Arc::default(),
            end: Arc::new(end),
        })
    }

    /// Accept clients as long as the process lives.
    pub fn run(&self) {
        loop {
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a control connection");
                    std::thread::sleep(ACCEPT_PAUSE);
                    continue;
                }
            };
            if self.clients.fetch_add(1, Ordering::AcqRel) >= CLIENTS {
                self.clients.fetch_sub(1, Ordering::AcqRel);
                tracing::warn!("too many control connections, one is turned away");
                continue;
            }
            let client = Client(Arc::clone(&self.clients));
            let daemon = Arc::clone(&self.daemon);
            let end = Arc::clone(&self.end);
            let started = std::thread::Builder::new()
                .name("control".into())
                .stack_size(STACK)
                .spawn(move || {
                    let _client = client;
                    if let Err(error) = serve(stream, &daemon, &*end) {
                        tracing::debug!(%error, "a control connection ended");
                    }
                });
            if let Err(error) = started {
                tracing::warn!(%error, "cannot start a thread for a control connection");
                std::thread::sleep(ACCEPT_PAUSE);
            }
        }
    }
}

type Writer = Arc<Mutex<UnixStream>>;

fn serve(
    stream: UnixStream,
    daemon: &Arc<Daemon>,
    end: &(dyn Fn() + Send + Sync),
) -> io::Result<()> {
    let writer: Writer = Arc::new(Mutex::new(stream.try_clone()?));
    let mut reader = BufReader::new(stream);
    let greeting = json!({"blockd": {
        "protocol": VERSION,
        "version": env!("CARGO_PKG_VERSION"),
        "pid": std::process::id(),
    }});
    send(&writer, &greeting)?;
    let mut line = Vec::new();
    let mut subscribed = false;
    loop {
        line.clear();
        let count = (&mut reader)
            .take(LINE_LIMIT as u64 + 1)
            .read_until(b'\n', &mut line)?;
        if count == 0 {
            return Ok(());
        }
        if line.last() != Some(&b'\n') {
            if count <= LINE_LIMIT {
                // The end of the stream, in the middle of a line.
                return Ok(());
            }
            let error = Error::BadRequest(format!("a line has at most {LINE_LIMIT} bytes"));
            // Where the next request begins is unknown.
            return send(&writer, &failure(&Value::Null, &error));
        }
        if line.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        let request = match Request::parse(&line) {
            Ok(request) => request,
            Err((id, error)) => {
                send(&writer, &failure(&id, &error))?;
                continue;
            }
        };
        let result =
            catch_unwind(AssertUnwindSafe(|| dispatch(daemon, &request))).unwrap_or_else(|_| {
                Err(Error::Internal(
                    "a defect of the daemon, see its log".into(),
                ))
            });
        let outcome = match result {
            Ok((result, outcome)) => {
                let events = (outcome == Outcome::Subscribe && !subscribed)
                    .then(|| daemon.events().subscribe());
                send(&writer, &json!({"id": request.id, "result": result}))?;
                if let Some(events) = events {
                    subscribed = true;
                    forward(events, daemon.failures(), Arc::clone(&writer))?;
                }
                outcome
            }
            Err(error) => {
                tracing::info!(code = error.code(), %error, "a request failed");
                send(&writer, &failure(&request.id, &error))?;
                Outcome::Answer
            }
        };
        if outcome == Outcome::Shutdown {
            end();
        }
    }
}

/// Send events to a subscriber from a thread of their own, until it goes away or falls behind.
fn forward(events: Receiver<Event>, first: Vec<Event>, writer: Writer) -> io::Result<()> {
    std::thread::Builder::new()
        .name("events".into())
        .stack_size(STACK)
        .spawn(move || {
            let sent = first.into_iter().chain(events).try_for_each(|event| {
                let event = serde_json::to_value(event).map_err(io::Error::other)?;
                send(&writer, &event)
            });
            if sent.is_ok() {
                tracing::warn!("a subscriber does not read its events and is disconnected");
            }
            let stream = writer.lock().unwrap_or_else(PoisonError::into_inner);
            let _ = stream.shutdown(Shutdown::Both);
        })
        .map(drop)
}

fn failure(id: &Value, error: &Error) -> Value {
    json!({"id": id, "error": {"code": error.code(), "message": error.to_string()}})
}

fn send(writer: &Writer, message: &Value) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    writer
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .write_all(&line)
}
