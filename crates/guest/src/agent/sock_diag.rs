//! Ends TCP connections by the kernel's socket diagnosis (sock_diag(7)), which reaches those, too, that no process holds
//! any more or has accepted yet. Works in the network namespace of the calling thread; who is ended the caller says.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::{AsRawFd, OwnedFd},
};

use nix::sys::socket::{
    recv, send, socket, AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType,
};

// From <linux/sock_diag.h>, <linux/netlink.h> and <net/tcp_states.h>.
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const SOCK_DESTROY: u16 = 21;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NLM_F_REQUEST: u16 = 0x1;
const NLM_F_ACK: u16 = 0x4;
const NLM_F_DUMP: u16 = 0x300;
/// All states of a connection that has two ends: neither LISTEN (10), CLOSE (7) nor TIME_WAIT (6).
const CONNECTED: u32 =
    1 << 1 | 1 << 2 | 1 << 3 | 1 << 4 | 1 << 5 | 1 << 8 | 1 << 9 | 1 << 11 | 1 << 12;

const HEADER: usize = 16;
/// `struct inet_diag_sockid`: ports (2 × 2 bytes), addresses (2 × 16), interface (4), cookie (8).
const SOCKET_ID: usize = 48;
/// Where the socket's id begins in `struct inet_diag_msg`, after family, state, timer and retransmissions.
const ID_OFFSET: usize = 4;
const BUFFER: usize = 64 << 10;

/// A connection as the kernel names it.
#[derive(Clone, Copy)]
struct Connection {
    family: u8,
    id: [u8; SOCKET_ID],
}

/// Ends the connections whose peer is `wanted`, and returns how many. Their owners get ECONNABORTED, their peers a RST.
///
/// Fails with `Unsupported` where the kernel has no such diagnosis.
pub fn destroy(wanted: &dyn Fn(SocketAddr) -> bool) -> io::Result<usize> {
    let socket = socket(
        AddressFamily::Netlink,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC,
        SockProtocol::NetlinkSockDiag,
    )?;
    let mut buffer = vec![0; BUFFER];
    let mut found = Vec::new();
    for family in [libc::AF_INET, libc::AF_INET6] {
        list(&socket, family as u8, &mut buffer, &mut found).or_else(|error| {
            // A kernel without IPv6 has no connections over it.
            let absent = error.raw_os_error() == Some(libc::ENOENT);
            if absent && family == libc::AF_INET6 {
                Ok(())
            } else {
                Err(unsupported_if_absent(error))
            }
        })?;
    }
    let mut ended = 0;
    for connection in found {
        if wanted(connection.peer()) {
            ended += usize::from(end(&socket, &connection, &mut buffer)?);
        }
    }
    Ok(ended)
}

fn unsupported_if_absent(error: io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(libc::ENOENT | libc::EOPNOTSUPP | libc::EPROTONOSUPPORT) => {
            io::ErrorKind::Unsupported.into()
        }
        _ => error,
    }
}

fn list(
    socket: &OwnedFd,
    family: u8,
    buffer: &mut [u8],
    found: &mut Vec<Connection>,
) -> io::Result<()> {
    let all = Connection {
        family,
        id: [0; SOCKET_ID],
    };
    let request = message(SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST | NLM_F_DUMP, &all);
    send(socket.as_raw_fd(), &request, MsgFlags::empty())?;
    loop {
        let length = recv(socket.as_raw_fd(), buffer, MsgFlags::empty())?;
        for answer in Answers(&buffer[..length]) {
            match answer {
                (NLMSG_DONE | NLMSG_ERROR, payload) => return outcome(payload),
                (SOCK_DIAG_BY_FAMILY, payload) => found.extend(Connection::read(payload)),
                _ => {}
            }
        }
    }
}

/// Returns whether it was still there.
fn end(socket: &OwnedFd, connection: &Connection, buffer: &mut [u8]) -> io::Result<bool> {
    let request = message(SOCK_DESTROY, NLM_F_REQUEST | NLM_F_ACK, connection);
    send(socket.as_raw_fd(), &request, MsgFlags::empty())?;
    loop {
        let length = recv(socket.as_raw_fd(), buffer, MsgFlags::empty())?;
        for (kind, payload) in Answers(&buffer[..length]) {
            if kind == NLMSG_ERROR {
                return match outcome(payload) {
                    Ok(()) => Ok(true),
                    Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(false),
                    Err(error) => Err(unsupported_if_absent(error)),
                };
            }
        }
    }
}

/// What an acknowledgement or the end of a list says: 0, or a negative error number.
fn outcome(payload: &[u8]) -> io::Result<()> {
    match payload.first_chunk().map(|word| i32::from_ne_bytes(*word)) {
        Some(code) if code < 0 => Err(io::Error::from_raw_os_error(-code)),
        _ => Ok(()),
    }
}

/// A netlink message with a `struct inet_diag_req_v2`.
fn message(kind: u16, flags: u16, connection: &Connection) -> Vec<u8> {
    let length = HEADER + 8 + SOCKET_ID;
    let mut bytes = Vec::with_capacity(length);
    bytes.extend((length as u32).to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(flags.to_ne_bytes());
    bytes.extend([0; 8]); // sequence and port: there is one request at a time
    bytes.extend([connection.family, libc::IPPROTO_TCP as u8, 0, 0]);
    bytes.extend(CONNECTED.to_ne_bytes());
    bytes.extend(connection.id);
    bytes
}

impl Connection {
    fn read(payload: &[u8]) -> Option<Self> {
        Some(Self {
            family: *payload.first()?,
            id: payload
                .get(ID_OFFSET..ID_OFFSET + SOCKET_ID)?
                .try_into()
                .ok()?,
        })
    }

    fn peer(&self) -> SocketAddr {
        let port = u16::from_be_bytes([self.id[2], self.id[3]]);
        let mut address = [0; 16];
        address.copy_from_slice(&self.id[20..36]);
        let ip = if libc::c_int::from(self.family) == libc::AF_INET {
            IpAddr::V4(Ipv4Addr::new(
                address[0], address[1], address[2], address[3],
            ))
        } else {
            IpAddr::V6(Ipv6Addr::from(address))
        };
        SocketAddr::new(ip, port)
    }
}

/// The messages in a datagram from the kernel: kind and payload. Ends at the first that is cut short.
struct Answers<'a>(&'a [u8]);

impl<'a> Iterator for Answers<'a> {
    type Item = (u16, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let header = self.0.first_chunk::<HEADER>()?;
        let length = u32::from_ne_bytes([header[0], header[1], header[2], header[3]]) as usize;
        let kind = u16::from_ne_bytes([header[4], header[5]]);
        let payload = self.0.get(HEADER..length)?;
        self.0 = self.0.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, payload))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(kind: u16, payload: &[u8]) -> Vec<u8> {
        let mut bytes = ((HEADER + payload.len()) as u32).to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend([0; 10]);
        bytes.extend(payload);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    #[test]
    fn datagrams_are_split_and_cut_ones_end_the_list() {
        let mut bytes = answer(20, b"abcde");
        bytes.extend(answer(3, &0i32.to_ne_bytes()));
        let all: Vec<_> = Answers(&bytes).collect();
        assert_eq!(all, [(20, &b"abcde"[..]), (3, &[0; 4][..])]);
        for length in 0..bytes.len() {
            let cut: Vec<_> = Answers(&bytes[..length]).collect();
            assert!(cut.len() < 2 && all.starts_with(&cut), "{length}");
        }
        assert_eq!(Answers(&[0; 64]).count(), 0);
    }

    #[test]
    fn peers_are_read_from_the_kernels_form() {
        let mut payload = vec![0; 72];
        payload[0] = libc::AF_INET as u8;
        payload[4 + 2..4 + 4].copy_from_slice(&443u16.to_be_bytes());
        payload[4 + 20..4 + 24].copy_from_slice(&[192, 0, 2, 7]);
        let found = Connection::read(&payload).unwrap();
        assert_eq!(found.peer(), "192.0.2.7:443".parse().unwrap());
        payload[0] = libc::AF_INET6 as u8;
        payload[4 + 20..4 + 36]
            .copy_from_slice(&Ipv4Addr::new(192, 0, 2, 7).to_ipv6_mapped().octets());
        let found = Connection::read(&payload).unwrap();
        assert_eq!(found.peer(), "[::ffff:192.0.2.7]:443".parse().unwrap());
        assert!(Connection::read(&payload[..51]).is_none());
    }

    #[test]
    fn error_numbers_are_told_apart() {
        assert!(outcome(&0i32.to_ne_bytes()).is_ok() && outcome(&[]).is_ok());
        let absent = outcome(&(-libc::ENOENT).to_ne_bytes()).unwrap_err();
        assert_eq!(
            unsupported_if_absent(absent).kind(),
            io::ErrorKind::Unsupported
        );
        let refused = outcome(&(-libc::EPERM).to_ne_bytes()).unwrap_err();
        assert_eq!(
            unsupported_if_absent(refused).raw_os_error(),
            Some(libc::EPERM)
        );
    }
}
