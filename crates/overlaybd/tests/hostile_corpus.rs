//! The hostile files of `tests/corpus`: each has the outcome that `hostile_support/corpus.rs` tells, in bounded memory and time.
//!
//! The files are checked in, so that other programs can be tried with them; `AENV_WRITE_CORPUS=1 cargo test -p overlaybd
//! --test hostile_corpus` writes them anew. Files that nobody listed (found by a fuzzer) are tried as well.

mod hostile_support;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use overlaybd::Error;

use hostile_support::corpus::{cases, Outcome};
use hostile_support::explore;

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus")
}

fn path(name: &str) -> PathBuf {
    directory().join(name).with_extension("bin")
}

#[test]
fn every_file_has_its_outcome() {
    let mut wrong = Vec::new();
    for case in cases() {
        let result = explore(&case.bytes);
        let is_right = match (&result, case.outcome) {
            (Err(Error::Format(_)), Outcome::Format)
            | (Err(Error::Limit(_)), Outcome::Limit)
            | (Err(Error::Unsupported(_)), Outcome::Unsupported)
            | (Err(Error::Io(_)), Outcome::Unreadable) => true,
            (Ok(view), Outcome::Shows(expected)) => {
                let (offset, bytes) = &view.reads[0];
                *offset == 0
                    && bytes.starts_with(expected)
                    && bytes.is_empty() == expected.is_empty()
            }
            _ => false,
        };
        let found = result.map(|view| view.reads[0].1.iter().copied().take(8).collect::<Vec<_>>());
        if !is_right {
            wrong.push(format!(
                "{}: {:?} expected, found {found:?}",
                case.name, case.outcome
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_files_are_those_that_are_described() {
    let names: BTreeSet<PathBuf> = cases().iter().map(|case| path(case.name)).collect();
    assert_eq!(names.len(), cases().len(), "names are unique");
    for case in cases() {
        let path = path(case.name);
        if std::env::var_os("AENV_WRITE_CORPUS").is_some() {
            std::fs::write(&path, &case.bytes).expect("write");
        }
        let stored =
            std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        assert!(
            stored == case.bytes,
            "{} is not what its description makes",
            path.display()
        );
    }
}

#[test]
fn every_file_of_the_directory_is_harmless() {
    let mut count = 0;
    for entry in std::fs::read_dir(directory()).expect("corpus") {
        let path = entry.expect("entry").path();
        let _ = explore(&std::fs::read(&path).expect("read"));
        count += 1;
    }
    assert!(count >= cases().len());
}
