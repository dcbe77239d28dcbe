//! A small NBD client that says exactly what it is told to, right or wrong.
#![allow(dead_code)]

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

pub const READ: u16 = 0;
pub const WRITE: u16 = 1;
pub const DISCONNECT: u16 = 2;
pub const FLUSH: u16 = 3;
pub const TRIM: u16 = 4;
pub const WRITE_ZEROES: u16 = 6;
pub const BLOCK_STATUS: u16 = 7;

pub const FUA: u16 = 1;
pub const NO_HOLE: u16 = 2;
pub const ONE_EXTENT: u16 = 8;

pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;

/// A connection in the transmission phase, or on the way to it.
pub struct Nbd {
    pub stream: UnixStream,
    pub size: u64,
    pub flags: u16,
    pub structured: bool,
    next: u64,
}

/// The outcome of one request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    pub cookie: u64,
    pub error: u32,
    pub data: Vec<u8>,
    /// Pairs of length and flags.
    pub extents: Vec<(u32, u32)>,
}

impl Nbd {
    /// Connect and read the greeting, no further.
    pub fn greet(path: &Path) -> io::Result<Self> {
        let mut stream = UnixStream::connect(path)?;
        // A daemon that hangs fails the test instead of stopping it.
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        stream.set_write_timeout(Some(Duration::from_secs(60)))?;
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting)?;
        assert_eq!(&greeting[..8], b"NBDMAGIC");
        assert_eq!(&greeting[8..16], b"IHAVEOPT");
        assert_eq!(greeting[16..], [0, 3]);
        stream.write_all(&3u32.to_be_bytes())?;
        Ok(Self {
            stream,
            size: 0,
            flags: 0,
            structured: false,
            next: 1,
        })
    }

    /// Connect with simple replies.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let mut nbd = Self::greet(path)?;
        nbd.go("")?;
        Ok(nbd)
    }

    /// Connect with structured replies and block status.
    pub fn connect_structured(path: &Path) -> io::Result<Self> {
        let mut nbd = Self::greet(path)?;
        assert_eq!(nbd.option(8, &[])?, vec![(1, vec![])]);
        nbd.structured = true;
        let mut data = vec![0, 0, 0, 0, 0, 0, 0, 1];
        data.extend_from_slice(&15u32.to_be_bytes());
        data.extend_from_slice(b"base:allocation");
        let replies = nbd.option(10, &data)?;
        assert_eq!(replies.len(), 2, "{replies:?}");
        nbd.go("")?;
        Ok(nbd)
    }

    pub fn go(&mut self, name: &str) -> io::Result<()> {
        let mut data = u32::try_from(name.len()).unwrap().to_be_bytes().to_vec();
        data.extend_from_slice(name.as_bytes());
        data.extend_from_slice(&[0, 0]);
        for (kind, data) in self.option(7, &data)? {
            if kind == 3 && data[..2] == [0, 0] {
                self.size = u64::from_be_bytes(data[2..10].try_into().unwrap());
                self.flags = u16::from_be_bytes(data[10..12].try_into().unwrap());
            }
            if kind & (1 << 31) != 0 {
                return Err(io::Error::other(format!("refused: {kind:x}")));
            }
        }
        Ok(())
    }

    /// Send an option and collect its answers, up to the acknowledgement or an error.
    pub fn option(&mut self, number: u32, data: &[u8]) -> io::Result<Vec<(u32, Vec<u8>)>> {
        let mut bytes = OPTION_MAGIC.to_be_bytes().to_vec();
        bytes.extend_from_slice(&number.to_be_bytes());
        bytes.extend_from_slice(&u32::try_from(data.len()).unwrap().to_be_bytes());
        bytes.extend_from_slice(data);
        self.stream.write_all(&bytes)?;
        let mut answers = Vec::new();
        loop {
            let mut header = [0; 20];
            self.stream.read_exact(&mut header)?;
            assert_eq!(header[..8], 0x0003_e889_0455_65a9u64.to_be_bytes());
            assert_eq!(header[8..12], number.to_be_bytes());
            let kind = u32::from_be_bytes(header[12..16].try_into().unwrap());
            let length = u32::from_be_bytes(header[16..20].try_into().unwrap());
            let mut data = vec![0; length as usize];
            self.stream.read_exact(&mut data)?;
            answers.push((kind, data));
            if kind == 1 || kind & (1 << 31) != 0 {
                return Ok(answers);
            }
        }
    }

    /// The bytes of a request without its payload.
    pub fn request(command: u16, flags: u16, cookie: u64, offset: u64, length: u32) -> Vec<u8> {
        let mut bytes = 0x2560_9513u32.to_be_bytes().to_vec();
        bytes.extend_from_slice(&flags.to_be_bytes());
        bytes.extend_from_slice(&command.to_be_bytes());
        bytes.extend_from_slice(&cookie.to_be_bytes());
        bytes.extend_from_slice(&offset.to_be_bytes());
        bytes.extend_from_slice(&length.to_be_bytes());
        bytes
    }

    /// Send a request and return its cookie.
    pub fn send(
        &mut self,
        command: u16,
        flags: u16,
        offset: u64,
        length: u32,
        payload: &[u8],
    ) -> io::Result<u64> {
        let cookie = self.next;
        self.next += 1;
        let mut bytes = Self::request(command, flags, cookie, offset, length);
        bytes.extend_from_slice(payload);
        self.stream.write_all(&bytes)?;
        Ok(cookie)
    }

    /// The next reply; `read_length` says how much data a successful simple reply with this cookie has.
    pub fn receive(&mut self, read_length: impl Fn(u64) -> usize) -> io::Result<Reply> {
        let mut magic = [0; 4];
        self.stream.read_exact(&mut magic)?;
        let mut reply = Reply {
            cookie: 0,
            error: 0,
            data: Vec::new(),
            extents: Vec::new(),
        };
        if u32::from_be_bytes(magic) == 0x6744_6698 {
            let mut header = [0; 12];
            self.stream.read_exact(&mut header)?;
            reply.error = u32::from_be_bytes(header[..4].try_into().unwrap());
            reply.cookie = u64::from_be_bytes(header[4..].try_into().unwrap());
            let length = read_length(reply.cookie);
            if reply.error == 0 && length > 0 {
                assert!(
                    !self.structured,
                    "a simple reply to a read, in spite of the agreement"
                );
                reply.data = vec![0; length];
                self.stream.read_exact(&mut reply.data)?;
            }
            return Ok(reply);
        }
        assert_eq!(u32::from_be_bytes(magic), 0x668e_33ef);
        let mut header = [0; 16];
        self.stream.read_exact(&mut header)?;
        assert_eq!(
            header[..2],
            [0, 1],
            "one chunk is all that this server sends"
        );
        let kind = u16::from_be_bytes(header[2..4].try_into().unwrap());
        reply.cookie = u64::from_be_bytes(header[4..12].try_into().unwrap());
        let length = u32::from_be_bytes(header[12..16].try_into().unwrap());
        let mut body = vec![0; length as usize];
        self.stream.read_exact(&mut body)?;
        match kind {
            1 => reply.data = body.split_off(8),
            5 => {
                assert_eq!(body[..4], [0, 0, 0, 1]);
                for pair in body[4..].chunks_exact(8) {
                    let length = u32::from_be_bytes(pair[..4].try_into().unwrap());
                    reply
                        .extents
                        .push((length, u32::from_be_bytes(pair[4..].try_into().unwrap())));
                }
            }
            0x8001 => reply.error = u32::from_be_bytes(body[..4].try_into().unwrap()),
            other => panic!("a chunk of type {other}"),
        }
        Ok(reply)
    }

    /// A request and its reply, with nothing else in flight.
    pub fn call(
        &mut self,
        command: u16,
        flags: u16,
        offset: u64,
        length: u32,
        payload: &[u8],
    ) -> io::Result<Reply> {
        let cookie = self.send(command, flags, offset, length, payload)?;
        let expected = if command == READ { length as usize } else { 0 };
        let reply = self.receive(|_| expected)?;
        assert_eq!(reply.cookie, cookie);
        Ok(reply)
    }

    pub fn read(&mut self, offset: u64, length: u32) -> io::Result<Vec<u8>> {
        checked(self.call(READ, 0, offset, length, &[])?).map(|reply| reply.data)
    }

    pub fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        let length = u32::try_from(data.len()).unwrap();
        checked(self.call(WRITE, 0, offset, length, data)?).map(drop)
    }

    pub fn flush(&mut self) -> io::Result<()> {
        checked(self.call(FLUSH, 0, 0, 0, &[])?).map(drop)
    }

    pub fn trim(&mut self, offset: u64, length: u32) -> io::Result<()> {
        checked(self.call(TRIM, 0, offset, length, &[])?).map(drop)
    }

    pub fn status(&mut self, offset: u64, length: u32) -> io::Result<Vec<(u32, u32)>> {
        checked(self.call(BLOCK_STATUS, 0, offset, length, &[])?).map(|reply| reply.extents)
    }
}

fn checked(reply: Reply) -> io::Result<Reply> {
    if reply.error == 0 {
        Ok(reply)
    } else {
        Err(io::Error::other(format!("NBD error {}", reply.error)))
    }
}
