//! A request body on its way in: waited for only so long, decompressed if need be, and written to disk in large pieces on
//! blocking threads while the next piece arrives.

use std::{
    fs::File,
    io::{self, IoSlice, Write},
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use async_compression::tokio::bufread::GzipDecoder;
use axum::body::{Body, BodyDataStream};
use bytes::Bytes;
use futures_util::{stream, FutureExt, Stream, StreamExt};
use http::{header::CONTENT_ENCODING, HeaderMap};
use tokio::task::{spawn_blocking, JoinHandle};
use tokio_util::io::{ReaderStream, StreamReader};

use super::super::failure::bad_request;
use crate::agent::error::HttpError;

/// Longest silence of a client that is sending. One that vanished without a word must not hold a file for ever.
const IDLE_LIMIT: Duration = Duration::from_secs(600);
/// How long the rest of a refused body is read, so that the client gets to read the answer.
const DRAIN_LIMIT: Duration = Duration::from_secs(300);
/// Bytes written at a time, if they arrive fast enough.
const PIECE: usize = 1 << 20;
/// Most buffers of one write: the kernel's limit.
const MAX_BUFFERS: usize = 1024;
/// Bytes decompressed at a time.
const DECODED_PIECE: usize = 128 << 10;

/// The bytes of a body after decoding. An error means that not all of them will come.
pub type Incoming = Pin<Box<dyn Stream<Item = io::Result<Bytes>> + Send>>;

/// A request body that can still be read after what decodes it has failed.
#[derive(Clone)]
pub struct Source(Arc<Mutex<BodyDataStream>>);

impl Source {
    pub fn new(body: Body) -> Self {
        Self(Arc::new(Mutex::new(body.into_data_stream())))
    }

    /// The decoded bytes.
    ///
    /// # Errors
    /// 400 for an encoding other than gzip.
    pub fn decoded(&self, headers: &HeaderMap) -> Result<Incoming, HttpError> {
        let raw = Box::pin(within_idle_limit(self.clone()).fuse());
        let encoding = headers
            .get(CONTENT_ENCODING)
            .map_or(&b""[..], |value| value.as_bytes())
            .trim_ascii();
        if encoding.is_empty() || encoding.eq_ignore_ascii_case(b"identity") {
            return Ok(raw);
        }
        if !encoding.eq_ignore_ascii_case(b"gzip") {
            return Err(bad_request(format!(
                "content encoding '{}' is not supported, only gzip is",
                String::from_utf8_lossy(encoding)
            )));
        }
        let mut decoder = GzipDecoder::new(StreamReader::new(raw));
        decoder.multiple_members(true);
        Ok(Box::pin(ReaderStream::with_capacity(
            decoder,
            DECODED_PIECE,
        )))
    }

    /// Reads and forgets the rest, in the background: a connection closed on a client that is still sending loses the
    /// answer.
    pub fn drain(mut self) {
        tokio::spawn(tokio::time::timeout(DRAIN_LIMIT, async move {
            while let Some(Ok(_)) = self.next().await {}
        }));
    }
}

impl Stream for Source {
    type Item = io::Result<Bytes>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let mut body = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        body.poll_next_unpin(context)
            .map(|item| item.map(|data| data.map_err(io::Error::other)))
    }
}

fn within_idle_limit(source: Source) -> impl Stream<Item = io::Result<Bytes>> + Send {
    stream::unfold(Some(source), |source| async move {
        let mut source = source?;
        match tokio::time::timeout(IDLE_LIMIT, source.next()).await {
            Ok(Some(Ok(data))) => Some((Ok(data), Some(source))),
            Ok(Some(Err(error))) => Some((Err(error), None)),
            Ok(None) => None,
            Err(_) => {
                let error = io::Error::new(
                    io::ErrorKind::TimedOut,
                    format!("nothing was received for {} seconds", IDLE_LIMIT.as_secs()),
                );
                Some((Err(error), None))
            }
        }
    })
}

/// What went wrong while a file was received.
#[derive(Debug)]
pub enum ReceiveError {
    /// The body: broken, cut off, or silent for too long.
    Body(io::Error),
    /// The disk.
    Disk(io::Error),
}

/// Writes everything that arrives to `file` and closes it.
///
/// # Errors
/// See `ReceiveError`. What arrived before stays in the file.
pub async fn write(
    file: File,
    incoming: impl Stream<Item = io::Result<Bytes>> + Unpin,
) -> Result<(), ReceiveError> {
    let mut incoming = incoming.fuse();
    let file = Arc::new(file);
    let mut writing: Option<JoinHandle<io::Result<()>>> = None;
    loop {
        let piece = gather(&mut incoming).await;
        if let Some(writing) = writing.take() {
            finished(writing.await)?;
        }
        let piece = piece.map_err(ReceiveError::Body)?;
        if piece.is_empty() {
            break;
        }
        let file = Arc::clone(&file);
        writing = Some(spawn_blocking(move || write_piece(&file, &piece)));
    }
    // Nobody else has it any more. Some file systems tell only on closing that there was no space.
    let Some(file) = Arc::into_inner(file) else {
        return Ok(());
    };
    finished(spawn_blocking(move || Ok(nix::unistd::close(file)?)).await)
}

fn finished<T>(result: Result<io::Result<T>, tokio::task::JoinError>) -> Result<T, ReceiveError> {
    result
        .unwrap_or_else(|error| Err(io::Error::other(error)))
        .map_err(ReceiveError::Disk)
}

/// Waits for data and takes what is there, up to a piece. Empty at the end.
async fn gather(
    incoming: &mut (impl Stream<Item = io::Result<Bytes>> + Unpin),
) -> io::Result<Vec<Bytes>> {
    let mut piece = Vec::new();
    let mut size = 0;
    let mut next = incoming.next().await;
    while let Some(data) = next {
        let data = data?;
        size += data.len();
        if !data.is_empty() {
            piece.push(data);
        }
        if size >= PIECE || piece.len() >= MAX_BUFFERS {
            break;
        }
        next = if piece.is_empty() {
            incoming.next().await
        } else {
            match incoming.next().now_or_never() {
                Some(next) => next,
                None => break,
            }
        };
    }
    Ok(piece)
}

fn write_piece(mut file: &File, piece: &[Bytes]) -> io::Result<()> {
    let mut slices: Vec<IoSlice<'_>> = piece.iter().map(|data| IoSlice::new(data)).collect();
    let mut rest = &mut slices[..];
    while !rest.is_empty() {
        match file.write_vectored(rest) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => IoSlice::advance_slices(&mut rest, written),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;
    use std::{fs, io::Read};

    fn headers(encoding: &'static str) -> HeaderMap {
        HeaderMap::from_iter([(CONTENT_ENCODING, HeaderValue::from_static(encoding))])
    }

    async fn written(chunks: Vec<io::Result<Bytes>>) -> (Vec<u8>, Result<(), ReceiveError>) {
        let target = tempfile::NamedTempFile::new().unwrap();
        let result = write(target.reopen().unwrap(), stream::iter(chunks)).await;
        (fs::read(target.path()).unwrap(), result)
    }

    #[tokio::test]
    async fn writes_chunks_of_every_size_in_order() {
        let sizes = [0, 1, 5, PIECE - 1, 0, PIECE + 1, 3 * PIECE, 7];
        let chunks: Vec<Bytes> = (0u8..)
            .zip(sizes)
            .map(|(fill, size)| vec![fill; size].into())
            .collect();
        let (content, result) = written(chunks.iter().cloned().map(Ok).collect()).await;
        result.unwrap();
        assert_eq!(content, chunks.concat());
        let many = (0..3000u32)
            .map(|number| Ok(Bytes::copy_from_slice(&number.to_be_bytes())))
            .collect();
        assert_eq!(written(many).await.0.len(), 12_000);
    }

    #[tokio::test]
    async fn a_body_that_breaks_off_is_an_error() {
        let (_, result) = written(vec![
            Ok(Bytes::from_static(b"half")),
            Err(io::ErrorKind::ConnectionReset.into()),
        ])
        .await;
        assert!(matches!(result, Err(ReceiveError::Body(_))), "{result:?}");
    }

    #[tokio::test]
    async fn a_disk_that_refuses_is_an_error() {
        let full = fs::OpenOptions::new()
            .write(true)
            .open("/dev/full")
            .unwrap();
        let chunks = stream::iter([Ok(Bytes::from_static(b"data"))]);
        let error = write(full, chunks).await.unwrap_err();
        assert!(
            matches!(error, ReceiveError::Disk(error) if error.raw_os_error() == Some(libc::ENOSPC))
        );
    }

    async fn decoded(body: Vec<u8>, encoding: &'static str) -> io::Result<Vec<u8>> {
        let mut incoming = Source::new(Body::from(body))
            .decoded(&headers(encoding))
            .unwrap();
        let mut content = Vec::new();
        while let Some(data) = incoming.next().await {
            content.extend_from_slice(&data?);
        }
        Ok(content)
    }

    #[tokio::test]
    async fn decodes_gzip_and_only_gzip() {
        let mut coded = Vec::new();
        let encoder =
            |text: &'static [u8]| flate2::read::GzEncoder::new(text, flate2::Compression::fast());
        encoder(b"first ").read_to_end(&mut coded).unwrap();
        encoder(b"second").read_to_end(&mut coded).unwrap();
        assert_eq!(
            decoded(coded.clone(), "GZIP").await.unwrap(),
            b"first second"
        );
        assert_eq!(
            decoded(b"plain".to_vec(), "identity").await.unwrap(),
            b"plain"
        );
        for broken in [
            coded[..coded.len() - 3].to_vec(),
            b"no gzip".to_vec(),
            Vec::new(),
        ] {
            assert!(decoded(broken, "gzip").await.is_err());
        }
        let source = Source::new(Body::empty());
        assert!(source
            .decoded(&headers("br"))
            .is_err_and(|error| error.status == 400));
    }
}
