//! A full file system: an error to the client, an event, and the device goes on when there is room. Needs root, to mount a
//! small file system.

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;

use common::nbd::Nbd;
use common::Place;
use serde_json::json;

/// A small file system; unmounted when dropped.
struct Mount(PathBuf);

impl Mount {
    fn new(path: &Path) -> Self {
        std::fs::create_dir(path).unwrap();
        let status = Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=8m", "none"])
            .arg(path)
            .status()
            .unwrap();
        assert!(status.success(), "mount");
        Self(path.to_owned())
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[test]
fn a_full_disk_is_enospc_and_an_event_and_passes() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: mounting needs root");
        return;
    }
    let place = Place::new();
    let mount = Mount::new(&place.path("small"));
    let daemon = place.start();
    let mut control = daemon.control();
    let mut events = daemon.control();
    events.call("subscribe", json!({})).unwrap();
    std::fs::write(place.path("small/filler"), vec![1; 4 << 20]).unwrap();
    let mut params = place.device("d", &[], 64 << 20);
    params["upper"]["directory"] = json!(place.text("small/d"));
    control.call("open", params).unwrap();
    let socket = place.export(&mut control, "d");
    let mut client = Nbd::connect(&socket).unwrap();
    let piece = |number: u64| vec![number as u8 + 1; 65536];
    let mut written = 0;
    let error = loop {
        assert!(written < 1024, "the file system never filled");
        match client.write(written * 65536, &piece(written)) {
            Ok(()) => written += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(error.to_string(), "NBD error 28");
    assert!(written > 16);
    assert_eq!(
        events.line().unwrap(),
        json!({"event": "no_space", "device": "d"})
    );
    for number in 0..written {
        assert_eq!(client.read(number * 65536, 65536).unwrap(), piece(number));
    }
    // A capture cannot be made now, and says why. The device goes on.
    let params = json!({"device": "d", "layer": place.text("small/layer")});
    let refused = control.call("restack", params.clone());
    eprintln!("restack: {refused:?}");
    if let Err(code) = &refused {
        assert_eq!(code, "no_space");
    }
    std::fs::remove_file(place.path("small/filler")).unwrap();
    client.write(written * 65536, &piece(written)).unwrap();
    client.flush().unwrap();
    if refused.is_err() {
        control.call("restack", params).unwrap();
    }
    for number in 0..=written {
        assert_eq!(client.read(number * 65536, 65536).unwrap(), piece(number));
    }
    daemon.kill();
    let daemon = place.start();
    let mut client = Nbd::connect(&socket).unwrap();
    for number in 0..=written {
        assert_eq!(client.read(number * 65536, 65536).unwrap(), piece(number));
    }
    drop(client);
    drop(daemon);
    drop(mount);
}

#[test]
fn a_full_disk_of_the_state_refuses_and_leaves_nothing() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: mounting needs root");
        return;
    }
    let place = Place::new();
    let mount = Mount::new(&place.path("state"));
    let daemon = place.start();
    let mut control = daemon.control();
    // Fill it to the last byte.
    let filler = place.path("state/filler");
    assert!(std::fs::write(&filler, vec![1; 9 << 20]).is_err());
    let params = place.device("d", &[], 1 << 20);
    assert_eq!(
        control.call("open", params.clone()).unwrap_err(),
        "no_space"
    );
    assert!(!place.path("disks/d").exists());
    std::fs::remove_file(filler).unwrap();
    control.call("open", params).unwrap();
    drop(daemon);
    drop(mount);
}
