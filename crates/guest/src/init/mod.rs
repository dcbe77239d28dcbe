//! PID 1 of every guest: from the kernel's hand-over to a supervised agent.
//!
//! Runs single-threaded on plain system calls and needs no file of the image. It must not know the envd protocol, must
//! never exit (the kernel would panic), and must never wait for anything but an event.

mod button;
mod cmdline;
mod device;
mod files;
mod log;
mod modules;
mod mounts;
mod net;
mod power;
mod supervise;

use std::{
    convert::Infallible,
    panic::{self, AssertUnwindSafe},
    path::Path,
};

use anyhow::{Context, Result};

use cmdline::BootConfig;
pub use files::HOSTS_MARK;
use supervise::{Signals, Supervisor};

/// How long the root disk may take to appear; an emulated host under load probes slowly.
const DEVICE_DEADLINE_S: u64 = 60;

/// Boots the guest and supervises the agent until the machine ends.
pub fn main() -> ! {
    panic::set_hook(Box::new(|info| {
        log::error(&format!("init panicked: {info}"))
    }));
    let error = match panic::catch_unwind(boot) {
        Ok(Ok(never)) => match never {},
        Ok(Err(error)) => format!("{error:#}"),
        Err(_) => "init panicked while booting".to_owned(),
    };
    log::error(&format!("this machine cannot start: {error}"));
    power::end(power::Ending::PowerOff, cmdline::PowerOffCall::PowerOff)
}

fn boot() -> Result<Infallible> {
    let mut signals = Signals::block().context("blocking signals")?;
    mounts::mount_early()?;
    log::open_console();
    let binary = supervise::open_own_binary().context("opening the guest binary")?;
    let words =
        std::fs::read_to_string("/proc/cmdline").context("reading the kernel command line")?;
    let (config, problems) = cmdline::parse(&words);
    for problem in problems {
        log::warn(&problem);
    }

    let mut events = device::Events::open().context("opening the kernel's event socket")?;
    modules::load_all(Path::new("/etc/aenv/modules"));
    mounts::mount_root(&config.root, &mut events, DEVICE_DEADLINE_S)?;
    modules::remove_files();
    mounts::switch_root().context("moving into the root file system")?;
    mounts::mount_late();
    prepare(&config, &mut events);
    drop(events);
    signals.watch_button(button::PowerButton::find(
        Path::new("/sys/class/input"),
        Path::new("/dev/input"),
    ));

    let mut supervisor = Supervisor::new(binary, signals, &config);
    log::info("init done, starting the agent");
    loop {
        // A fault in the supervisor's own code must not end PID 1; its state lives outside of the closure.
        if panic::catch_unwind(AssertUnwindSafe(|| -> Infallible { supervisor.run() })).is_err() {
            supervisor.pause_after_fault();
        }
    }
}

/// Everything that a guest can live without: each failure is logged and the next step runs.
fn prepare(config: &BootConfig, events: &mut device::Events) {
    let root = Path::new("/");
    attempt("system parameters", || {
        files::set_system_parameters(Path::new("/proc/sys"))
    });
    if let Some(hostname) = &config.hostname {
        attempt("hostname", || Ok(nix::unistd::sethostname(hostname)?));
        attempt("/etc/hostname", || files::write_hostname(root, hostname));
    }
    attempt("/etc/hosts", || {
        files::write_hosts(root, config.hostname.as_deref())
    });
    if let Some(dns) = config.dns {
        attempt("/etc/resolv.conf", || files::write_resolv_conf(root, dns));
    }
    attempt("/etc/machine-id", || {
        files::ensure_machine_id(root, config.hostname.as_deref().unwrap_or_default())
    });
    attempt("loopback", net::loopback_up);
    if let Some(address) = config.address {
        attempt("network", || net::configure(address, config, events));
    }
}

fn attempt(what: &str, step: impl FnOnce() -> Result<()>) {
    if let Err(error) = step() {
        log::warn(&format!("{what}: {error:#}"));
    }
}
