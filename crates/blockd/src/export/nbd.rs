//! NBD on a unix socket.
