//! The control protocol: greeting, errors, limits, rights, two daemons, the end.

mod common;

use std::io::Read;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::process::{Command, Stdio};

use common::nbd::Nbd;
use common::{Control, Place};
use serde_json::json;

const SIZE: u64 = 1 << 20;

#[test]
fn errors_have_codes_and_leave_the_connection_usable() {
    let place = Place::new();
    let daemon = place.start();
    let mut control = daemon.control();
    for (method, params, code) in [
        ("nonsense", json!({}), "bad_request"),
        ("list", json!({"more": 1}), "bad_request"),
        (
            "open",
            json!({"device": "../x", "lowers": []}),
            "bad_request",
        ),
        ("open", json!({"device": "x", "lowers": []}), "bad_request"),
        (
            "open",
            json!({"device": "x", "lowers": ["relative"]}),
            "bad_request",
        ),
        (
            "open",
            json!({"device": "x", "lowers": [place.text("missing")]}),
            "not_found",
        ),
        (
            "open",
            json!({"device": "x", "lowers": ["/etc/passwd"]}),
            "bad_layer",
        ),
        (
            "open",
            json!({"device": "x", "lowers": ["/dev"]}),
            "bad_layer",
        ),
        ("open", place.device("x", &[], 0), "bad_request"),
        ("open", place.device("x", &[], 513), "bad_request"),
        ("flush", json!({"device": "x"}), "not_found"),
        ("close", json!({"device": "x"}), "not_found"),
        ("stats", json!({"device": "x"}), "not_found"),
        (
            "restack",
            json!({"device": "x", "layer": "/x", "uuid": "y"}),
            "bad_request",
        ),
        (
            "export",
            json!({"device": "x", "kind": "floppy"}),
            "bad_request",
        ),
        (
            "export",
            json!({"device": "x", "kind": "ublk", "queues": 0}),
            "bad_request",
        ),
    ] {
        assert_eq!(
            control.call(method, params.clone()).unwrap_err(),
            code,
            "{method} {params}"
        );
    }
    assert_eq!(
        control.call("list", json!({})).unwrap(),
        json!({"devices": []})
    );
    assert!(!place.path("disks/x").exists());
    assert_eq!(
        std::fs::read_dir(place.path("state/devices"))
            .unwrap()
            .count(),
        0
    );
}

#[test]
fn nonsense_is_answered_and_hurts_nobody() {
    let place = Place::new();
    let daemon = place.start();
    let mut control = daemon.control();
    for line in [
        "{",
        "[]",
        "3",
        "\"x\"",
        "{\"id\": 1}",
        "\u{0}",
        "{\"id\":[],\"method\":\"list\"}",
    ] {
        control.send(format!("{line}\n").as_bytes()).unwrap();
        assert_eq!(
            control.line().unwrap()["error"]["code"],
            "bad_request",
            "{line}"
        );
    }
    control.send(&[0xff, 0xfe, b'\n']).unwrap();
    assert_eq!(control.line().unwrap()["error"]["code"], "bad_request");
    control
        .send(format!("{}\n", "[".repeat(900_000)).as_bytes())
        .unwrap();
    assert_eq!(control.line().unwrap()["error"]["code"], "bad_request");
    // A line without end is answered and ends the connection.
    let mut long = daemon.control();
    let _ = long.send(&vec![b'x'; (1 << 20) + 1]);
    assert_eq!(long.line().unwrap()["error"]["code"], "bad_request");
    assert!(long.line().is_none());
    // So does half a line.
    let mut half = daemon.control();
    half.send(b"{\"id\": 1, \"method\": \"shut").unwrap();
    drop(half);
    assert!(control.call("list", json!({})).is_ok());
}

#[test]
fn sockets_have_the_rights_that_the_contract_says() {
    let place = Place::new();
    let daemon = place.start();
    let mut control = daemon.control();
    let rights =
        |path: &std::path::Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(rights(&place.path("control.sock")), 0o600);
    let is_root = rustix::process::geteuid().is_root();
    if is_root {
        std::os::unix::fs::chown(place.path("sandbox"), Some(12345), Some(12346)).unwrap();
    }
    let socket = place.open(&mut control, "d", &[], SIZE);
    let metadata = std::fs::metadata(&socket).unwrap();
    assert_eq!(rights(&socket), 0o660);
    let directory = std::fs::metadata(place.path("sandbox")).unwrap();
    assert_eq!(
        (metadata.uid(), metadata.gid()),
        (directory.uid(), directory.gid())
    );
    assert_eq!(rights(&place.path("state/devices/d.json")), 0o600);
    assert_eq!(rights(&place.path("disks/d/upper.data")), 0o600);
    assert_eq!(rights(&place.path("disks/d")), 0o700);
}

#[test]
fn there_is_one_daemon_per_state_directory() {
    let place = Place::new();
    let daemon = place.start();
    let mut control = daemon.control();
    place.open(&mut control, "d", &[], SIZE);
    assert!(place.start_with(&[]).is_none());
    // The first one is still reached, and a daemon of another directory cannot take its upper.
    assert!(control.call("list", json!({})).is_ok());
    let other = Place::new();
    let second = other.start();
    let mut params = place.device("d", &[], SIZE);
    assert_eq!(
        second.control().call("open", params.clone()).unwrap_err(),
        "conflict"
    );
    params["device"] = json!("e");
    assert_eq!(control.call("open", params).unwrap_err(), "conflict");
    assert!(place.path("disks/d/upper.data").exists());
}

#[test]
fn shutdown_and_sigterm_end_in_order_and_all_comes_back() {
    let place = Place::new();
    let mut daemon = place.start();
    let socket = place.open(&mut daemon.control(), "d", &[], SIZE);
    let mut client = Nbd::connect(&socket).unwrap();
    client.write(4096, &[7; 4096]).unwrap();
    assert_eq!(
        daemon.control().call("shutdown", json!({})).unwrap(),
        json!({})
    );
    assert!(daemon.wait().success());
    assert!(client.read(0, 512).is_err(), "the client was disconnected");
    assert!(!place.path("control.sock").exists());

    let mut daemon = place.start();
    let mut client = Nbd::connect(&socket).unwrap();
    assert_eq!(client.read(4096, 4096).unwrap(), [7; 4096]);
    daemon.signal(rustix::process::Signal::TERM);
    assert!(daemon.wait().success());

    let daemon = place.start();
    let mut client = Nbd::connect(&socket).unwrap();
    assert_eq!(client.read(4096, 4096).unwrap(), [7; 4096]);
    let devices = daemon.control().call("list", json!({})).unwrap();
    assert_eq!(devices["devices"].as_array().unwrap().len(), 1);
}

#[test]
fn a_log_that_is_gone_or_full_stops_nothing() {
    let place = Place::new();
    for keep in [false, true] {
        let mut child = Command::new(common::BINARY)
            .arg("serve")
            .arg("--state")
            .arg(place.path("state"))
            .arg("--socket")
            .arg(place.path("control.sock"))
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut log = child.stderr.take().unwrap();
        let mut seen = Vec::new();
        while !String::from_utf8_lossy(&seen).contains("ready") {
            let mut byte = [0];
            log.read_exact(&mut byte).unwrap();
            seen.push(byte[0]);
        }
        let kept = keep.then_some(log);
        let mut control = Control::connect(&place.path("control.sock"));
        // Each failure is a line of the log: more than a pipe holds.
        for _ in 0..2000 {
            assert_eq!(
                control.call("flush", json!({"device": "x"})).unwrap_err(),
                "not_found"
            );
        }
        control.call("shutdown", json!({})).unwrap();
        assert!(child.wait().unwrap().success());
        drop(kept);
    }
}

#[test]
fn several_connections_work_side_by_side() {
    let place = Place::new();
    let daemon = place.start();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (place, daemon) = (&place, &daemon);
            scope.spawn(move || {
                let mut control = daemon.control();
                for round in 0..5 {
                    let name = format!("d{thread}-{round}");
                    let socket = place.open(&mut control, &name, &[], SIZE);
                    Nbd::connect(&socket).unwrap().write(0, &[1; 512]).unwrap();
                    control
                        .call("close", json!({"device": name, "remove_upper": true}))
                        .unwrap();
                    assert!(!socket.exists());
                }
            });
        }
    });
    assert_eq!(
        daemon.control().call("list", json!({})).unwrap(),
        json!({"devices": []})
    );
}

#[test]
fn the_same_device_opened_by_many_at_once_is_made_once() {
    let place = Place::new();
    let daemon = place.start();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let mut control = daemon.control();
                control.call("open", place.device("d", &[], SIZE)).unwrap();
                place.export(&mut control, "d");
            });
        }
    });
    let list = daemon.control().call("list", json!({})).unwrap();
    assert_eq!(list["devices"].as_array().unwrap().len(), 1);
    assert_eq!(list["devices"][0]["exports"].as_array().unwrap().len(), 1);
}
