//! A file on its way out: read, and compressed if asked for, in large pieces on blocking threads, one piece ahead of the
//! connection. A slow client holds two pieces and no thread.

use std::{
    fs::File,
    io::{self, Read, Write},
};

use bytes::Bytes;
use flate2::{write::GzEncoder, Compression};
use futures_util::{stream, Stream};
use tokio::task::{spawn_blocking, JoinHandle};

/// Bytes read at a time.
const PIECE: u64 = 256 << 10;

/// What is left to send of an open file, from its current position.
pub struct Outgoing {
    file: File,
    /// None: to the end, wherever that is.
    remaining: Option<u64>,
    gzip: Option<GzEncoder<Vec<u8>>>,
}

impl Outgoing {
    /// Sends `length` bytes, or everything, compressed if `gzip` is set.
    pub fn new(file: File, length: Option<u64>, gzip: bool) -> Self {
        Self {
            file,
            remaining: length,
            // Level 1: what leaves a guest goes over a fast network, and its processors are few.
            gzip: gzip.then(|| GzEncoder::new(Vec::new(), Compression::fast())),
        }
    }

    /// The bytes for the wire.
    ///
    /// # Errors
    /// A stream item is an error if reading fails or the file has become shorter than promised; the connection must
    /// then be cut, because the client has been told a length.
    pub fn into_stream(self) -> impl Stream<Item = io::Result<Bytes>> + Send {
        stream::unfold(Some(ahead(self)), |reading| async move {
            let (outgoing, result) = match reading?.await {
                Ok(done) => done,
                Err(error) => return Some((Err(io::Error::other(error)), None)),
            };
            match result {
                Ok(Some(piece)) => Some((Ok(piece), outgoing.map(ahead))),
                Ok(None) => None,
                Err(error) => Some((Err(error), None)),
            }
        })
    }

    /// The next piece; with it what is left, if anything.
    fn step(mut self) -> (Option<Self>, io::Result<Option<Bytes>>) {
        loop {
            let piece = match self.read() {
                Ok(piece) => piece,
                Err(error) => return (None, Err(error)),
            };
            let at_end = piece.is_empty();
            let Some(encoder) = &mut self.gzip else {
                return if at_end {
                    (None, Ok(None))
                } else {
                    (Some(self), Ok(Some(piece.into())))
                };
            };
            let coded = if at_end {
                encoder.try_finish()
            } else {
                encoder.write_all(&piece)
            };
            if let Err(error) = coded {
                return (None, Err(error));
            }
            let output = std::mem::take(encoder.get_mut());
            if at_end {
                return (None, Ok((!output.is_empty()).then(|| output.into())));
            }
            if !output.is_empty() {
                return (Some(self), Ok(Some(output.into())));
            }
        }
    }

    fn read(&mut self) -> io::Result<Vec<u8>> {
        let wanted = self
            .remaining
            .map_or(PIECE, |remaining| remaining.min(PIECE));
        if wanted == 0 {
            return Ok(Vec::new());
        }
        let mut piece = Vec::with_capacity(usize::try_from(wanted).unwrap_or(0));
        let got = (&self.file).take(wanted).read_to_end(&mut piece)?;
        if let Some(remaining) = &mut self.remaining {
            if got == 0 {
                return Err(io::Error::new(
                    io::ErrorKind::UnexpectedEof,
                    "the file became shorter while it was sent",
                ));
            }
            *remaining -= got as u64;
        }
        Ok(piece)
    }
}

type Step = (Option<Outgoing>, io::Result<Option<Bytes>>);

fn ahead(outgoing: Outgoing) -> JoinHandle<Step> {
    spawn_blocking(move || outgoing.step())
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::TryStreamExt;
    use std::io::Seek;

    async fn sent(content: &[u8], length: Option<u64>, gzip: bool) -> io::Result<Vec<u8>> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(content).unwrap();
        file.rewind().unwrap();
        let pieces: Vec<Bytes> = Outgoing::new(file, length, gzip)
            .into_stream()
            .try_collect()
            .await?;
        Ok(pieces.concat())
    }

    #[tokio::test]
    async fn sends_all_or_a_part() {
        let content: Vec<u8> = (0..1_000_000u32).map(|number| (number / 7) as u8).collect();
        assert_eq!(
            sent(&content, Some(1_000_000), false).await.unwrap(),
            content
        );
        assert_eq!(
            sent(&content, Some(300_000), false).await.unwrap(),
            content[..300_000]
        );
        assert_eq!(sent(&content, None, false).await.unwrap(), content);
        assert!(sent(b"", None, false).await.unwrap().is_empty());
    }

    #[tokio::test]
    async fn compresses() {
        let content = "many words ".repeat(100_000);
        let coded = sent(content.as_bytes(), None, true).await.unwrap();
        assert!(coded.len() < content.len() / 10);
        let mut decoded = String::new();
        flate2::read::GzDecoder::new(&coded[..])
            .read_to_string(&mut decoded)
            .unwrap();
        assert_eq!(decoded, content);
    }

    #[tokio::test]
    async fn a_file_that_shrinks_is_an_error() {
        let error = sent(b"short", Some(10), false).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }
}
