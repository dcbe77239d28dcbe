//! Changes to the guest as a whole that `/init` asks for: clock, entropy, names, certificates. Blocks; decides nothing.

use std::{
    fs, io,
    io::Write,
    os::fd::AsRawFd,
    path::Path,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use nix::{
    sys::time::TimeSpec,
    time::{clock_settime, ClockId},
    unistd::sethostname,
};

use crate::init::HOSTS_MARK;

/// The clock is set when it is behind by more than this, or ahead by more than one of the others.
const MAX_BEHIND: Duration = Duration::from_millis(50);
/// In the course of a life the clock goes back for gross errors only: what looks ahead may be a slow request.
const MAX_AHEAD: Duration = Duration::from_secs(5);
/// Of a new life, whose clock the host then looks at (500 ms are promised).
const MAX_AHEAD_AT_BIRTH: Duration = Duration::from_millis(400);
/// Names of the file in `/run/e2b` for each variable are the variable with this in front.
const FACT_PREFIX: &str = ".";
/// Where distributions keep the certificates that they trust, below `/etc`.
const BUNDLES: [&str; 3] = [
    "ssl/certs/ca-certificates.crt",
    "pki/tls/certs/ca-bundle.crt",
    "ssl/cert.pem",
];
const SECTION_BEGIN: &str = "# begin: certificates of the sandbox\n";
const SECTION_END: &str = "# end: certificates of the sandbox\n";

/// Sets the wall clock to `target` (since the epoch) if it is off by more than the bounds. Returns whether it was.
pub fn set_clock(target: Duration, new_life: bool) -> io::Result<bool> {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    if !is_off(now, target, new_life) {
        return Ok(false);
    }
    clock_settime(ClockId::CLOCK_REALTIME, TimeSpec::from_duration(target))?;
    Ok(true)
}

fn is_off(now: Duration, target: Duration, new_life: bool) -> bool {
    let max_ahead = if new_life {
        MAX_AHEAD_AT_BIRTH
    } else {
        MAX_AHEAD
    };
    target.saturating_sub(now) > MAX_BEHIND || now.saturating_sub(target) > max_ahead
}

/// Feeds `bytes` to the kernel's random pool, credits them, and reseeds its generators, so that what two copies of one
/// memory read next differs.
pub fn add_entropy(bytes: &[u8]) -> io::Result<()> {
    /// `struct rand_pool_info` with room for what we accept.
    #[repr(C)]
    struct PoolInfo {
        entropy_bits: libc::c_int,
        size: libc::c_int,
        buffer: [u8; MAX_ENTROPY],
    }
    // From <linux/random.h>; libc does not have them.
    const RNDADDENTROPY: libc::c_ulong = 0x4008_5203;
    const RNDRESEEDCRNG: libc::c_ulong = 0x5207;

    if bytes.len() > MAX_ENTROPY {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut info = PoolInfo {
        entropy_bits: (bytes.len() * 8) as libc::c_int,
        size: bytes.len() as libc::c_int,
        buffer: [0; MAX_ENTROPY],
    };
    info.buffer[..bytes.len()].copy_from_slice(bytes);
    let random = fs::OpenOptions::new().write(true).open("/dev/urandom")?;
    // SAFETY: the first call reads `info`, which says its own size; the second takes no memory.
    unsafe {
        if libc::ioctl(random.as_raw_fd(), RNDADDENTROPY as _, &raw const info) == -1
            || libc::ioctl(random.as_raw_fd(), RNDRESEEDCRNG as _) == -1
        {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// More entropy in one request than this is refused; the kernel's pool is smaller.
pub const MAX_ENTROPY: usize = 4096;

/// Whether `name` can be the name of a host.
pub fn is_hostname(name: &str) -> bool {
    (1..=64).contains(&name.len())
        && !name.starts_with(['-', '.'])
        && name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'.')
}

/// Names the guest, now and in `hostname` and `hosts` of `etc`.
pub fn set_hostname(name: &str, etc: &Path) -> io::Result<()> {
    sethostname(name)?;
    write_atomically(&etc.join("hostname"), format!("{name}\n").as_bytes())?;
    let hosts = etc.join("hosts");
    let text = read_or_empty(&hosts)?;
    write_atomically(&hosts, with_own_name(&text, name).as_bytes())
}

/// `hosts` with one line of ours, for 127.0.1.1, the customary address of a machine's own name. It replaces the marked
/// one that init wrote; lines of the image stay.
fn with_own_name(hosts: &str, name: &str) -> String {
    let mut text: String = hosts
        .lines()
        .filter(|line| !line.trim_end().ends_with(HOSTS_MARK))
        .flat_map(|line| [line, "\n"])
        .collect();
    text.push_str(&format!("127.0.1.1\t{name}\t{HOSTS_MARK}\n"));
    text
}

/// Gives the guest a machine id of its own, if its image has one at all. Call it after [`add_entropy`].
pub fn renew_machine_id(etc: &Path) -> io::Result<()> {
    let path = etc.join("machine-id");
    if !path.try_exists()? {
        return Ok(());
    }
    let mut bytes = [0; 16];
    io::Read::read_exact(&mut fs::File::open("/dev/urandom")?, &mut bytes)?;
    // The form of a random UUID (version 4), as machine-id(5) suggests.
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let id: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    write_atomically(&path, format!("{id}\n").as_bytes())
}

/// Writes one file per variable, which programs without our environment read (`/run/e2b/.E2B_SANDBOX_ID`).
pub fn write_facts(run: &Path, facts: &[(&str, &str)]) -> io::Result<()> {
    fs::create_dir_all(run)?;
    for (name, value) in facts {
        write_atomically(&run.join(format!("{FACT_PREFIX}{name}")), value.as_bytes())?;
    }
    Ok(())
}

/// Makes the guest trust `bundle` (PEM), in place of what an earlier call added. Returns how many bundles were changed.
pub fn trust_certificates(bundle: &str, etc: &Path) -> io::Result<usize> {
    let mut changed = 0;
    for name in BUNDLES {
        let path = etc.join(name);
        // Often these are links to each other, and the file behind them is what must change.
        let Ok(path) = path.canonicalize() else {
            continue;
        };
        let text = fs::read_to_string(&path)?;
        let wanted = with_section(&text, bundle);
        if wanted != text {
            write_atomically(&path, wanted.as_bytes())?;
            changed += 1;
        }
    }
    Ok(changed)
}

fn with_section(text: &str, section: &str) -> String {
    let mut kept = text.to_owned();
    if let (Some(begin), Some(end)) = (text.find(SECTION_BEGIN), text.find(SECTION_END)) {
        if begin < end {
            kept = text[..begin].to_owned() + &text[end + SECTION_END.len()..];
        }
    }
    if !kept.is_empty() && !kept.ends_with('\n') {
        kept.push('\n');
    }
    format!("{kept}{SECTION_BEGIN}{}\n{SECTION_END}", section.trim())
}

/// A file's text; empty when it is missing. Bytes that are no UTF-8 are replaced: a comment in an old encoding must not
/// keep a sandbox from starting.
fn read_or_empty(path: &Path) -> io::Result<String> {
    match fs::read(path) {
        Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        Err(error) => Err(error),
    }
}

/// Readers see the old or the new contents. Falls back to writing in place where a file cannot be replaced (a mount).
fn write_atomically(path: &Path, contents: &[u8]) -> io::Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".aenv-new");
    let temporary = path.with_file_name(name);
    let mut file = fs::File::create(&temporary)?;
    file.write_all(contents)?;
    drop(file);
    if fs::rename(&temporary, path).is_err() {
        fs::remove_file(&temporary)?;
        fs::write(path, contents)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_is_set_only_beyond_its_bounds() {
        let now = Duration::from_secs(1_000_000);
        let ms = Duration::from_millis;
        for (target, new_life, off) in [
            (now + ms(50), false, false),
            (now + ms(51), false, true),
            (now - ms(5000), false, false),
            (now - ms(5001), false, true),
            (now + ms(51), true, true),
            (now - ms(400), true, false),
            (now - ms(401), true, true),
        ] {
            assert_eq!(is_off(now, target, new_life), off, "{target:?} {new_life}");
        }
    }

    #[test]
    fn hosts_keeps_other_lines_and_names_us_once() {
        let hosts =
            "127.0.0.1\tlocalhost\n127.0.1.1\tbooted\t# agentenv\n127.0.1.1\tof-the-image\n";
        let once = with_own_name(hosts, "new");
        assert_eq!(
            once,
            "127.0.0.1\tlocalhost\n127.0.1.1\tof-the-image\n127.0.1.1\tnew\t# agentenv\n"
        );
        assert_eq!(with_own_name(&once, "new"), once);
        assert_eq!(with_own_name("", "new"), "127.0.1.1\tnew\t# agentenv\n");
    }

    #[test]
    fn a_file_in_an_old_encoding_is_read() {
        let etc = tempfile::tempdir().unwrap();
        let path = etc.path().join("hosts");
        assert_eq!(read_or_empty(&path).unwrap(), "");
        fs::write(&path, b"# caf\xe9\n10.0.0.1 db\n").unwrap();
        assert!(read_or_empty(&path).unwrap().ends_with("\n10.0.0.1 db\n"));
    }

    #[test]
    fn certificates_replace_those_of_an_earlier_call() {
        let etc = tempfile::tempdir().unwrap();
        let path = etc.path().join(BUNDLES[0]);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, "distribution").unwrap();
        assert_eq!(trust_certificates("one\n", etc.path()).unwrap(), 1);
        assert_eq!(trust_certificates("one", etc.path()).unwrap(), 0);
        assert_eq!(trust_certificates("two", etc.path()).unwrap(), 1);
        let text = fs::read_to_string(&path).unwrap();
        assert!(
            text.starts_with("distribution\n") && text.contains("two") && !text.contains("one")
        );
    }

    #[test]
    fn machine_ids_are_renewed_only_where_there_is_one() {
        let etc = tempfile::tempdir().unwrap();
        let path = etc.path().join("machine-id");
        renew_machine_id(etc.path()).unwrap();
        assert!(!path.exists());
        fs::write(&path, "old\n").unwrap();
        renew_machine_id(etc.path()).unwrap();
        let first = fs::read_to_string(&path).unwrap();
        renew_machine_id(etc.path()).unwrap();
        assert_eq!(first.len(), 33);
        assert_ne!(fs::read_to_string(&path).unwrap(), first);
    }

    #[test]
    fn hostnames_are_checked() {
        assert!(is_hostname("sbx1-a.b"));
        for bad in ["", "-a", "a b", "a\n", "ä", &"x".repeat(65)] {
            assert!(!is_hostname(bad), "{bad:?}");
        }
    }
}
