//! The NBD export: a unix socket, and a thread per client.
//!
//! One thread accepts for all sockets of the daemon, so that a device without clients costs a descriptor and no thread.

use std::collections::HashMap;
use std::io;
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::event::epoll;
use std::os::fd::OwnedFd;

use super::{Export, ExportRecord, Stop, Target};
use crate::error::{Error, Result};
use crate::nbd;
use crate::socket;
use crate::workers::THREAD_STACK;

/// Clients of one socket at a time; more are turned away, so that one guest cannot take all descriptors.
pub const CLIENTS: usize = 128;

/// Wait after a failed accept, for want of anything to wait for.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The sockets of the daemon and the thread that accepts their clients.
#[derive(Clone)]
pub struct Acceptor(Arc<Shared>);

struct Shared {
    epoll: OwnedFd,
    sockets: Mutex<HashMap<u64, Arc<Socket>>>,
    next: AtomicU64,
}

struct Socket {
    listener: UnixListener,
    target: Target,
    clients: Mutex<Clients>,
    ended: Condvar,
}

#[derive(Default)]
struct Clients {
    closing: bool,
    next: u64,
    streams: HashMap<u64, Arc<UnixStream>>,
}

struct NbdExport {
    record: ExportRecord,
    acceptor: Acceptor,
    key: u64,
    socket: Arc<Socket>,
}

impl Acceptor {
    /// Start the thread. It lives as long as the process.
    ///
    /// # Errors
    /// The operating system's.
    pub fn start() -> io::Result<Self> {
        let shared = Arc::new(Shared {
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            sockets: Mutex::default(),
            next: AtomicU64::new(0),
        });
        let worker = Arc::clone(&shared);
        std::thread::Builder::new()
            .name("accept".into())
            .stack_size(THREAD_STACK)
            .spawn(move || worker.run())?;
        Ok(Self(shared))
    }

    /// Export a device at `path`.
    ///
    /// # Errors
    /// The socket could not be made.
    pub fn export(&self, target: Target, path: &Path) -> Result<Box<dyn Export>> {
        let failed =
            |error: &io::Error| Error::io(format_args!("listen at {}", path.display()), error);
        let listener = socket::listen(path, 0o660, true).map_err(|error| failed(&error))?;
        let socket = Arc::new(Socket {
            listener,
            target,
            clients: Mutex::default(),
            ended: Condvar::new(),
        });
        let key = self.0.next.fetch_add(1, Ordering::Relaxed);
        self.0.lock().insert(key, Arc::clone(&socket));
        let data = epoll::EventData::new_u64(key);
        if let Err(error) = epoll::add(&self.0.epoll, &socket.listener, data, epoll::EventFlags::IN)
        {
            self.0.lock().remove(&key);
            let _ = socket::unlink(path);
            return Err(failed(&error.into()));
        }
        Ok(Box::new(NbdExport {
            record: ExportRecord::Nbd { path: path.into() },
            acceptor: self.clone(),
            key,
            socket,
        }))
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Arc<Socket>>> {
        self.sockets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut events = Vec::with_capacity(64);
        loop {
            events.clear();
            match epoll::wait(
                &self.epoll,
                rustix::buffer::spare_capacity(&mut events),
                None,
            ) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "waiting for clients");
                    std::thread::sleep(ACCEPT_PAUSE);
                }
            }
            for event in &events {
                let socket = self.lock().get(&event.data.u64()).cloned();
                if let Some(socket) = socket {
                    accept(&socket);
                }
            }
        }
    }
}

fn accept(socket: &Arc<Socket>) {
    loop {
        let stream = match socket.listener.accept() {
            Ok((stream, _)) => Arc::new(stream),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            Err(error) => {
                tracing::warn!(device = %socket.target.device, %error, "cannot accept a client");
                std::thread::sleep(ACCEPT_PAUSE);
                return;
            }
        };
        let mut clients = socket.lock();
        if clients.closing {
            return;
        }
        if clients.streams.len() >= CLIENTS {
            tracing::warn!(device = %socket.target.device, "too many clients, one is turned away");
            continue;
        }
        let number = clients.next;
        clients.next += 1;
        clients.streams.insert(number, Arc::clone(&stream));
        drop(clients);
        let served = Arc::clone(socket);
        let started = std::thread::Builder::new()
            .name("nbd".into())
            .stack_size(THREAD_STACK)
            .spawn(move || serve(&served, number, stream));
        if let Err(error) = started {
            tracing::warn!(device = %socket.target.device, %error, "cannot start a thread for a client");
            socket.lock().streams.remove(&number);
            std::thread::sleep(ACCEPT_PAUSE);
        }
    }
}

/// Removes a client from its socket's list however its thread ends.
struct Registered<'a>(&'a Socket, u64);

impl Drop for Registered<'_> {
    fn drop(&mut self) {
        self.0.lock().streams.remove(&self.1);
        self.0.ended.notify_all();
    }
}

fn serve(socket: &Socket, number: u64, stream: Arc<UnixStream>) {
    let _registered = Registered(socket, number);
    let target = &socket.target;
    let result = nbd::negotiate(&stream, target).and_then(|agreement| match agreement {
        Some(agreement) => nbd::serve_transmission(stream, target, agreement),
        None => Ok(()),
    });
    if let Err(error) = result {
        tracing::info!(device = %target.device, %error, "a client was disconnected");
    }
}

impl Socket {
    fn lock(&self) -> MutexGuard<'_, Clients> {
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Export for NbdExport {
    fn record(&self) -> &ExportRecord {
        &self.record
    }

    fn connections(&self) -> usize {
        self.socket.lock().streams.len()
    }

    fn stop(self: Box<Self>, how: Stop) -> Result<()> {
        let path = self.record.path();
        self.acceptor.0.lock().remove(&self.key);
        let mut result = Ok(());
        if let Err(error) = epoll::delete(&self.acceptor.0.epoll, &self.socket.listener) {
            tracing::error!(%error, path = %path.display(), "forget a socket");
        }
        if how == Stop::Remove {
            result = socket::unlink(&path)
                .map_err(|error| Error::io(format_args!("remove {}", path.display()), &error));
        }
        let mut clients = self.socket.lock();
        clients.closing = true;
        for stream in clients.streams.values() {
            // Its thread sees the end of the stream. If the client is gone already, so much the better.
            let _ = stream.shutdown(Shutdown::Both);
        }
        while !clients.streams.is_empty() {
            clients = self
                .socket
                .ended
                .wait(clients)
                .unwrap_or_else(PoisonError::into_inner);
        }
        result
    }
}
