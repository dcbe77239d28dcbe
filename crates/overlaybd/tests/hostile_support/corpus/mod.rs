//! The hostile files of the corpus: how each is made, and what must come of it.

mod layers;
mod tars;
mod zfiles;

/// What must come of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Bytes that contradict the format.
    Format,
    /// Well-formed, but too much of something.
    Limit,
    /// Of a kind that nobody reads.
    Unsupported,
    /// Opens; reading is an error.
    Unreadable,
    /// Opens, and the first sectors of the device have these first bytes.
    Shows(&'static [u8]),
}

pub struct Case {
    /// Name of the file, without ending.
    pub name: &'static str,
    pub bytes: Vec<u8>,
    pub outcome: Outcome,
}

/// Name, bytes, outcome.
type Entry = (&'static str, Vec<u8>, Outcome);

/// All of them.
pub fn cases() -> Vec<Case> {
    let all = layers::all()
        .into_iter()
        .chain(zfiles::all())
        .chain(tars::all());
    all.map(|(name, bytes, outcome)| Case {
        name,
        bytes,
        outcome,
    })
    .collect()
}
