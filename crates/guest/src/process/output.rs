//! Output of one process on its way to any number of readers, in bounded memory.
//!
//! The rule. Every reader has a queue of at most [`QUEUE_BYTES`]. A chunk is read from the process only when every
//! queue has taken the one before, so a reader that is merely slow slows the process down, as a pipe would, and loses
//! nothing. A reader that takes nothing at all while its queue is full is given [`ALONE_PATIENCE`], or
//! [`SHARED_PATIENCE`] when other readers wait behind it; then it is cut off: its queue is emptied and its stream
//! ends with `resource_exhausted`. So no reader stops the process or another reader for ever. Without readers output
//! is read and dropped.

use std::{
    collections::VecDeque,
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use tokio::{
    sync::{watch, Notify},
    time::{sleep_until, Instant},
};

use crate::proto::process::process_event::{data_event::Output, DataEvent, EndEvent};

/// Bytes of output that wait for one reader; one chunk more may be on top.
const QUEUE_BYTES: usize = 256 << 10;
/// Chunks that wait for one reader, for processes that write a byte at a time.
const QUEUE_CHUNKS: usize = 2048;
/// How long a reader may take nothing when it is the only one.
const ALONE_PATIENCE: Duration = Duration::from_secs(30);
/// The same when others wait for it.
const SHARED_PATIENCE: Duration = Duration::from_secs(3);

/// Which stream a chunk is from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    Stdout,
    Stderr,
    Pty,
}

/// A piece of output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    pub source: Source,
    pub data: Bytes,
}

impl From<Chunk> for DataEvent {
    fn from(chunk: Chunk) -> Self {
        let data = chunk.data.to_vec();
        DataEvent {
            output: Some(match chunk.source {
                Source::Stdout => Output::Stdout(data),
                Source::Stderr => Output::Stderr(data),
                Source::Pty => Output::Pty(data),
            }),
        }
    }
}

/// What a reader gets.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    Data(Chunk),
    End(EndEvent),
    /// The reader took nothing for too long and missed output. Nothing follows.
    CutOff,
}

/// The readers of one process.
pub struct Fanout {
    inner: Mutex<Inner>,
    /// Number of readers; a change makes waiting publishers think again.
    count: watch::Sender<usize>,
    alone_patience: Duration,
    shared_patience: Duration,
}

#[derive(Default)]
struct Inner {
    queues: Vec<Arc<Queue>>,
    end: Option<EndEvent>,
}

impl Default for Fanout {
    fn default() -> Self {
        Self::with_patience(ALONE_PATIENCE, SHARED_PATIENCE)
    }
}

impl Fanout {
    fn with_patience(alone_patience: Duration, shared_patience: Duration) -> Self {
        Self {
            inner: Mutex::default(),
            count: watch::Sender::new(0),
            alone_patience,
            shared_patience,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new reader, which sees what is published from now on, and the end even if it is past.
    pub fn subscribe(self: &Arc<Self>) -> Subscription {
        let queue = Arc::new(Queue::default());
        let mut inner = self.lock();
        match &inner.end {
            Some(end) => queue.finish(Event::End(end.clone())),
            None => inner.queues.push(Arc::clone(&queue)),
        }
        self.count.send_replace(inner.queues.len());
        Subscription {
            queue,
            fanout: Arc::clone(self),
        }
    }

    /// Hands a chunk to every reader; returns when all have taken it or were cut off.
    pub async fn publish(&self, chunk: Chunk) {
        let queues = self.lock().queues.clone();
        let full: Vec<_> = queues.iter().filter(|queue| !queue.offer(&chunk)).collect();
        for queue in full {
            if !self.wait_and_offer(queue, &chunk).await {
                queue.cut_off();
                self.remove(queue);
            }
        }
    }

    /// Waits for room in `queue`. `false` when its reader took nothing for too long.
    async fn wait_and_offer(&self, queue: &Queue, chunk: &Chunk) -> bool {
        let mut count = self.count.subscribe();
        let mut since = Instant::now();
        loop {
            let mut taken = pin!(queue.taken.notified());
            taken.as_mut().enable();
            if queue.offer(chunk) {
                return true;
            }
            let patience = if *count.borrow_and_update() > 1 {
                self.shared_patience
            } else {
                self.alone_patience
            };
            tokio::select! {
                () = taken => since = Instant::now(),
                // The sender lives in self, so this cannot fail.
                _ = count.changed() => {}
                () = sleep_until(since + patience) => return false,
            }
        }
    }

    /// Tells every reader, present and future, how the process ended.
    pub fn finish(&self, end: EndEvent) {
        let mut inner = self.lock();
        for queue in inner.queues.drain(..) {
            queue.finish(Event::End(end.clone()));
        }
        inner.end = Some(end);
        self.count.send_replace(0);
    }

    fn remove(&self, queue: &Arc<Queue>) {
        let mut inner = self.lock();
        inner.queues.retain(|other| !Arc::ptr_eq(other, queue));
        self.count.send_replace(inner.queues.len());
    }
}

#[derive(Default)]
struct Queue {
    contents: Mutex<Contents>,
    /// The reader took something or left.
    taken: Notify,
    /// There is something for the reader.
    filled: Notify,
}

#[derive(Default)]
struct Contents {
    chunks: VecDeque<Chunk>,
    bytes: usize,
    last: Option<Event>,
    /// No chunk is taken any more: the reader left, was cut off, or the process is over.
    closed: bool,
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, Contents> {
        self.contents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the chunk, or nothing from a reader that is gone; `false` when there is no room.
    fn offer(&self, chunk: &Chunk) -> bool {
        let mut contents = self.lock();
        if contents.closed {
            return true;
        }
        if contents.bytes >= QUEUE_BYTES || contents.chunks.len() >= QUEUE_CHUNKS {
            return false;
        }
        contents.bytes += chunk.data.len();
        contents.chunks.push_back(chunk.clone());
        drop(contents);
        self.filled.notify_one();
        true
    }

    fn finish(&self, last: Event) {
        let mut contents = self.lock();
        contents.closed = true;
        contents.last = Some(last);
        drop(contents);
        self.filled.notify_one();
    }

    fn cut_off(&self) {
        let mut contents = self.lock();
        contents.chunks = VecDeque::new();
        contents.bytes = 0;
        drop(contents);
        self.finish(Event::CutOff);
    }

    fn leave(&self) {
        let mut contents = self.lock();
        *contents = Contents {
            closed: true,
            ..Contents::default()
        };
        drop(contents);
        self.taken.notify_waiters();
    }
}

/// One reader. Dropping it ends the reading; the process goes on.
pub struct Subscription {
    queue: Arc<Queue>,
    fanout: Arc<Fanout>,
}

impl Subscription {
    /// The next event; `None` after the last one.
    pub async fn next(&mut self) -> Option<Event> {
        loop {
            {
                let mut contents = self.queue.lock();
                if let Some(chunk) = contents.chunks.pop_front() {
                    contents.bytes -= chunk.data.len();
                    drop(contents);
                    self.queue.taken.notify_waiters();
                    return Some(Event::Data(chunk));
                }
                if let Some(last) = contents.last.take() {
                    return Some(last);
                }
                if contents.closed {
                    return None;
                }
            }
            self.queue.filled.notified().await;
        }
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.queue.leave();
        self.fanout.remove(&self.queue);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::exit::Exit;

    fn chunk(len: usize) -> Chunk {
        Chunk {
            source: Source::Stdout,
            data: vec![b'x'; len].into(),
        }
    }

    async fn count(mut reader: Subscription) -> (usize, Option<Event>) {
        let mut bytes = 0;
        loop {
            match reader.next().await {
                Some(Event::Data(chunk)) => bytes += chunk.data.len(),
                other => return (bytes, other),
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_reader_loses_nothing() {
        let fanout = Arc::new(Fanout::default());
        let mut reader = fanout.subscribe();
        let publisher = {
            let fanout = Arc::clone(&fanout);
            tokio::spawn(async move {
                for _ in 0..64 {
                    fanout.publish(chunk(32 << 10)).await;
                }
                fanout.finish(Exit::Code(0).event());
            })
        };
        let mut bytes = 0;
        while let Some(event) = reader.next().await {
            if let Event::Data(chunk) = event {
                bytes += chunk.data.len();
            }
            // Just below the patience: slow, but alive. Time is virtual here.
            tokio::time::sleep(ALONE_PATIENCE - Duration::from_secs(1)).await;
        }
        publisher.await.unwrap();
        assert_eq!(bytes, 64 * (32 << 10));
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_stopped_is_cut_off() {
        let fanout = Arc::new(Fanout::default());
        let stopped = fanout.subscribe();
        let start = Instant::now();
        for _ in 0..64 {
            fanout.publish(chunk(32 << 10)).await;
        }
        assert_eq!(start.elapsed().as_secs(), ALONE_PATIENCE.as_secs());
        assert_eq!(count(stopped).await, (0, Some(Event::CutOff)));
        assert_eq!(*fanout.count.borrow(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_stopped_reader_delays_others_only_shortly() {
        let fanout = Arc::new(Fanout::default());
        let _stopped = fanout.subscribe();
        let reader = tokio::spawn(count(fanout.subscribe()));
        let start = Instant::now();
        for _ in 0..64 {
            fanout.publish(chunk(32 << 10)).await;
        }
        fanout.finish(Exit::Code(0).event());
        assert_eq!(start.elapsed().as_secs(), SHARED_PATIENCE.as_secs());
        let (bytes, last) = reader.await.unwrap();
        assert_eq!(bytes, 64 * (32 << 10));
        assert_eq!(last, Some(Event::End(Exit::Code(0).event())));
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_leaves_frees_the_process_at_once() {
        let fanout = Arc::new(Fanout::default());
        let reader = fanout.subscribe();
        let start = Instant::now();
        let publisher = {
            let fanout = Arc::clone(&fanout);
            tokio::spawn(async move {
                for _ in 0..1000 {
                    fanout.publish(chunk(32 << 10)).await;
                }
            })
        };
        tokio::task::yield_now().await;
        drop(reader);
        publisher.await.unwrap();
        assert_eq!(start.elapsed(), Duration::ZERO);
    }

    #[tokio::test]
    async fn late_readers_get_the_end() {
        let fanout = Arc::new(Fanout::default());
        fanout.publish(chunk(10)).await;
        fanout.finish(Exit::Code(7).event());
        assert_eq!(
            count(fanout.subscribe()).await,
            (0, Some(Event::End(Exit::Code(7).event())))
        );
    }
}
