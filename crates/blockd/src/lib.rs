//! The block daemon as a library: what `aenv-blockd` runs, open to its tests, examples and benchmarks.
//!
//! docs/blockd.md is the contract. The parts, from below: [`backend`] (what a block device is), [`nbd`] and [`export`] (how
//! machines see it), [`workers`] (threads for slow work). Sandboxes, snapshots and templates mean nothing here.

pub mod backend;
pub mod error;
pub mod export;
pub mod nbd;
pub mod socket;
pub mod workers;
