//! Sha256 of files: while they are written, on a thread of its own, or afterwards.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{channel, sync_channel, Receiver, SyncSender};
use std::thread::JoinHandle;

use sha2::{Digest, Sha256};

use crate::interruptible::Cancel;

/// Bytes that are read or written at once.
pub const PIECE_BYTES: usize = 1024 * 1024;
/// Pieces that may wait for the thread.
const QUEUE: usize = 4;

/// Takes a digest on another thread. Dropped before [`BackgroundDigest::finish`], it ends by itself.
pub struct BackgroundDigest {
    pieces: SyncSender<Vec<u8>>,
    /// Buffers to be used again: fresh ones would cost a page fault per 4 KiB.
    spent: Receiver<Vec<u8>>,
    thread: JoinHandle<Sha256>,
}

impl BackgroundDigest {
    pub fn start() -> Self {
        let (pieces, incoming) = sync_channel::<Vec<u8>>(QUEUE);
        let (outgoing, spent) = channel();
        let thread = std::thread::spawn(move || {
            let mut digest = Sha256::new();
            for mut piece in incoming {
                digest.update(&piece);
                piece.clear();
                // The other end may be gone already.
                let _ = outgoing.send(piece);
            }
            digest
        });
        Self {
            pieces,
            spent,
            thread,
        }
    }

    /// Add the bytes of a buffer, which is replaced by an empty one.
    pub fn take_in(&mut self, buffer: &mut Vec<u8>) -> io::Result<()> {
        let fresh = self
            .spent
            .try_recv()
            .unwrap_or_else(|_| Vec::with_capacity(PIECE_BYTES));
        self.pieces
            .send(std::mem::replace(buffer, fresh))
            .map_err(|_| io::Error::other("the thread that takes the digest has ended"))
    }

    pub fn finish(self) -> io::Result<String> {
        drop(self.pieces);
        match self.thread.join() {
            Ok(digest) => Ok(text_of(digest)),
            Err(_) => Err(io::Error::other(
                "the thread that takes the digest has failed",
            )),
        }
    }
}

/// Digest of a whole file.
pub fn hash_file(file: &File, cancel: &Cancel) -> io::Result<String> {
    let mut digest = Sha256::new();
    let mut buffer = vec![0; PIECE_BYTES];
    let mut offset = 0;
    loop {
        cancel.check()?;
        match file.read_at(&mut buffer, offset) {
            Ok(0) => return Ok(text_of(digest)),
            Ok(count) => {
                digest.update(&buffer[..count]);
                offset += count as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

fn text_of(digest: Sha256) -> String {
    let hex: String = digest
        .finalize()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    format!("sha256:{hex}")
}
