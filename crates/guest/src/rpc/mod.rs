//! Connect-RPC: error codes here, framing and codecs in the other files of this folder.

mod error;

pub use error::{Code, RpcError, RpcResult};
