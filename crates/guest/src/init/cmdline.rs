//! The words of the kernel command line that are meant for init (`aenv.*`). Parsing only, no system call.

use std::net::Ipv4Addr;

/// An IPv4 address with the length of its network prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    pub ip: Ipv4Addr,
    pub prefix: u8,
}

impl Address {
    pub fn netmask(self) -> Ipv4Addr {
        Ipv4Addr::from_bits(
            u32::MAX
                .checked_shl(32 - u32::from(self.prefix))
                .unwrap_or(0),
        )
    }
}

/// Which call ends the machine when the guest powers off.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PowerOffCall {
    #[default]
    PowerOff,
    /// For VMMs without a power-off register, where only a reset ends the VMM's process.
    Reset,
}

/// What the command line asks of init.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BootConfig {
    pub root: String,
    pub address: Option<Address>,
    pub gateway: Option<Ipv4Addr>,
    pub dns: Option<Ipv4Addr>,
    pub mtu: Option<u16>,
    pub hostname: Option<String>,
    pub power_off: PowerOffCall,
}

impl Default for BootConfig {
    fn default() -> Self {
        Self {
            root: "/dev/vda".to_owned(),
            address: None,
            gateway: None,
            dns: None,
            mtu: None,
            hostname: None,
            power_off: PowerOffCall::default(),
        }
    }
}

/// Reads a command line. Words that cannot be used keep their default, and are described in the second value.
pub fn parse(words: &str) -> (BootConfig, Vec<String>) {
    let mut config = BootConfig::default();
    let mut problems = Vec::new();
    for word in words.split_ascii_whitespace() {
        let Some(rest) = word.strip_prefix("aenv.") else {
            continue;
        };
        let (key, value) = rest.split_once('=').unwrap_or((rest, ""));
        let understood = match key {
            "root" if value.starts_with("/dev/") => {
                config.root = value.to_owned();
                true
            }
            "ip" => set(&mut config.address, parse_address(value)),
            "gw" => set(&mut config.gateway, value.parse().ok()),
            "dns" => set(&mut config.dns, value.parse().ok()),
            "mtu" => set(
                &mut config.mtu,
                value.parse().ok().filter(|mtu| *mtu >= 576),
            ),
            "hostname" => set(&mut config.hostname, parse_hostname(value)),
            "poweroff" => match value {
                "reset" => {
                    config.power_off = PowerOffCall::Reset;
                    true
                }
                _ => false,
            },
            _ => false,
        };
        if !understood {
            problems.push(format!("kernel command line: cannot use {word:?}"));
        }
    }
    (config, problems)
}

fn set<T>(target: &mut Option<T>, value: Option<T>) -> bool {
    let usable = value.is_some();
    if usable {
        *target = value;
    }
    usable
}

fn parse_address(text: &str) -> Option<Address> {
    let (ip, prefix) = text.split_once('/')?;
    let prefix = prefix.parse().ok().filter(|length| *length <= 32)?;
    Some(Address {
        ip: ip.parse().ok()?,
        prefix,
    })
}

/// A host name of at most 64 bytes (Linux's limit), of the characters that names in `/etc/hosts` may have.
fn parse_hostname(text: &str) -> Option<String> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'.';
    let usable =
        (1..=64).contains(&text.len()) && text.bytes().all(allowed) && !text.starts_with('-');
    usable.then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_words_are_read() {
        let (config, problems) = parse(
            "console=ttyS0 quiet aenv.ip=169.254.0.21/30 aenv.gw=169.254.0.22 aenv.dns=169.254.0.22 \
             aenv.mtu=1400 aenv.hostname=i0abc aenv.root=/dev/vdb aenv.poweroff=reset tsc=reliable\n",
        );
        assert_eq!(problems, Vec::<String>::new());
        assert_eq!(
            config,
            BootConfig {
                root: "/dev/vdb".into(),
                address: Some(Address {
                    ip: Ipv4Addr::new(169, 254, 0, 21),
                    prefix: 30
                }),
                gateway: Some(Ipv4Addr::new(169, 254, 0, 22)),
                dns: Some(Ipv4Addr::new(169, 254, 0, 22)),
                mtu: Some(1400),
                hostname: Some("i0abc".into()),
                power_off: PowerOffCall::Reset,
            }
        );
    }

    #[test]
    fn unusable_words_are_named_and_change_nothing() {
        let line = "aenv.ip=1.2.3.4 aenv.ip=1.2.3.4/33 aenv.gw=x aenv.mtu=70000 aenv.mtu=10 aenv.hostname=a/b \
                    aenv.hostname= aenv.root=vda aenv.poweroff=maybe aenv.unknown aenv.";
        let (config, problems) = parse(line);
        assert_eq!(config, BootConfig::default());
        assert_eq!(problems.len(), line.split_ascii_whitespace().count());
        assert!(problems[0].contains("aenv.ip=1.2.3.4"));
    }

    #[test]
    fn words_of_others_are_left_alone() {
        let (config, problems) = parse("root=/dev/sda1 ip=dhcp xaenv.root=/dev/vdb");
        assert_eq!((config, problems), (BootConfig::default(), Vec::new()));
    }

    #[test]
    fn netmasks_of_all_lengths() {
        let mask = |prefix| {
            Address {
                ip: Ipv4Addr::LOCALHOST,
                prefix,
            }
            .netmask()
        };
        assert_eq!(mask(0), Ipv4Addr::new(0, 0, 0, 0));
        assert_eq!(mask(30), Ipv4Addr::new(255, 255, 255, 252));
        assert_eq!(mask(32), Ipv4Addr::new(255, 255, 255, 255));
    }
}
