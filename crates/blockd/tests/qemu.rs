//! QEMU's own client, where it is installed: it negotiates, maps and discards in its own way.

mod common;

use std::path::Path;
use std::process::Command;

use common::Place;

fn run(program: &str, arguments: &[&str]) -> Option<String> {
    let output = match Command::new(program).args(arguments).output() {
        Ok(output) => output,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            eprintln!("skipped: {program} is not installed");
            return None;
        }
        Err(error) => panic!("{program}: {error}"),
    };
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {text} {errors}"
    );
    Some(text)
}

fn url(socket: &Path) -> String {
    format!("nbd+unix:///?socket={}", socket.display())
}

#[test]
fn qemu_writes_discards_and_sees_holes() {
    let place = Place::new();
    let daemon = place.start();
    let socket = place.open(&mut daemon.control(), "disk", &[], 4 << 20);
    let commands = [
        "write -P 5 0 1M",
        "write -f -P 6 64k 4k",
        "discard 128k 64k",
        "write -z 512k 64k",
        "flush",
        "read -P 6 64k 4k",
        "read -P 0 128k 64k",
        "read -P 0 512k 64k",
        "read -P 5 576k 448k",
        "read -P 0 1M 3M",
    ];
    let mut arguments = vec!["-f", "raw", "-d", "unmap", "-t", "writeback"];
    for command in commands {
        arguments.extend(["-c", command]);
    }
    let url = url(&socket);
    arguments.push(&url);
    let Some(text) = run("qemu-io", &arguments) else {
        return;
    };
    assert!(!text.contains("verification failed"), "{text}");
    let Some(map) = run("qemu-img", &["map", "--output=json", &url]) else {
        return;
    };
    let map: serde_json::Value = serde_json::from_str(&map).unwrap();
    let hole = |start: u64, length: u64| {
        map.as_array().unwrap().iter().any(|extent| {
            extent["start"] == start && extent["length"] == length && extent["data"] == false
        })
    };
    assert!(hole(128 << 10, 64 << 10), "{map}");
    assert!(hole(1 << 20, 3 << 20), "{map}");
}

#[test]
fn qemu_copies_a_disk_in_and_out() {
    let place = Place::new();
    let daemon = place.start();
    let socket = place.open(&mut daemon.control(), "disk", &[], 8 << 20);
    let mut random = common::Random(5);
    let content: Vec<u8> = (0..8 << 20)
        .map(|at| {
            if (at >> 18) % 3 == 0 {
                0
            } else {
                random.next() as u8
            }
        })
        .collect();
    std::fs::write(place.path("raw"), &content).unwrap();
    let (raw, back, url) = (place.text("raw"), place.text("back"), url(&socket));
    if run(
        "qemu-img",
        &["convert", "-n", "-f", "raw", "-O", "raw", &raw, &url],
    )
    .is_none()
    {
        return;
    }
    run(
        "qemu-img",
        &["convert", "-f", "raw", "-O", "raw", &url, &back],
    );
    assert!(std::fs::read(back).unwrap() == content);
}
