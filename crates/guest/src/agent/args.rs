//! The agent's command line. Decides nothing beyond what the flags mean.

use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
};

/// Whose requests the private paths (`/init`, `/tunnel`) answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrivatePeer {
    Any,
    Only(IpAddr),
}

/// The parsed flags.
#[derive(Clone, Debug)]
pub struct Args {
    /// Where to listen; port 0 takes a free one, which the log line `listening` names.
    pub listen: SocketAddr,
    pub private_peer: PrivatePeer,
    /// Where to send the datagram that says that we listen.
    pub ready: Option<SocketAddr>,
    /// What `/init` gave us, kept for the time after a restart of the agent.
    pub state_file: PathBuf,
    /// Root of the cgroup v2 tree that we may divide; `None` leaves cgroups alone.
    pub cgroup: Option<PathBuf>,
    /// Where `.E2B_SANDBOX` and its siblings are written.
    pub run_dir: PathBuf,
    /// Where `hostname`, `hosts`, `machine-id` and certificates are written.
    pub etc_dir: PathBuf,
    /// Where programs of the guest learn that a new life has begun.
    pub generation_file: PathBuf,
    /// The interface that leads out of the machine. Without one the connections of a former life stay.
    pub uplink: Option<String>,
}

impl Args {
    /// Reads the words after `agent`. Fails with a text that names the bad word.
    pub fn parse(words: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut args = Self {
            listen: SocketAddr::from(([0, 0, 0, 0], 49983)),
            private_peer: PrivatePeer::Only(IpAddr::from([169, 254, 0, 22])),
            ready: None,
            state_file: "/run/agentenv/state.json".into(),
            cgroup: None,
            run_dir: "/run/e2b".into(),
            etc_dir: "/etc".into(),
            generation_file: "/run/aenv/generation".into(),
            uplink: None,
        };
        let mut words = words;
        while let Some(word) = words.next() {
            let (flag, inline) = match word.split_once('=') {
                Some((flag, value)) => (flag.to_owned(), Some(value.to_owned())),
                None => (word, None),
            };
            let value = inline
                .or_else(|| words.next())
                .ok_or_else(|| format!("{flag} needs a value"))?;
            let bad = |what: &str| format!("{flag} needs {what}, not '{value}'");
            match flag.as_str() {
                "--listen" => {
                    args.listen = value.parse().map_err(|_| bad("an address with port"))?
                }
                "--private-peer" if value == "any" => args.private_peer = PrivatePeer::Any,
                "--private-peer" => {
                    args.private_peer = PrivatePeer::Only(
                        value.parse().map_err(|_| bad("an IP address or 'any'"))?,
                    );
                }
                "--ready" => {
                    args.ready = Some(value.parse().map_err(|_| bad("an address with port"))?)
                }
                "--state-file" => args.state_file = value.into(),
                "--cgroup" => args.cgroup = Some(value.into()),
                "--run-dir" => args.run_dir = value.into(),
                "--etc-dir" => args.etc_dir = value.into(),
                "--generation-file" => args.generation_file = value.into(),
                "--uplink" => args.uplink = Some(value),
                _ => return Err(format!("unknown flag {flag}")),
            }
        }
        Ok(args)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(words: &[&str]) -> Result<Args, String> {
        Args::parse(words.iter().map(|word| (*word).to_owned()))
    }

    #[test]
    fn defaults_are_those_of_a_guest() {
        let args = parse(&[]).unwrap();
        assert_eq!(args.listen.port(), 49983);
        assert_eq!(
            args.private_peer,
            PrivatePeer::Only("169.254.0.22".parse().unwrap())
        );
    }

    #[test]
    fn both_spellings_of_a_flag_work() {
        let args = parse(&["--listen=127.0.0.1:0", "--private-peer", "any"]).unwrap();
        assert_eq!(args.listen, "127.0.0.1:0".parse().unwrap());
        assert_eq!(args.private_peer, PrivatePeer::Any);
    }

    #[test]
    fn bad_words_are_named() {
        assert_eq!(
            parse(&["--listen", "x"]).unwrap_err(),
            "--listen needs an address with port, not 'x'"
        );
        assert_eq!(parse(&["--nope", "1"]).unwrap_err(), "unknown flag --nope");
        assert_eq!(parse(&["--ready"]).unwrap_err(), "--ready needs a value");
    }
}
