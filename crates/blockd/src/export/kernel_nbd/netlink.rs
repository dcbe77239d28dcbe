//! The generic netlink family `nbd`: how the kernel is told to make, change and end `/dev/nbd<number>`.
//!
//! Only messages; what they are for is the concern of the caller. Sources: Linux, include/uapi/linux/nbd-netlink.h,
//! netlink.h and genetlink.h.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use rustix::net::{
    netlink, recv, send, socket_with, AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType,
};

const CONTROL_FAMILY: u16 = 16;
const GET_FAMILY: u8 = 3;
const FAMILY_ID: u16 = 1;
const FAMILY_NAME: u16 = 2;

const CONNECT: u8 = 1;
const DISCONNECT: u8 = 2;
const RECONFIGURE: u8 = 3;
const INDEX: u16 = 1;
const SIZE: u16 = 2;
const BLOCK_SIZE: u16 = 3;
const TIMEOUT: u16 = 4;
const SERVER_FLAGS: u16 = 5;
const CLIENT_FLAGS: u16 = 6;
const SOCKETS: u16 = 7;
const DEAD_CONNECTION_TIMEOUT: u16 = 8;
const BACKEND: u16 = 10;
const SOCKET_ITEM: u16 = 1;
const SOCKET_DESCRIPTOR: u16 = 1;
const DESTROY_ON_DISCONNECT: u64 = 1;

const ERROR_MESSAGE: u16 = 2;
const REQUEST_WITH_ACK: u16 = 1 | 4;
const NESTED: u16 = 0x8000;
const HEADER: usize = 16;
const GENERIC_HEADER: usize = 4;
const ANSWER_BYTES: usize = 16 * 1024;

/// What a new device is like.
pub(super) struct Device<'a> {
    /// Bytes.
    pub size: u64,
    /// Bytes.
    pub block_size: u64,
    /// `NBD_FLAG_*` of the protocol.
    pub server_flags: u16,
    /// After so many seconds without an answer a request goes to another connection.
    pub request_timeout_s: u64,
    /// So many seconds requests wait when no connection is left.
    pub dead_connection_timeout_s: u64,
    /// What `/sys/block/nbd<number>/backend` says.
    pub backend: &'a str,
    /// Whether the device's node goes away with its configuration.
    pub destroy_on_disconnect: bool,
}

/// A socket to the family.
pub(super) struct Family {
    socket: OwnedFd,
    id: u16,
    sequence: u32,
}

impl Family {
    /// # Errors
    /// `NotFound` when the kernel has no such family: the module `nbd` is not loaded.
    pub fn open() -> io::Result<Self> {
        let socket = socket_with(
            AddressFamily::NETLINK,
            SocketType::RAW,
            SocketFlags::CLOEXEC,
            Some(netlink::GENERIC),
        )?;
        let mut family = Self {
            socket,
            id: CONTROL_FAMILY,
            sequence: 0,
        };
        let mut attributes = Attributes::default();
        attributes.text(FAMILY_NAME, "nbd");
        let answer = family.call(GET_FAMILY, &attributes)?;
        family.id = find_attribute(&answer, FAMILY_ID)
            .and_then(|value| Some(u16::from_ne_bytes(value.get(..2)?.try_into().ok()?)))
            .ok_or_else(|| unexpected("the family nbd has no number"))?;
        Ok(family)
    }

    /// Make `/dev/nbd<number>` with these sockets, one per queue.
    ///
    /// # Errors
    /// `EBUSY` when the number is taken.
    pub fn connect(
        &mut self,
        number: u32,
        device: &Device<'_>,
        sockets: &[BorrowedFd<'_>],
    ) -> io::Result<()> {
        let mut attributes = Attributes::default();
        attributes.u32(INDEX, number);
        attributes.u64(SIZE, device.size);
        attributes.u64(BLOCK_SIZE, device.block_size);
        attributes.u64(TIMEOUT, device.request_timeout_s);
        attributes.u64(DEAD_CONNECTION_TIMEOUT, device.dead_connection_timeout_s);
        attributes.u64(SERVER_FLAGS, u64::from(device.server_flags));
        if device.destroy_on_disconnect {
            attributes.u64(CLIENT_FLAGS, DESTROY_ON_DISCONNECT);
        }
        attributes.text(BACKEND, device.backend);
        attributes.sockets(sockets);
        self.call(CONNECT, &attributes).map(|_| ())
    }

    /// Put sockets in the place of dead ones, or tell a new size (bytes).
    ///
    /// # Errors
    /// `EINVAL` when the device is not configured, or with another backend.
    pub fn reconfigure(
        &mut self,
        number: u32,
        backend: &str,
        size: Option<u64>,
        sockets: &[BorrowedFd<'_>],
    ) -> io::Result<()> {
        let mut attributes = Attributes::default();
        attributes.u32(INDEX, number);
        attributes.text(BACKEND, backend);
        if let Some(size) = size {
            attributes.u64(SIZE, size);
        }
        if !sockets.is_empty() {
            attributes.sockets(sockets);
        }
        self.call(RECONFIGURE, &attributes).map(|_| ())
    }

    /// End the device; returns when the kernel has given its sockets back.
    ///
    /// # Errors
    /// `EINVAL` when there is no such device.
    pub fn disconnect(&mut self, number: u32) -> io::Result<()> {
        let mut attributes = Attributes::default();
        attributes.u32(INDEX, number);
        self.call(DISCONNECT, &attributes).map(|_| ())
    }

    /// One request; the attributes of its answer, if it has one besides the acknowledgement.
    fn call(&mut self, command: u8, attributes: &Attributes) -> io::Result<Vec<u8>> {
        self.sequence += 1;
        let message = encode(self.id, command, self.sequence, &attributes.0);
        send(&self.socket, &message, SendFlags::empty())?;
        let mut answer = Vec::new();
        loop {
            let mut buffer = vec![0; ANSWER_BYTES];
            let (count, _) = recv(&self.socket, buffer.as_mut_slice(), RecvFlags::empty())?;
            buffer.truncate(count);
            for message in Messages(&buffer) {
                if message.sequence != self.sequence {
                    continue;
                }
                if message.kind != ERROR_MESSAGE {
                    answer = message
                        .body
                        .get(GENERIC_HEADER..)
                        .unwrap_or_default()
                        .to_vec();
                    continue;
                }
                let code = message
                    .body
                    .get(..4)
                    .and_then(|bytes| Some(i32::from_ne_bytes(bytes.try_into().ok()?)))
                    .ok_or_else(|| unexpected("a netlink acknowledgement is cut off"))?;
                return if code == 0 {
                    Ok(answer)
                } else {
                    Err(io::Error::from_raw_os_error(code.saturating_neg()))
                };
            }
        }
    }
}

fn unexpected(message: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, message)
}

fn encode(family: u16, command: u8, sequence: u32, attributes: &[u8]) -> Vec<u8> {
    let length = (HEADER + GENERIC_HEADER + attributes.len()) as u32;
    let mut message = Vec::new();
    message.extend(length.to_ne_bytes());
    message.extend(family.to_ne_bytes());
    message.extend(REQUEST_WITH_ACK.to_ne_bytes());
    message.extend(sequence.to_ne_bytes());
    message.extend(0u32.to_ne_bytes());
    message.extend([command, 1, 0, 0]);
    message.extend(attributes);
    message
}

#[derive(Default)]
struct Attributes(Vec<u8>);

impl Attributes {
    fn push(&mut self, kind: u16, value: &[u8]) {
        self.0.extend((4 + value.len() as u16).to_ne_bytes());
        self.0.extend(kind.to_ne_bytes());
        self.0.extend(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
    }

    fn u32(&mut self, kind: u16, value: u32) {
        self.push(kind, &value.to_ne_bytes());
    }

    fn u64(&mut self, kind: u16, value: u64) {
        self.push(kind, &value.to_ne_bytes());
    }

    fn text(&mut self, kind: u16, value: &str) {
        let mut bytes = value.as_bytes().to_vec();
        bytes.push(0);
        self.push(kind, &bytes);
    }

    fn sockets(&mut self, sockets: &[BorrowedFd<'_>]) {
        let mut items = Self::default();
        for socket in sockets {
            let mut item = Self::default();
            item.push(SOCKET_DESCRIPTOR, &socket.as_raw_fd().to_ne_bytes());
            items.push(SOCKET_ITEM | NESTED, &item.0);
        }
        self.push(SOCKETS | NESTED, &items.0);
    }
}

struct Message<'a> {
    kind: u16,
    sequence: u32,
    body: &'a [u8],
}

/// The messages of one datagram; ends at the first that is cut off.
struct Messages<'a>(&'a [u8]);

impl<'a> Iterator for Messages<'a> {
    type Item = Message<'a>;

    fn next(&mut self) -> Option<Message<'a>> {
        let header = self.0.get(..HEADER)?;
        let length = u32::from_ne_bytes(header[..4].try_into().ok()?) as usize;
        let message = Message {
            kind: u16::from_ne_bytes(header[4..6].try_into().ok()?),
            sequence: u32::from_ne_bytes(header[8..12].try_into().ok()?),
            body: self.0.get(HEADER..length)?,
        };
        self.0 = self.0.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(message)
    }
}

fn find_attribute(mut attributes: &[u8], wanted: u16) -> Option<&[u8]> {
    loop {
        let length = usize::from(u16::from_ne_bytes(attributes.get(..2)?.try_into().ok()?));
        let kind = u16::from_ne_bytes(attributes.get(2..4)?.try_into().ok()?);
        let value = attributes.get(4..length)?;
        if kind == wanted {
            return Some(value);
        }
        attributes = attributes.get(length.next_multiple_of(4)..)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_padded_and_found_again() {
        let mut attributes = Attributes::default();
        attributes.text(BACKEND, "aenv");
        attributes.u64(SIZE, 7);
        assert_eq!(attributes.0.len(), 12 + 12);
        assert_eq!(find_attribute(&attributes.0, BACKEND), Some(&b"aenv\0"[..]));
        assert_eq!(
            find_attribute(&attributes.0, SIZE),
            Some(&7u64.to_ne_bytes()[..])
        );
        assert_eq!(find_attribute(&attributes.0, INDEX), None);
    }

    #[test]
    fn damaged_messages_end_the_list() {
        let message = encode(16, 3, 9, &[]);
        let two = [message.clone(), message.clone()].concat();
        assert_eq!(Messages(&two).count(), 2);
        for end in 0..message.len() {
            assert_eq!(Messages(&message[..end]).count(), 0, "{end}");
        }
        let mut endless = message.clone();
        endless[..4].copy_from_slice(&0u32.to_ne_bytes());
        assert_eq!(Messages(&endless).count(), 0);
        assert!(find_attribute(&[0, 0, 0, 0, 0, 0, 0, 0], 1).is_none());
    }

    #[test]
    fn the_kernel_answers() {
        // Whether the module is loaded or not, the controller knows.
        match Family::open() {
            Ok(family) => assert!(family.id > CONTROL_FAMILY),
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::NotFound),
        }
    }
}
