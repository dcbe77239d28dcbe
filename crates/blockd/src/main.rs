//! The block daemon.
fn main() {}
