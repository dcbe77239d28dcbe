//! Killed daemons: what was flushed is there, interrupted restacks are undone or finished, failures are told.

mod common;

use std::io::Write;

use common::nbd::{self, Nbd};
use common::{Place, Random};
use serde_json::json;

const SIZE: u64 = 256 << 10;
const SECTORS: usize = (SIZE / 512) as usize;

/// What a sector may hold after a kill: the value that was flushed, or one that was written since.
struct Sector {
    flushed: u64,
    since: Vec<u64>,
}

fn sector(value: u64) -> Vec<u8> {
    value.to_le_bytes().repeat(64)
}

fn value(sector: &[u8]) -> u64 {
    let value = u64::from_le_bytes(sector[..8].try_into().unwrap());
    assert!(
        sector.chunks(8).all(|chunk| chunk == value.to_le_bytes()),
        "a torn sector"
    );
    value
}

#[test]
fn a_killed_daemon_loses_nothing_that_was_flushed() {
    let place = Place::new();
    let daemon = place.start();
    let socket = place.open(&mut daemon.control(), "d", &[], SIZE);
    drop(daemon);
    let mut model: Vec<_> = (0..SECTORS)
        .map(|_| Sector {
            flushed: 0,
            since: Vec::new(),
        })
        .collect();
    let mut next = 1;
    for cycle in 0..120 {
        let mut random = Random(cycle * 7919 + 1);
        let daemon = place.start();
        let mut client = Nbd::connect(&socket).unwrap();
        let content = client.read(0, u32::try_from(SIZE).unwrap()).unwrap();
        for (number, (bytes, sector)) in content.chunks(512).zip(&mut model).enumerate() {
            let found = value(bytes);
            assert!(
                found == sector.flushed || sector.since.contains(&found),
                "cycle {cycle}, sector {number}: {found} instead of {} or {:?}",
                sector.flushed,
                sector.since
            );
            *sector = Sector {
                flushed: found,
                since: Vec::new(),
            };
        }
        // Requests go out in bursts; some bursts are answered, the last one is cut off by the kill.
        let answered = random.below(12);
        for burst in 0..=answered {
            let mut bytes = Vec::new();
            for request in 0..8 {
                let count = 1 + random.below(16);
                let first = random.below(SECTORS as u64 - count);
                let length = u32::try_from(count * 512).unwrap();
                let command = if random.below(6) == 0 {
                    nbd::TRIM
                } else {
                    nbd::WRITE
                };
                bytes.extend_from_slice(&Nbd::request(command, 0, request, first * 512, length));
                for number in first..first + count {
                    let value = if command == nbd::WRITE { next } else { 0 };
                    next += 1;
                    model[number as usize].since.push(value);
                    if command == nbd::WRITE {
                        bytes.extend_from_slice(&sector(value));
                    }
                }
            }
            let _ = client.stream.write_all(&bytes);
            if burst == answered {
                break;
            }
            for _ in 0..8 {
                assert_eq!(client.receive(|_| 0).unwrap().error, 0);
            }
            if random.below(3) == 0 {
                client.flush().unwrap();
                // Requests of one burst may overlap, so that the order decides: ask.
                let content = client.read(0, u32::try_from(SIZE).unwrap()).unwrap();
                for (bytes, sector) in content.chunks(512).zip(&mut model) {
                    *sector = Sector {
                        flushed: value(bytes),
                        since: Vec::new(),
                    };
                }
            }
        }
        daemon.kill();
    }
}

#[test]
fn clients_come_back_to_the_same_socket() {
    let place = Place::new();
    let mut daemon = place.start();
    let mut sockets = Vec::new();
    for number in 0..20u8 {
        let socket = place.open(&mut daemon.control(), &format!("d{number}"), &[], SIZE);
        Nbd::connect(&socket)
            .unwrap()
            .write(0, &[number; 512])
            .unwrap();
        sockets.push(socket);
    }
    for _ in 0..3 {
        daemon.kill();
        daemon = place.start();
        for (number, socket) in sockets.iter().enumerate() {
            assert_eq!(
                Nbd::connect(socket).unwrap().read(0, 512).unwrap(),
                [number as u8; 512]
            );
        }
    }
}

/// Kill a daemon at `point` of a restack or seal, then see that the device is what it was and can be captured again.
#[cfg(debug_assertions)]
fn kill_at(point: &str, method: &str) {
    let place = Place::new();
    let daemon = place.start_with(&[("AENV_BLOCKD_KILL_AT", point)]).unwrap();
    let mut control = daemon.control();
    let socket = place.open(&mut control, "d", &[], SIZE);
    let mut client = Nbd::connect(&socket).unwrap();
    client.write(0, &[1; 8192]).unwrap();
    let params = json!({"device": "d", "layer": place.text("first")});
    assert_eq!(
        control.call(method, params).unwrap_err(),
        "gone",
        "killed at {point}"
    );
    drop(daemon);

    let daemon = place.start();
    let mut control = daemon.control();
    let list = control.call("list", json!({})).unwrap();
    let device = &list["devices"][0];
    assert!(device.get("error").is_none(), "{point}: {device}");
    let finished = place.path("first").exists();
    let lowers = if finished {
        json!([place.text("first")])
    } else {
        json!([])
    };
    assert_eq!(device["lowers"], lowers, "{point}");
    assert_eq!(device["read_only"], finished && method == "seal", "{point}");
    let mut client = Nbd::connect(&socket).unwrap();
    assert_eq!(
        client.read(0, 12288).unwrap(),
        [[1; 4096], [1; 4096], [0; 4096]].concat()
    );
    let names: Vec<_> = std::fs::read_dir(place.path("disks/d"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| !name.starts_with("upper."))
        .collect();
    assert!(names.is_empty(), "{point}: {names:?}");
    if device["read_only"] == true {
        return;
    }
    client.write(4096, &[2; 8192]).unwrap();
    let params = json!({"device": "d", "layer": place.text("second")});
    control.call("restack", params).unwrap();
    client.write(8192, &[3; 4096]).unwrap();
    daemon.kill();
    let _daemon = place.start();
    let mut client = Nbd::connect(&socket).unwrap();
    assert_eq!(
        client.read(0, 12288).unwrap(),
        [[1; 4096], [2; 4096], [3; 4096]].concat()
    );
}

#[cfg(debug_assertions)]
#[test]
fn a_killed_restack_is_undone_or_finished() {
    for point in [
        "restack-intent",
        "restack-fresh",
        "restack-sealed",
        "restack-moved",
        // The first time is the device's own creation.
        "promoting:2",
        "restack-renamed",
    ] {
        kill_at(point, "restack");
    }
}

#[cfg(debug_assertions)]
#[test]
fn a_killed_seal_is_undone_or_finished() {
    for point in [
        "restack-intent",
        "restack-sealed",
        "restack-moved",
        "restack-renamed",
    ] {
        kill_at(point, "seal");
    }
}

#[cfg(debug_assertions)]
#[test]
fn a_killed_open_is_finished_and_a_killed_close_too() {
    let place = Place::new();
    let daemon = place
        .start_with(&[("AENV_BLOCKD_KILL_AT", "promoting")])
        .unwrap();
    let params = place.device("d", &[], SIZE);
    assert_eq!(
        daemon.control().call("open", params.clone()).unwrap_err(),
        "gone"
    );
    drop(daemon);
    let daemon = place
        .start_with(&[("AENV_BLOCKD_KILL_AT", "closing")])
        .unwrap();
    let mut control = daemon.control();
    assert_eq!(control.call("open", params).unwrap()["virtual_size"], SIZE);
    let socket = place.export(&mut control, "d");
    Nbd::connect(&socket).unwrap().write(0, &[1; 512]).unwrap();
    let close = json!({"device": "d", "remove_upper": true});
    assert_eq!(control.call("close", close).unwrap_err(), "gone");
    drop(daemon);
    let daemon = place.start();
    assert_eq!(
        daemon.control().call("list", json!({})).unwrap(),
        json!({"devices": []})
    );
    assert_eq!(std::fs::read_dir(place.path("disks/d")).unwrap().count(), 0);
    assert!(!socket.exists());
}

#[test]
fn a_device_that_cannot_come_back_is_told_and_kept() {
    let place = Place::new();
    let daemon = place.start();
    let mut control = daemon.control();
    let good = place.open(&mut control, "good", &[], SIZE);
    let bad = place.open(&mut control, "bad", &[], SIZE);
    Nbd::connect(&bad).unwrap().write(0, &[1; 512]).unwrap();
    place.open(&mut control, "gone", &[], SIZE);
    daemon.kill();
    std::fs::rename(place.path("disks/bad/upper.data"), place.path("kept")).unwrap();
    std::fs::remove_dir_all(place.path("disks/gone")).unwrap();
    std::fs::write(place.path("state/devices/odd.json"), "{}").unwrap();

    let daemon = place.start();
    let mut control = daemon.control();
    let list = control.call("list", json!({})).unwrap();
    let failed: Vec<_> = list["devices"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|device| device.get("error").is_some())
        .map(|device| device["device"].as_str().unwrap())
        .collect();
    assert_eq!(failed, ["bad", "gone", "odd"]);
    Nbd::connect(&good).unwrap().read(0, 512).unwrap();
    assert!(Nbd::connect(&bad).is_err());
    let mut events = daemon.control();
    events.call("subscribe", json!({})).unwrap();
    for _ in 0..3 {
        let event = events.line().unwrap();
        assert_eq!(event["event"], "failed");
        assert!(failed.contains(&event["device"].as_str().unwrap()));
    }
    assert_eq!(
        control.call("flush", json!({"device": "bad"})).unwrap_err(),
        "conflict"
    );
    let params = place.device("bad", &[], SIZE);
    assert_eq!(
        control.call("open", params.clone()).unwrap_err(),
        "not_found"
    );
    assert!(
        !place.path("disks/bad/upper.data").exists(),
        "what is lost is not made anew"
    );
    // When the reason is gone, opening brings it back, exports and all.
    std::fs::rename(place.path("kept"), place.path("disks/bad/upper.data")).unwrap();
    assert!(control.call("open", params).unwrap().get("error").is_none());
    assert_eq!(Nbd::connect(&bad).unwrap().read(0, 512).unwrap(), [1; 512]);
    for name in ["gone", "odd"] {
        let params = json!({"device": name, "remove_upper": true});
        control.call("close", params).unwrap();
    }
    assert_eq!(
        std::fs::read_dir(place.path("state/devices"))
            .unwrap()
            .count(),
        2
    );
}

#[test]
fn an_upper_is_locked_against_tools() {
    let place = Place::new();
    let daemon = place.start();
    let mut control = daemon.control();
    place.open(&mut control, "d", &[], SIZE);
    let locked = |path: &std::path::Path| {
        let file = std::fs::File::open(path).unwrap();
        rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_err()
    };
    assert!(locked(&place.path("disks/d/upper.data")));
    let params = json!({"device": "d", "layer": place.text("layer")});
    control.call("restack", params).unwrap();
    assert!(locked(&place.path("disks/d/upper.data")));
    assert!(
        !locked(&place.path("layer")),
        "a sealed layer is anyone's to read"
    );
    control.call("close", json!({"device": "d"})).unwrap();
    assert!(!locked(&place.path("disks/d/upper.data")));
}
