//! Keeps a change that the kernel has given up on from happening late.
//!
//! When a request has had no answer for long, the kernel shuts its connection down and sends it again on another one. The
//! first may still be in the hands of a slow disk: done after the second was answered, and after the application has
//! written there once more, it would bring old data back. So changes of one range wait for each other, and a change whose
//! connection was shut down meanwhile does not begin. Must not know of netlink.

use std::io;
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use rustix::event::{poll, PollFd, PollFlags, Timespec};

use crate::backend::{BlockBackend, Extent};

/// The ranges of one device that are being changed now.
#[derive(Default)]
pub(super) struct Changes {
    ranges: Mutex<Vec<Range<u64>>>,
    ended: Condvar,
}

struct Change<'a> {
    changes: &'a Changes,
    range: Range<u64>,
}

impl Changes {
    fn lock(&self) -> MutexGuard<'_, Vec<Range<u64>>> {
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wait until nobody else changes any byte of the range.
    fn begin(&self, range: Range<u64>) -> Change<'_> {
        let mut ranges = self.lock();
        while ranges
            .iter()
            .any(|other| other.start < range.end && range.start < other.end)
        {
            ranges = self
                .ended
                .wait(ranges)
                .unwrap_or_else(PoisonError::into_inner);
        }
        ranges.push(range.clone());
        Change {
            changes: self,
            range,
        }
    }
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        let mut ranges = self.changes.lock();
        if let Some(index) = ranges.iter().position(|range| *range == self.range) {
            ranges.swap_remove(index);
        }
        drop(ranges);
        self.changes.ended.notify_all();
    }
}

/// The device as one connection sees it.
pub(super) struct Fenced {
    pub backend: Arc<dyn BlockBackend>,
    pub changes: Arc<Changes>,
    pub socket: Arc<UnixStream>,
}

impl Fenced {
    fn change(
        &self,
        offset: u64,
        length: u64,
        work: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<()> {
        let _change = self.changes.begin(offset..offset.saturating_add(length));
        // Only now: the kernel shuts down before it sends again, so whoever sent again has waited for us, or we see it.
        if is_shut_down(&self.socket)? {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        work()
    }
}

fn is_shut_down(socket: &UnixStream) -> io::Result<bool> {
    let mut descriptors = [PollFd::new(socket, PollFlags::RDHUP)];
    loop {
        match poll(
            &mut descriptors,
            Some(&Timespec {
                tv_sec: 0,
                tv_nsec: 0,
            }),
        ) {
            Ok(count) => return Ok(count > 0),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

impl BlockBackend for Fenced {
    fn size(&self) -> u64 {
        self.backend.size()
    }

    fn is_read_only(&self) -> bool {
        self.backend.is_read_only()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.backend.read_at(buffer, offset)
    }

    fn try_read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<bool> {
        self.backend.try_read_at(buffer, offset)
    }

    fn write_at(&self, buffer: &[u8], offset: u64) -> io::Result<()> {
        self.change(offset, buffer.len() as u64, || {
            self.backend.write_at(buffer, offset)
        })
    }

    fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        self.change(offset, length, || self.backend.discard(offset, length))
    }

    fn write_zeroes(&self, offset: u64, length: u64, allocate: bool) -> io::Result<()> {
        self.change(offset, length, || {
            self.backend.write_zeroes(offset, length, allocate)
        })
    }

    fn flush(&self) -> io::Result<()> {
        self.backend.flush()
    }

    fn extents(&self, offset: u64, length: u64, limit: usize) -> io::Result<Vec<Extent>> {
        self.backend.extents(offset, length, limit)
    }

    fn request_started(&self) {
        self.backend.request_started();
    }

    fn request_finished(&self) {
        self.backend.request_finished();
    }
}

#[cfg(test)]
mod tests {
    use std::net::Shutdown;
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;
    use crate::backend::Content;

    /// Tells when a write begins, and goes on when it is told to.
    struct Slow {
        began: Mutex<mpsc::Sender<u8>>,
        go_on: Mutex<mpsc::Receiver<()>>,
    }

    impl BlockBackend for Slow {
        fn size(&self) -> u64 {
            1 << 20
        }
        fn is_read_only(&self) -> bool {
            false
        }
        fn read_at(&self, _: &mut [u8], _: u64) -> io::Result<()> {
            Ok(())
        }
        fn try_read_at(&self, _: &mut [u8], _: u64) -> io::Result<bool> {
            Ok(true)
        }
        fn write_at(&self, buffer: &[u8], _: u64) -> io::Result<()> {
            self.began.lock().unwrap().send(buffer[0]).unwrap();
            self.go_on.lock().unwrap().recv().unwrap();
            Ok(())
        }
        fn discard(&self, _: u64, _: u64) -> io::Result<()> {
            Ok(())
        }
        fn write_zeroes(&self, _: u64, _: u64, _: bool) -> io::Result<()> {
            Ok(())
        }
        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
        fn extents(&self, _: u64, length: u64, _: usize) -> io::Result<Vec<Extent>> {
            Ok(vec![Extent {
                length,
                content: Content::Data,
            }])
        }
    }

    #[test]
    fn a_repeated_write_waits_for_the_first_and_an_abandoned_one_does_not_begin() {
        let (began, begins) = mpsc::channel();
        let (go, go_on) = mpsc::channel();
        let backend: Arc<dyn BlockBackend> = Arc::new(Slow {
            began: Mutex::new(began),
            go_on: Mutex::new(go_on),
        });
        let changes = Arc::new(Changes::default());
        let connection = || {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let fenced = Fenced {
                backend: Arc::clone(&backend),
                changes: Arc::clone(&changes),
                socket: Arc::new(ours),
            };
            (Arc::new(fenced), theirs)
        };
        let (first, first_kernel) = connection();
        let (second, _second_kernel) = connection();

        let slow = std::thread::spawn({
            let first = Arc::clone(&first);
            move || first.write_at(&[1; 512], 4096)
        });
        assert_eq!(begins.recv_timeout(Duration::from_secs(10)), Ok(1));
        first_kernel.shutdown(Shutdown::Both).unwrap();
        let repeated = std::thread::spawn({
            let second = Arc::clone(&second);
            move || second.write_at(&[2; 512], 4096)
        });
        assert!(begins.recv_timeout(Duration::from_millis(100)).is_err());
        // What is left of the first connection, anywhere, is refused.
        let late = first.write_at(&[3; 512], 0).unwrap_err();
        assert_eq!(late.kind(), io::ErrorKind::ConnectionAborted);
        assert!(first.discard(0, 512).is_err());
        go.send(()).unwrap();
        slow.join().unwrap().unwrap();
        assert_eq!(begins.recv_timeout(Duration::from_secs(10)), Ok(2));
        go.send(()).unwrap();
        repeated.join().unwrap().unwrap();
        assert!(changes.lock().is_empty());
    }
}
