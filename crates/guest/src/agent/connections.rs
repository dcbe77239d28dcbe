//! Ends the TCP connections of a former life: their other ends are with the machine that this one is a copy of, or have
//! long given up. Connections inside of this machine go on, since both their ends are in the copy. Decides which; how
//! is in `sock_diag` and, for kernels that cannot, in `descriptors`.
//!
//! Outside is whatever is reached through the uplink. UDP has no connections: a program there must cope with silence.

use std::{
    collections::HashSet,
    fs::{self, File},
    io,
    net::{IpAddr, SocketAddr},
    os::unix::fs::MetadataExt,
    thread,
};

use nix::{
    ifaddrs::getifaddrs,
    sched::{setns, CloneFlags},
    sys::socket::SockaddrStorage,
};

use super::{descriptors, sock_diag};

/// Closes every TCP connection with a peer outside of this machine but the one with `keep`, in all network
/// namespaces of the machine. Returns how many. Their owners find them broken off.
pub fn close_stale(uplink: &str, keep: SocketAddr) -> io::Result<usize> {
    let inside = Inside::find(uplink)?;
    let keep = canonical(keep);
    let stale = |peer: SocketAddr| {
        let peer = canonical(peer);
        peer != keep && !inside.has(peer.ip())
    };
    match close_everywhere(&stale) {
        Err(error) if error.kind() == io::ErrorKind::Unsupported => descriptors::shut_down(&stale),
        outcome => outcome,
    }
}

fn close_everywhere(stale: &(dyn Fn(SocketAddr) -> bool + Sync)) -> io::Result<usize> {
    let mut closed = sock_diag::destroy(stale)?;
    for namespace in other_namespaces()? {
        // A thread of its own, since threads of the runtime must stay where they are.
        closed += thread::scope(|scope| {
            let inside_of_it = scope.spawn(|| {
                setns(&namespace, CloneFlags::CLONE_NEWNET)?;
                sock_diag::destroy(stale)
            });
            inside_of_it
                .join()
                .unwrap_or_else(|_| Err(io::Error::other("the thread failed")))
        })?;
    }
    Ok(closed)
}

/// The network namespaces of all processes, but ours.
fn other_namespaces() -> io::Result<Vec<File>> {
    let identity = |path: &str| fs::metadata(path).map(|found| (found.dev(), found.ino()));
    let mut seen = HashSet::from([identity("/proc/self/ns/net")?]);
    let mut namespaces = Vec::new();
    for pid in descriptors::processes()? {
        let path = format!("/proc/{pid}/ns/net");
        // Processes end at any time, and kernel threads that do have none.
        if identity(&path).is_ok_and(|found| seen.insert(found)) {
            namespaces.extend(File::open(&path).ok());
        }
    }
    Ok(namespaces)
}

fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// The addresses that lie in this machine: its own, and those of networks that do not lead out.
struct Inside {
    own: HashSet<IpAddr>,
    networks: Vec<(IpAddr, IpAddr)>,
}

impl Inside {
    /// Looks at the interfaces of our namespace.
    fn find(uplink: &str) -> io::Result<Self> {
        let mut inside = Self {
            own: HashSet::new(),
            networks: Vec::new(),
        };
        for interface in getifaddrs()? {
            let Some(address) = interface.address.as_ref().and_then(ip) else {
                continue;
            };
            inside.own.insert(address);
            if interface.interface_name != uplink {
                let mask = interface.netmask.as_ref().and_then(ip);
                inside.networks.extend(mask.map(|mask| (address, mask)));
            }
        }
        Ok(inside)
    }

    fn has(&self, address: IpAddr) -> bool {
        address.is_loopback()
            || self.own.contains(&address)
            || self
                .networks
                .iter()
                .any(|(network, mask)| same_network(address, *network, *mask))
    }
}

fn same_network(address: IpAddr, network: IpAddr, mask: IpAddr) -> bool {
    match (address, network, mask) {
        (IpAddr::V4(address), IpAddr::V4(network), IpAddr::V4(mask)) => {
            (address.to_bits() ^ network.to_bits()) & mask.to_bits() == 0
        }
        (IpAddr::V6(address), IpAddr::V6(network), IpAddr::V6(mask)) => {
            (address.to_bits() ^ network.to_bits()) & mask.to_bits() == 0
        }
        _ => false,
    }
}

fn ip(address: &SockaddrStorage) -> Option<IpAddr> {
    let v4 = address.as_sockaddr_in().map(|found| IpAddr::V4(found.ip()));
    v4.or_else(|| {
        address
            .as_sockaddr_in6()
            .map(|found| IpAddr::V6(found.ip()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inside_is_what_the_uplink_does_not_reach() {
        let address = |text: &str| text.parse::<IpAddr>().unwrap();
        let inside = Inside {
            own: HashSet::from(["169.254.0.21", "172.17.0.1", "fd00::1"].map(address)),
            networks: vec![
                (address("172.17.0.1"), address("255.255.0.0")),
                (address("fd00::1"), address("ffff:ffff::")),
            ],
        };
        for (peer, expected) in [
            ("127.9.9.9", true),
            ("::1", true),
            ("169.254.0.21", true),
            ("169.254.0.22", false),
            ("172.17.200.3", true),
            ("172.18.0.1", false),
            ("fd00:0:1::2", true),
            ("fd01::2", false),
            ("1.1.1.1", false),
        ] {
            assert_eq!(inside.has(address(peer)), expected, "{peer}");
        }
    }
}
