//! Loopback and `eth0`, set up with interface ioctls (source: netdevice(7), rtnetlink is not needed for this little).

use std::{
    fs, io, mem,
    net::{Ipv4Addr, UdpSocket},
    os::fd::AsRawFd,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{bail, Context, Result};

use super::{
    cmdline::{Address, BootConfig},
    device::Events,
};

/// The interface that leads out of the machine.
pub const INTERFACE: &str = "eth0";
const INTERFACE_DEADLINE: Duration = Duration::from_secs(20);

pub fn loopback_up() -> Result<()> {
    Control::open()?.bring_up("lo").context("bringing lo up")
}

/// Gives `eth0` its address, MTU and default route, and closes IPv6 on it before it comes up.
pub fn configure(address: Address, config: &BootConfig, events: &mut Events) -> Result<()> {
    wait_for_interface(events)?;
    let control = Control::open()?;
    if let Err(error) = fs::write(
        format!("/proc/sys/net/ipv6/conf/{INTERFACE}/disable_ipv6"),
        "1",
    ) {
        // A kernel without IPv6 has nothing to close.
        if error.kind() != io::ErrorKind::NotFound {
            return Err(error).context("closing IPv6");
        }
    }
    if let Some(mtu) = config.mtu {
        control.set_mtu(INTERFACE, mtu).context("setting the MTU")?;
    }
    control
        .set_address(INTERFACE, address)
        .context("setting the address")?;
    control.bring_up(INTERFACE).context("bringing eth0 up")?;
    if let Some(gateway) = config.gateway {
        control
            .add_default_route(gateway)
            .context("adding the default route")?;
    }
    Ok(())
}

fn wait_for_interface(events: &mut Events) -> Result<()> {
    let deadline = Instant::now() + INTERFACE_DEADLINE;
    let entry = Path::new("/sys/class/net").join(INTERFACE);
    while !entry.exists() {
        if !events.wait("net", deadline)? {
            bail!(
                "{INTERFACE} did not appear within {} s",
                INTERFACE_DEADLINE.as_secs()
            );
        }
    }
    Ok(())
}

/// A socket that interface ioctls go through.
struct Control(UdpSocket);

impl Control {
    fn open() -> io::Result<Self> {
        UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).map(Self)
    }

    fn bring_up(&self, name: &str) -> io::Result<()> {
        let mut request = request(name);
        self.call(libc::SIOCGIFFLAGS, &mut request)?;
        // SAFETY: SIOCGIFFLAGS filled `ifru_flags`, which is the member that SIOCSIFFLAGS reads.
        unsafe {
            request.ifr_ifru.ifru_flags |= (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short
        };
        self.call(libc::SIOCSIFFLAGS, &mut request)
    }

    fn set_mtu(&self, name: &str, mtu: u16) -> io::Result<()> {
        let mut request = request(name);
        request.ifr_ifru.ifru_mtu = mtu.into();
        self.call(libc::SIOCSIFMTU, &mut request)
    }

    fn set_address(&self, name: &str, address: Address) -> io::Result<()> {
        let mut request = request(name);
        request.ifr_ifru.ifru_addr = socket_address(address.ip);
        self.call(libc::SIOCSIFADDR, &mut request)?;
        request.ifr_ifru.ifru_netmask = socket_address(address.netmask());
        self.call(libc::SIOCSIFNETMASK, &mut request)
    }

    fn add_default_route(&self, gateway: Ipv4Addr) -> io::Result<()> {
        // SAFETY: all-zero bytes are a valid `rtentry`: integers, null pointers and AF_UNSPEC addresses.
        let mut route: libc::rtentry = unsafe { mem::zeroed() };
        route.rt_dst = socket_address(Ipv4Addr::UNSPECIFIED);
        route.rt_genmask = socket_address(Ipv4Addr::UNSPECIFIED);
        route.rt_gateway = socket_address(gateway);
        route.rt_flags = libc::RTF_UP | libc::RTF_GATEWAY;
        match self.call(libc::SIOCADDRT, &mut route) {
            Err(error) if error.raw_os_error() == Some(libc::EEXIST) => Ok(()),
            outcome => outcome,
        }
    }

    fn call<T>(&self, request: libc::c_ulong, argument: &mut T) -> io::Result<()> {
        // SAFETY: every caller pairs the request with the structure that netdevice(7) names for it.
        let status = unsafe { libc::ioctl(self.0.as_raw_fd(), request as _, argument as *mut T) };
        if status == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }
}

fn request(name: &str) -> libc::ifreq {
    // SAFETY: all-zero bytes are a valid `ifreq`: a name of NULs and a union of plain data.
    let mut request: libc::ifreq = unsafe { mem::zeroed() };
    for (target, byte) in request.ifr_name[..libc::IFNAMSIZ - 1]
        .iter_mut()
        .zip(name.bytes())
    {
        *target = byte as libc::c_char;
    }
    request
}

fn socket_address(ip: Ipv4Addr) -> libc::sockaddr {
    let address = libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: 0,
        sin_addr: libc::in_addr {
            s_addr: u32::from_ne_bytes(ip.octets()),
        },
        sin_zero: [0; 8],
    };
    // SAFETY: `sockaddr` and `sockaddr_in` have the same size, and both are plain data.
    unsafe { mem::transmute(address) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_in_network_order() {
        let address = socket_address(Ipv4Addr::new(169, 254, 0, 21));
        let bytes: Vec<u8> = address.sa_data[2..6]
            .iter()
            .map(|byte| *byte as u8)
            .collect();
        assert_eq!(address.sa_family, libc::AF_INET as libc::sa_family_t);
        assert_eq!(bytes, [169, 254, 0, 21]);
    }

    #[test]
    fn long_names_are_cut_and_stay_terminated() {
        let request = request("a-name-that-is-too-long");
        assert_eq!(request.ifr_name[libc::IFNAMSIZ - 1], 0);
        assert_eq!(request.ifr_name[0], b'a' as libc::c_char);
    }
}
