//! Guesses the content type of a file and writes its `Content-Disposition`. Clients that care know better.

use std::path::Path;

/// Types of common extensions. What is text says so in UTF-8.
const BY_EXTENSION: [(&str, &str); 30] = [
    ("avif", "image/avif"),
    ("bmp", "image/bmp"),
    ("css", "text/css; charset=utf-8"),
    ("csv", "text/csv; charset=utf-8"),
    ("gif", "image/gif"),
    ("gz", "application/gzip"),
    ("htm", "text/html; charset=utf-8"),
    ("html", "text/html; charset=utf-8"),
    ("jpeg", "image/jpeg"),
    ("jpg", "image/jpeg"),
    ("js", "text/javascript; charset=utf-8"),
    ("json", "application/json"),
    ("md", "text/markdown; charset=utf-8"),
    ("mjs", "text/javascript; charset=utf-8"),
    ("mp3", "audio/mpeg"),
    ("mp4", "video/mp4"),
    ("pdf", "application/pdf"),
    ("png", "image/png"),
    ("py", "text/x-python; charset=utf-8"),
    ("sh", "application/x-sh"),
    ("svg", "image/svg+xml"),
    ("tar", "application/x-tar"),
    ("txt", "text/plain; charset=utf-8"),
    ("wasm", "application/wasm"),
    ("wav", "audio/wav"),
    ("webm", "video/webm"),
    ("webp", "image/webp"),
    ("xml", "text/xml; charset=utf-8"),
    ("yaml", "application/yaml"),
    ("zip", "application/zip"),
];

/// The type of the file at `path` that begins with `head`.
pub fn guess(path: &Path, head: &[u8]) -> &'static str {
    let extension = path
        .extension()
        .and_then(|extension| extension.to_str())
        .unwrap_or_default()
        .to_ascii_lowercase();
    if let Some((_, kind)) = BY_EXTENSION.iter().find(|(known, _)| *known == extension) {
        return kind;
    }
    if looks_like_text(head) {
        "text/plain; charset=utf-8"
    } else {
        "application/octet-stream"
    }
}

fn looks_like_text(head: &[u8]) -> bool {
    let valid = match std::str::from_utf8(head) {
        Ok(_) => true,
        // Only cut off in the middle of a character.
        Err(error) => error.error_len().is_none(),
    };
    valid
        && !head
            .iter()
            .any(|byte| matches!(byte, 0..=8 | 0x0e..=0x1a | 0x1c..=0x1f))
}

/// `inline` with the file's name: plain if it is a token, quoted if it is ASCII, else as RFC 8187 says.
pub fn disposition(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$&+-.^_`|~".contains(&byte);
    if !name.is_empty() && name.bytes().all(token) {
        return format!("inline; filename={name}");
    }
    if name.bytes().all(|byte| (0x20..0x7f).contains(&byte)) {
        return format!(
            "inline; filename=\"{}\"",
            name.replace('\\', "\\\\").replace('"', "\\\"")
        );
    }
    let mut encoded = String::new();
    for byte in name.bytes() {
        if token(byte) {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    format!("inline; filename*=utf-8''{encoded}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guesses_by_name_then_by_content() {
        for (name, head, expected) in [
            ("a.PNG", &b"text"[..], "image/png"),
            ("a", b"plain\n", "text/plain; charset=utf-8"),
            ("a", b"cut \xc3", "text/plain; charset=utf-8"),
            ("a", b"\xff\xfe", "application/octet-stream"),
            ("a", b"nul\0", "application/octet-stream"),
            ("a", b"", "text/plain; charset=utf-8"),
        ] {
            assert_eq!(guess(Path::new(name), head), expected, "{name} {head:?}");
        }
    }

    #[test]
    fn names_of_all_kinds() {
        for (name, expected) in [
            ("/x/a.txt", "inline; filename=a.txt"),
            ("/x/a b\".txt", "inline; filename=\"a b\\\".txt\""),
            ("/x/ä\n", "inline; filename*=utf-8''%C3%A4%0A"),
        ] {
            assert_eq!(disposition(Path::new(name)), expected);
        }
    }
}
