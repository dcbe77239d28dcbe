//! Splits a `multipart/form-data` body into its parts as it arrives (RFC 7578, RFC 2046). Holds no more of the body than
//! one chunk and one part's headers, whatever the client sends.

use std::io;

use bytes::{Buf, Bytes, BytesMut};
use futures_util::{Stream, StreamExt};
use memchr::memmem;

/// Longest header block of a part.
const MAX_HEAD: usize = 16 << 10;
/// RFC 2046 allows no longer boundary.
const MAX_BOUNDARY: usize = 70;

/// What a part says about itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Part {
    pub name: String,
    /// As sent, with its directories.
    pub filename: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    /// Before the first delimiter; what is there means nothing.
    Preamble,
    /// In the content of a part.
    Data,
    /// Directly after a delimiter.
    Delimiter,
    End,
}

/// The parts of one body.
#[derive(Debug)]
pub struct Parts<S> {
    source: S,
    /// Begins with a line break, so that the first delimiter looks like every other.
    buffer: BytesMut,
    delimiter: Vec<u8>,
    at: At,
}

impl<S: Stream<Item = io::Result<Bytes>> + Unpin> Parts<S> {
    /// `boundary` as in the content type.
    pub fn new(source: S, boundary: &str) -> Self {
        Self {
            source,
            buffer: BytesMut::from(&b"\r\n"[..]),
            delimiter: format!("\r\n--{boundary}").into_bytes(),
            at: At::Preamble,
        }
    }

    /// Skips to the next part; None after the last.
    ///
    /// # Errors
    /// `InvalidData` for what is no multipart body, `UnexpectedEof` if it ends early, and the source's own.
    pub async fn next_part(&mut self) -> io::Result<Option<Part>> {
        if self.at == At::End {
            return Ok(None);
        }
        while self.until_delimiter().await?.is_some() {}
        while self.buffer.len() < 2 {
            self.fill().await?;
        }
        if self.buffer.starts_with(b"--") {
            self.at = At::End;
            // To the end, so that the connection can be used again and a body that is cut off is noticed.
            while let Some(rest) = self.source.next().await {
                rest?;
            }
            return Ok(None);
        }
        let part = parse_head(&self.head().await?)?;
        self.at = At::Data;
        Ok(Some(part))
    }

    /// The next bytes of the current part; None at its end.
    ///
    /// # Errors
    /// As `next_part`.
    pub async fn next_data(&mut self) -> io::Result<Option<Bytes>> {
        if self.at == At::End {
            return Ok(None);
        }
        self.until_delimiter().await
    }

    /// Bytes before the next delimiter; None once it has been passed.
    async fn until_delimiter(&mut self) -> io::Result<Option<Bytes>> {
        while self.at != At::Delimiter {
            if let Some(index) = memmem::find(&self.buffer, &self.delimiter) {
                let data = self.buffer.split_to(index).freeze();
                self.buffer.advance(self.delimiter.len());
                self.at = At::Delimiter;
                if data.is_empty() {
                    break;
                }
                return Ok(Some(data));
            }
            // The delimiter may have begun in the last bytes.
            let safe = self.buffer.len().saturating_sub(self.delimiter.len() - 1);
            if safe > 0 {
                return Ok(Some(self.buffer.split_to(safe).freeze()));
            }
            self.fill().await?;
        }
        Ok(None)
    }

    /// The lines after a delimiter, up to the empty one.
    async fn head(&mut self) -> io::Result<Bytes> {
        loop {
            if let Some(index) = memmem::find(&self.buffer, b"\r\n\r\n") {
                let head = self.buffer.split_to(index).freeze();
                self.buffer.advance(4);
                return Ok(head);
            }
            if self.buffer.len() > MAX_HEAD {
                return Err(invalid("the headers of a part are too long"));
            }
            self.fill().await?;
        }
    }

    async fn fill(&mut self) -> io::Result<()> {
        match self.source.next().await {
            Some(data) => {
                self.buffer.extend_from_slice(&data?);
                Ok(())
            }
            None => Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "the body ends before its last boundary",
            )),
        }
    }
}

/// The boundary in a content type, if that is `multipart/form-data`.
pub fn boundary(content_type: &str) -> Option<String> {
    let (kind, parameters) = content_type.split_once(';')?;
    if !kind.trim().eq_ignore_ascii_case("multipart/form-data") {
        return None;
    }
    let boundary = parameter(parameters, "boundary")?;
    (1..=MAX_BOUNDARY)
        .contains(&boundary.len())
        .then_some(boundary)
}

fn parse_head(head: &[u8]) -> io::Result<Part> {
    let text = std::str::from_utf8(head)
        .map_err(|_| invalid("the headers of a part are not valid UTF-8"))?;
    let mut lines = text.split("\r\n");
    // The rest of the delimiter's own line.
    if !lines.next().unwrap_or_default().trim().is_empty() {
        return Err(invalid("a boundary is followed by other text"));
    }
    for line in lines {
        let Some((name, value)) = line.split_once(':') else {
            return Err(invalid("a header of a part has no colon"));
        };
        if name.trim().eq_ignore_ascii_case("content-disposition") {
            let (kind, parameters) = value.split_once(';').unwrap_or((value, ""));
            if !kind.trim().eq_ignore_ascii_case("form-data") {
                return Err(invalid("a part is not form data"));
            }
            return Ok(Part {
                name: parameter(parameters, "name").unwrap_or_default(),
                filename: parameter(parameters, "filename"),
            });
        }
    }
    Ok(Part::default())
}

/// The value of a parameter in `; a=b; c="d"`. In quotes a backslash makes a quote or backslash literal; before other
/// characters it is itself, since some clients send Windows paths.
fn parameter(mut text: &str, wanted: &str) -> Option<String> {
    loop {
        text = text.trim_start_matches([' ', '\t', ';']);
        let (name, rest) = text.split_once('=')?;
        let rest = rest.trim_start();
        let (value, after) = match rest.strip_prefix('"') {
            Some(quoted) => unquote(quoted)?,
            None => {
                let end = rest.find(';').unwrap_or(rest.len());
                (rest[..end].trim().to_owned(), &rest[end..])
            }
        };
        if name.trim().eq_ignore_ascii_case(wanted) {
            return Some(value);
        }
        text = after;
    }
}

/// Reads up to the closing quote; gives the value and what follows.
fn unquote(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut characters = text.char_indices().peekable();
    while let Some((index, character)) = characters.next() {
        match character {
            '"' => return Some((value, &text[index + 1..])),
            '\\' => match characters.next_if(|(_, next)| matches!(next, '"' | '\\')) {
                Some((_, escaped)) => value.push(escaped),
                None => value.push('\\'),
            },
            other => value.push(other),
        }
    }
    None
}

fn invalid(message: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::stream;
    use proptest::prelude::*;

    type Found = Vec<(Part, Vec<u8>)>;

    fn split(body: &[u8], chunk: usize) -> io::Result<Found> {
        let chunks: Vec<_> = body
            .chunks(chunk)
            .map(|chunk| Ok(Bytes::copy_from_slice(chunk)))
            .collect();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap();
        runtime.block_on(async {
            let mut parts = Parts::new(stream::iter(chunks), "XX");
            let mut found = Vec::new();
            while let Some(part) = parts.next_part().await? {
                let mut content = Vec::new();
                while let Some(data) = parts.next_data().await? {
                    assert!(!data.is_empty());
                    content.extend_from_slice(&data);
                }
                found.push((part, content));
            }
            Ok(found)
        })
    }

    fn part(name: &str, filename: Option<&str>) -> Part {
        Part {
            name: name.into(),
            filename: filename.map(Into::into),
        }
    }

    #[test]
    fn splits_whatever_the_chunks() {
        let body = b"preamble\r\n--XX\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a/b \\\"c\\\".txt\"\r\n\
            Content-Type: text/plain\r\n\r\nline\r\n--X\r\n\r\n--XX \t\r\ncontent-disposition: form-data; name=other\r\n\r\n\
            \r\n--XX\r\n\r\nno headers\r\n--XX--\r\nepilogue";
        let expected = vec![
            (
                part("file", Some("a/b \"c\".txt")),
                b"line\r\n--X\r\n".to_vec(),
            ),
            (part("other", None), Vec::new()),
            (Part::default(), b"no headers".to_vec()),
        ];
        for chunk in 1..body.len() {
            assert_eq!(split(body, chunk).unwrap(), expected, "chunks of {chunk}");
        }
    }

    #[test]
    fn refuses_broken_bodies() {
        let long = format!("--XX\r\nA: {}", "x".repeat(MAX_HEAD));
        for (body, kind) in [
            (&b""[..], io::ErrorKind::UnexpectedEof),
            (b"no boundary", io::ErrorKind::UnexpectedEof),
            (b"--XX\r\n\r\ndata", io::ErrorKind::UnexpectedEof),
            (b"--XX\r\n\r\ndata\r\n--XX", io::ErrorKind::UnexpectedEof),
            (b"--XXY\r\n\r\ndata\r\n--XX--", io::ErrorKind::InvalidData),
            (
                b"--XX\r\nbroken\r\n\r\n\r\n--XX--",
                io::ErrorKind::InvalidData,
            ),
            (
                b"--XX\r\nContent-Disposition: form-data; name=\"\xff\"\r\n\r\n",
                io::ErrorKind::InvalidData,
            ),
            (long.as_bytes(), io::ErrorKind::InvalidData),
        ] {
            assert_eq!(
                split(body, 7).unwrap_err().kind(),
                kind,
                "{:?}",
                String::from_utf8_lossy(body)
            );
        }
    }

    #[test]
    fn reads_content_types() {
        for (text, expected) in [
            ("multipart/form-data; boundary=abc", Some("abc")),
            (
                "Multipart/Form-Data; charset=x; Boundary=\"a b\"",
                Some("a b"),
            ),
            ("multipart/form-data", None),
            ("multipart/form-data; boundary=", None),
            ("multipart/mixed; boundary=abc", None),
        ] {
            assert_eq!(boundary(text).as_deref(), expected, "{text}");
        }
    }

    #[test]
    fn keeps_backslashes_of_windows_paths() {
        let found = parameter(r#" name="f"; filename="C:\dir\f""#, "filename");
        assert_eq!(found.as_deref(), Some(r"C:\dir\f"));
        assert_eq!(parameter("filename=\"open", "filename"), None);
    }

    proptest! {
        #[test]
        fn content_survives(content in proptest::collection::vec(
            prop_oneof![Just(b'\r'), Just(b'\n'), Just(b'-'), Just(b'X'), any::<u8>()], 0..200), chunk in 1usize..50) {
            prop_assume!(memmem::find(&content, b"\r\n--XX").is_none());
            let mut body = b"--XX\r\nContent-Disposition: form-data; name=\"f\"\r\n\r\n".to_vec();
            body.extend_from_slice(&content);
            body.extend_from_slice(b"\r\n--XX--\r\n");
            prop_assert_eq!(split(&body, chunk).unwrap(), vec![(part("f", None), content)]);
        }
    }
}
