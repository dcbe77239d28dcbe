//! Ends TCP connections through the descriptors of the processes that hold them, in whatever network namespace, for
//! kernels without socket diagnosis. What no process holds is out of reach. Who is ended the caller says.

use std::{
    collections::HashSet,
    fs, io, mem,
    net::{IpAddr, SocketAddr},
    os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
    path::PathBuf,
};

use nix::sys::socket::{getpeername, shutdown, Shutdown, SockaddrStorage};

/// Multipath TCP, from <linux/in.h>.
const IPPROTO_MPTCP: libc::c_int = 262;

/// Numbers of all processes that there are now.
pub fn processes() -> io::Result<Vec<u32>> {
    let entries = fs::read_dir("/proc")?;
    Ok(entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect())
}

/// Shuts down, both ways, the connections whose peer is `wanted`, and returns how many. Their owners read an end.
pub fn shut_down(wanted: &dyn Fn(SocketAddr) -> bool) -> io::Result<usize> {
    let mut seen = HashSet::new();
    let mut ended = 0;
    for pid in processes()? {
        // A process that has ended meanwhile holds nothing.
        let Ok(process) = open_process(pid) else {
            continue;
        };
        for number in sockets_of(pid, &mut seen) {
            let Ok(socket) = borrow(&process, number) else {
                continue;
            };
            if !is_tcp(&socket) || !peer_of(&socket).is_some_and(wanted) {
                continue;
            }
            match shutdown(socket.as_raw_fd(), Shutdown::Both) {
                Ok(()) => ended += 1,
                Err(nix::errno::Errno::ENOTCONN) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(ended)
}

/// Descriptors of a process that are sockets which were not seen before.
fn sockets_of(pid: u32, seen: &mut HashSet<PathBuf>) -> Vec<RawFd> {
    let Ok(entries) = fs::read_dir(format!("/proc/{pid}/fd")) else {
        return Vec::new();
    };
    entries
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let target = fs::read_link(entry.path()).ok()?;
            let is_new = target.to_str()?.starts_with("socket:") && seen.insert(target);
            is_new.then(|| entry.file_name().to_str()?.parse().ok())?
        })
        .collect()
}

fn open_process(pid: u32) -> io::Result<OwnedFd> {
    // SAFETY: no memory is passed.
    let result = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    owned(result)
}

/// A descriptor of our own for the socket that `number` is in that process.
fn borrow(process: &OwnedFd, number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: no memory is passed.
    let result = unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), number, 0) };
    owned(result)
}

fn owned(result: libc::c_long) -> io::Result<OwnedFd> {
    match RawFd::try_from(result) {
        // SAFETY: the kernel has just made this descriptor for us.
        Ok(number) if number >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(number) }),
        _ => Err(io::Error::last_os_error()),
    }
}

fn is_tcp(socket: &OwnedFd) -> bool {
    let mut protocol: libc::c_int = 0;
    let mut length = mem::size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the option is an int, and both pointers are to values that live through the call.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PROTOCOL,
            (&raw mut protocol).cast(),
            &raw mut length,
        )
    };
    result == 0 && matches!(protocol, libc::IPPROTO_TCP | IPPROTO_MPTCP)
}

fn peer_of(socket: &OwnedFd) -> Option<SocketAddr> {
    let address: SockaddrStorage = getpeername(socket.as_raw_fd()).ok()?;
    if let Some(found) = address.as_sockaddr_in() {
        return Some(SocketAddr::new(IpAddr::V4(found.ip()), found.port()));
    }
    let found = address.as_sockaddr_in6()?;
    Some(SocketAddr::new(IpAddr::V6(found.ip()), found.port()))
}

#[cfg(test)]
mod tests {
    use std::{
        io::Read,
        net::{TcpListener, TcpStream},
    };

    use super::*;

    #[test]
    fn only_wanted_connections_end() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let connect = || TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut ended, kept) = (connect(), connect());
        let gone = ended.local_addr().unwrap();
        let (mut server, peer) = listener.accept().unwrap();
        assert_eq!(peer, gone);
        assert_eq!(shut_down(&|peer| peer == gone).unwrap(), 1);
        let mut byte = [0];
        assert_eq!(server.read(&mut byte).unwrap(), 0);
        assert_eq!(ended.read(&mut byte).unwrap(), 0);
        kept.set_nonblocking(true).unwrap();
        let error = kept.peek(&mut byte).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        assert!(listener.accept().is_ok());
    }
}
