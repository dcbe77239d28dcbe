//! Metadata of files: `X-Metadata-<key>` headers of an upload, kept as extended attributes `user.e2b.<key>`.

use std::{
    collections::{BTreeMap, HashMap},
    ffi::{CStr, CString},
    fs::File,
    io,
    path::Path,
};

use http::{HeaderMap, StatusCode};
use nix::sys::statvfs::fstatvfs;

use super::{
    failure::{bad_request, is_full},
    xattr,
};
use crate::agent::error::HttpError;

const HEADER_PREFIX: &str = "x-metadata-";
const ATTRIBUTE_PREFIX: &str = "user.e2b.";
/// Longest key, in bytes: the kernel allows 255 for the attribute's whole name.
const MAX_KEY: usize = 246;
/// Most bytes of all keys and values of one file together.
const MAX_TOTAL: usize = 4096;

/// Metadata for one file; keys are lower case.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Metadata(pub BTreeMap<String, String>);

impl Metadata {
    /// Reads the metadata headers of an upload. Of a repeated header the first counts.
    ///
    /// # Errors
    /// 400 if a key or value is too long or has characters that are not allowed.
    pub fn from_headers(headers: &HeaderMap) -> Result<Self, HttpError> {
        let mut found = BTreeMap::new();
        let mut total = 0;
        for name in headers.keys() {
            let Some(key) = name.as_str().strip_prefix(HEADER_PREFIX) else {
                continue;
            };
            if key.is_empty() || key.len() > MAX_KEY {
                return Err(bad_request(format!(
                    "metadata key '{key}' must have 1 to {MAX_KEY} characters"
                )));
            }
            let value = headers[name].as_bytes();
            if !value.iter().all(|byte| (0x20..0x7f).contains(byte)) {
                return Err(bad_request(format!(
                    "value of metadata key '{key}' must be printable ASCII"
                )));
            }
            total += key.len() + value.len();
            found.insert(key.to_owned(), String::from_utf8_lossy(value).into_owned());
        }
        if total > MAX_TOTAL {
            return Err(bad_request(format!(
                "metadata has {total} bytes; at most {MAX_TOTAL} are allowed"
            )));
        }
        Ok(Self(found))
    }

    /// Makes this the whole metadata of `file`. Attributes that already have their value are not touched.
    ///
    /// # Errors
    /// 400 if the file system cannot hold it, 507 if the disk is full.
    pub fn replace(&self, file: &File) -> Result<(), HttpError> {
        let present = match xattr::list_fd(file) {
            Ok(names) => names,
            Err(error) if unsupported(&error) && self.0.is_empty() => return Ok(()),
            Err(error) => return Err(cannot_store(file, &error)),
        };
        for name in present {
            let Some(key) = key_of(&name) else { continue };
            if !self.0.contains_key(&key) {
                match xattr::remove_fd(file, &name) {
                    Err(error) if error.raw_os_error() != Some(libc::ENODATA) => {
                        return Err(cannot_store(file, &error));
                    }
                    _ => {}
                }
            }
        }
        for (key, value) in &self.0 {
            let name = CString::new(format!("{ATTRIBUTE_PREFIX}{key}"))
                .map_err(|_| bad_request("metadata key contains a NUL byte"))?;
            let same = xattr::get_fd(file, &name).is_ok_and(|old| old == value.as_bytes());
            if !same {
                xattr::set_fd(file, &name, value.as_bytes())
                    .map_err(|error| cannot_store(file, &error))?;
            }
        }
        Ok(())
    }
}

/// The metadata of what is at `path` (through symlinks). Empty where there is none or it cannot be read.
pub fn read(path: &Path) -> HashMap<String, String> {
    let mut found = HashMap::new();
    // A file that vanished or a file system without attributes has no metadata; the entry itself is still wanted.
    for name in xattr::list(path).unwrap_or_default() {
        let Some(key) = key_of(&name) else { continue };
        if let Ok(value) = xattr::get(path, &name) {
            found.insert(key, String::from_utf8_lossy(&value).into_owned());
        }
    }
    found
}

fn key_of(name: &CStr) -> Option<String> {
    Some(
        name.to_str()
            .ok()?
            .strip_prefix(ATTRIBUTE_PREFIX)?
            .to_owned(),
    )
}

fn unsupported(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS))
}

/// ENOSPC can mean a full disk or that this file's attributes exceed what the file system keeps per file.
fn cannot_store(file: &File, error: &io::Error) -> HttpError {
    let disk_full = is_full(error) && fstatvfs(file).is_ok_and(|fs| fs.blocks_available() == 0);
    if disk_full || error.raw_os_error() == Some(libc::EDQUOT) {
        return HttpError::new(
            StatusCode::INSUFFICIENT_STORAGE,
            format!("no space for metadata: {error}"),
        );
    }
    bad_request(format!(
        "cannot store metadata on this file system: {error}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::{HeaderName, HeaderValue};

    fn headers(pairs: &[(&str, &[u8])]) -> HeaderMap {
        pairs
            .iter()
            .map(|(name, value)| {
                (
                    HeaderName::from_bytes(name.as_bytes()).unwrap(),
                    HeaderValue::from_bytes(value).unwrap(),
                )
            })
            .collect()
    }

    #[test]
    fn reads_headers_with_lower_case_keys() {
        let got =
            Metadata::from_headers(&headers(&[("X-Metadata-Foo", b"bar baz"), ("Other", b"x")]))
                .unwrap();
        assert_eq!(got.0, BTreeMap::from([("foo".into(), "bar baz".into())]));
    }

    #[test]
    fn refuses_what_breaks_the_limits() {
        let long_key = format!("x-metadata-{}", "k".repeat(MAX_KEY + 1));
        let long_value = vec![b'v'; MAX_TOTAL];
        for bad in [
            headers(&[("x-metadata-", b"v")]),
            headers(&[("x-metadata-a", b"tab\there")]),
            headers(&[("x-metadata-a", "ä".as_bytes())]),
            headers(&[(&long_key, b"v")]),
            headers(&[("x-metadata-a", &long_value)]),
        ] {
            assert_eq!(Metadata::from_headers(&bad).unwrap_err().status, 400);
        }
        let longest_key = format!("x-metadata-{}", "k".repeat(MAX_KEY));
        assert!(Metadata::from_headers(&headers(&[(&longest_key, b"v")])).is_ok());
        assert!(Metadata::from_headers(&headers(&[("x-metadata-a", &long_value[1..])])).is_ok());
    }

    #[test]
    fn replaces_everything() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let other = c"user.other";
        if xattr::set_fd(file.as_file(), other, b"1").is_err() {
            panic!("the temporary directory must support user attributes");
        }
        let set = |pairs: &[(&str, &[u8])]| {
            Metadata::from_headers(&headers(pairs))
                .unwrap()
                .replace(file.as_file())
                .unwrap();
            read(file.path())
        };
        let both = set(&[("x-metadata-a", b"1"), ("x-metadata-b", b"2")]);
        assert_eq!(both.len(), 2);
        assert_eq!(
            set(&[("x-metadata-a", b"3")]),
            HashMap::from([("a".into(), "3".into())])
        );
        assert!(set(&[]).is_empty());
        assert_eq!(xattr::get(file.path(), other).unwrap(), b"1");
    }
}
