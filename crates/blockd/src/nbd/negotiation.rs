//! The handshake: fixed newstyle negotiation.
//!
//! A socket has one export; clients may name it by the device or by the empty name.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use super::wire::{self, answer, info, option};
use super::Agreement;
use crate::export::Target;

/// Longest option that we look at, bytes. Export names have at most 4096.
const OPTION_LIMIT: u32 = 16 * 1024;
/// A client that says nothing for so long in the middle of the handshake is disconnected.
const PATIENCE: Duration = Duration::from_secs(30);

/// Agree with a fresh client; `None` when it only asked or went away.
///
/// # Errors
/// The stream's, or `InvalidData` for a client that breaks the protocol.
pub fn negotiate(stream: &UnixStream, target: &Target) -> io::Result<Option<Agreement>> {
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut handshake = Handshake {
        stream,
        target,
        no_zeroes: false,
        agreement: Agreement::default(),
    };
    match handshake.run() {
        Ok(agreed) => Ok(agreed.then_some(handshake.agreement)),
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::UnexpectedEof
                    | io::ErrorKind::BrokenPipe
                    | io::ErrorKind::ConnectionReset
            ) =>
        {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

struct Handshake<'a> {
    stream: &'a UnixStream,
    target: &'a Target,
    no_zeroes: bool,
    agreement: Agreement,
}

/// Reads the data of an option; whatever is missing makes the option invalid.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn bytes(&mut self, count: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(count)?;
        self.0 = tail;
        Some(head)
    }

    fn short(&mut self) -> Option<u16> {
        self.bytes(2)
            .map(|bytes| u16::from_be_bytes([bytes[0], bytes[1]]))
    }

    fn word(&mut self) -> Option<u32> {
        self.bytes(4)
            .map(|bytes| u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
    }

    fn text(&mut self) -> Option<&'a [u8]> {
        let length = self.word()?;
        self.bytes(length as usize)
    }
}

impl Handshake<'_> {
    fn run(&mut self) -> io::Result<bool> {
        let mut greeting = Vec::with_capacity(18);
        greeting.extend_from_slice(&wire::INIT_MAGIC.to_be_bytes());
        greeting.extend_from_slice(&wire::OPTION_MAGIC.to_be_bytes());
        greeting.extend_from_slice(&(wire::FIXED_NEWSTYLE | wire::NO_ZEROES).to_be_bytes());
        self.send(&greeting)?;
        let flags = u32::from_be_bytes(self.receive()?);
        if flags & !u32::from(wire::FIXED_NEWSTYLE | wire::NO_ZEROES) != 0 {
            return Err(broken("unknown flags in the handshake"));
        }
        self.no_zeroes = flags & u32::from(wire::NO_ZEROES) != 0;
        loop {
            if u64::from_be_bytes(self.receive()?) != wire::OPTION_MAGIC {
                return Err(broken("an option without its magic number"));
            }
            let number = u32::from_be_bytes(self.receive()?);
            let length = u32::from_be_bytes(self.receive()?);
            if length > OPTION_LIMIT {
                return Err(broken("an option that is too long"));
            }
            let mut data = vec![0; length as usize];
            let mut stream = self.stream;
            stream.read_exact(&mut data)?;
            match number {
                option::EXPORT_NAME => {
                    if !self.is_ours(&data) {
                        return Err(broken("an export that this socket does not have"));
                    }
                    self.send_export()?;
                    return Ok(true);
                }
                option::ABORT => {
                    self.answer(number, answer::ACK, &[])?;
                    return Ok(false);
                }
                option::GO => {
                    if self.describe(number, &data)? {
                        return Ok(true);
                    }
                }
                option::INFO => {
                    self.describe(number, &data)?;
                }
                option::LIST => self.list(number, &data)?,
                option::STRUCTURED_REPLY => {
                    if data.is_empty() {
                        self.agreement.structured_replies = true;
                        self.answer(number, answer::ACK, &[])?;
                    } else {
                        self.answer(number, answer::INVALID, &[])?;
                    }
                }
                option::LIST_META_CONTEXT | option::SET_META_CONTEXT => {
                    self.contexts(number, &data)?
                }
                _ => self.answer(number, answer::UNSUPPORTED, &[])?,
            }
        }
    }

    fn is_ours(&self, name: &[u8]) -> bool {
        name.is_empty() || name == self.target.device.as_bytes()
    }

    fn size_and_flags(&self) -> [u8; 10] {
        let backend = &*self.target.backend;
        let mut bytes = [0; 10];
        bytes[..8].copy_from_slice(&backend.size().to_be_bytes());
        let flags = wire::export_flags(backend, self.agreement.structured_replies);
        bytes[8..].copy_from_slice(&flags.to_be_bytes());
        bytes
    }

    fn send_export(&self) -> io::Result<()> {
        let mut bytes = self.size_and_flags().to_vec();
        if !self.no_zeroes {
            bytes.resize(bytes.len() + 124, 0);
        }
        self.send(&bytes)
    }

    /// `INFO` and `GO`. `true` when the client may go on with it.
    fn describe(&self, number: u32, data: &[u8]) -> io::Result<bool> {
        let mut fields = Fields(data);
        let Some((name, wanted)) = (|| {
            let name = fields.text()?;
            let count = fields.short()?;
            let mut wanted = Vec::new();
            for _ in 0..count {
                wanted.push(fields.short()?);
            }
            fields.0.is_empty().then_some((name, wanted))
        })() else {
            self.answer(number, answer::INVALID, &[])?;
            return Ok(false);
        };
        if !self.is_ours(name) {
            self.answer(number, answer::UNKNOWN, &[])?;
            return Ok(false);
        }
        let mut export = info::EXPORT.to_be_bytes().to_vec();
        export.extend_from_slice(&self.size_and_flags());
        self.answer(number, answer::INFO, &export)?;
        if wanted.contains(&info::NAME) {
            let mut item = info::NAME.to_be_bytes().to_vec();
            item.extend_from_slice(self.target.device.as_bytes());
            self.answer(number, answer::INFO, &item)?;
        }
        let mut sizes = info::BLOCK_SIZE.to_be_bytes().to_vec();
        for size in [
            wire::MINIMUM_BLOCK,
            wire::PREFERRED_BLOCK,
            wire::MAXIMUM_PAYLOAD,
        ] {
            sizes.extend_from_slice(&size.to_be_bytes());
        }
        self.answer(number, answer::INFO, &sizes)?;
        self.answer(number, answer::ACK, &[])?;
        Ok(true)
    }

    fn list(&self, number: u32, data: &[u8]) -> io::Result<()> {
        if !data.is_empty() {
            return self.answer(number, answer::INVALID, &[]);
        }
        let name = self.target.device.as_bytes();
        // A device's name has 64 characters at most.
        #[allow(clippy::cast_possible_truncation)]
        let mut item = (name.len() as u32).to_be_bytes().to_vec();
        item.extend_from_slice(name);
        self.answer(number, answer::SERVER, &item)?;
        self.answer(number, answer::ACK, &[])
    }

    fn contexts(&mut self, number: u32, data: &[u8]) -> io::Result<()> {
        let set = number == option::SET_META_CONTEXT;
        if set {
            self.agreement.allocation = false;
        }
        let mut fields = Fields(data);
        let parsed = (|| {
            let name = fields.text()?;
            let count = fields.word()?;
            let mut queries = Vec::new();
            for _ in 0..count {
                queries.push(fields.text()?);
            }
            fields.0.is_empty().then_some((name, queries))
        })();
        let Some((name, queries)) = parsed.filter(|_| self.agreement.structured_replies || !set)
        else {
            return self.answer(number, answer::INVALID, &[]);
        };
        if !self.is_ours(name) {
            return self.answer(number, answer::UNKNOWN, &[]);
        }
        let context = wire::ALLOCATION_CONTEXT.as_bytes();
        let all = !set && (queries.is_empty() || queries.contains(&b"base:".as_slice()));
        if all || queries.contains(&context) {
            self.agreement.allocation |= set;
            let id = if set { wire::ALLOCATION_CONTEXT_ID } else { 0 };
            let mut item = id.to_be_bytes().to_vec();
            item.extend_from_slice(context);
            self.answer(number, answer::META_CONTEXT, &item)?;
        }
        self.answer(number, answer::ACK, &[])
    }

    fn answer(&self, number: u32, kind: u32, data: &[u8]) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(20 + data.len());
        bytes.extend_from_slice(&wire::OPTION_REPLY_MAGIC.to_be_bytes());
        bytes.extend_from_slice(&number.to_be_bytes());
        bytes.extend_from_slice(&kind.to_be_bytes());
        // Our own answers are short.
        #[allow(clippy::cast_possible_truncation)]
        bytes.extend_from_slice(&(data.len() as u32).to_be_bytes());
        bytes.extend_from_slice(data);
        self.send(&bytes)
    }

    fn send(&self, bytes: &[u8]) -> io::Result<()> {
        let mut stream = self.stream;
        stream.write_all(bytes)
    }

    fn receive<const N: usize>(&self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        let mut stream = self.stream;
        stream.read_exact(&mut bytes)?;
        Ok(bytes)
    }
}

fn broken(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}
