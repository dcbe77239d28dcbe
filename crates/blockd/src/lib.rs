//! The block daemon as a library: what `aenv-blockd` runs, open to its tests, examples and benchmarks.
//!
//! docs/blockd.md is the contract. The parts, from below: [`backend`] (what a block device is), [`nbd`] and [`export`] (how
//! machines see it), [`workers`] (threads for slow work); [`layers`], [`device`] and [`state`] (what a device is made of);
//! [`daemon`] (all devices), [`protocol`] (its clients). Sandboxes, snapshots and templates mean nothing here.

pub mod backend;
pub mod daemon;
pub mod device;
pub mod error;
pub mod events;
pub mod export;
mod fail_point;
pub mod layers;
pub mod log;
pub mod nbd;
pub mod protocol;
pub mod socket;
pub mod state;
pub mod workers;
