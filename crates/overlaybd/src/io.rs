//! Positioned reads and writes: the only way in which this crate touches bytes, and the implementation for files.
//!
//! No caching, no threads, no policy.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

/// Bytes that can be read at any offset, by any number of threads at once.
pub trait ReadAt: Send + Sync {
    /// Fill the whole buffer from `offset` (bytes); `UnexpectedEof` when the source ends before.
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;

    /// Length of the source in bytes.
    fn len(&self) -> io::Result<u64>;

    /// Like [`ReadAt::read_exact_at`], but only if it needs no wait for a disk: `false` when it would, and then the
    /// content of the buffer is unspecified.
    fn try_read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<bool> {
        let _ = (buffer, offset);
        Ok(false)
    }

    /// Whether the source has no bytes.
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }
}

/// Bytes that can be written at any offset as well.
pub trait WriteAt: ReadAt {
    /// Write the whole buffer at `offset` (bytes), growing the file where it ends before.
    fn write_all_at(&self, buffer: &[u8], offset: u64) -> io::Result<()>;

    /// Cut or extend (with zeros) to `length` bytes.
    fn set_len(&self, length: u64) -> io::Result<()>;

    /// Return when all that was written is on stable storage, with the size that is needed to read it.
    fn sync_data(&self) -> io::Result<()>;

    /// Give the blocks of a range back to the file system; it reads as zeros afterwards. `Unsupported` where the file
    /// system cannot.
    fn punch_hole(&self, range: Range<u64>) -> io::Result<()>;

    /// The parts of `range` that hold data, in order. Everything where the file system has no notion of holes.
    fn data_extents(&self, range: Range<u64>) -> io::Result<Vec<Range<u64>>>;
}

impl ReadAt for File {
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        FileExt::read_exact_at(self, buffer, offset)
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn try_read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<bool> {
        let wanted = buffer.len();
        let flags = rustix::io::ReadWriteFlags::NOWAIT;
        match rustix::io::preadv2(self, &mut [io::IoSliceMut::new(buffer)], offset, flags) {
            Ok(count) => Ok(count == wanted),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::OPNOTSUPP) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}

impl WriteAt for File {
    fn write_all_at(&self, buffer: &[u8], offset: u64) -> io::Result<()> {
        FileExt::write_all_at(self, buffer, offset)
    }

    fn set_len(&self, length: u64) -> io::Result<()> {
        File::set_len(self, length)
    }

    fn sync_data(&self) -> io::Result<()> {
        File::sync_data(self)
    }

    fn punch_hole(&self, range: Range<u64>) -> io::Result<()> {
        let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(self, flags, range.start, range.end - range.start)
            .map_err(io::Error::from)
    }

    fn data_extents(&self, range: Range<u64>) -> io::Result<Vec<Range<u64>>> {
        use rustix::fs::{seek, SeekFrom};
        use rustix::io::Errno;
        let mut extents = Vec::new();
        let mut position = range.start;
        while position < range.end {
            let start = match seek(self.as_fd(), SeekFrom::Data(position)) {
                Ok(start) => start,
                Err(Errno::NXIO) => break,
                Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok(vec![range]),
                Err(error) => return Err(error.into()),
            };
            if start >= range.end {
                break;
            }
            let end = seek(self.as_fd(), SeekFrom::Hole(start))?.min(range.end);
            extents.push(start..end);
            position = end;
        }
        Ok(extents)
    }
}
