//! The program inside every sandbox. As PID 1 it is init; with the argument `agent` it is the agent that speaks the
//! envd protocol. It must run in any root file system, so it needs no file, library or tool of the image.

mod proto;
mod rpc;

fn main() {}
