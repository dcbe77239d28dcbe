//! Devices: what they share, how they change while they are open, and how they end.

mod common;

use std::sync::atomic::{AtomicBool, Ordering};

use common::nbd::Nbd;
use common::{Control, Place, Random};
use serde_json::{json, Value};

const SIZE: u64 = 4 << 20;

/// Write `content` to a new device and make its upper a layer.
fn make_layer(
    place: &Place,
    control: &mut Control,
    layer: &str,
    lowers: &[&str],
    content: &[(u64, Vec<u8>)],
) -> Value {
    let socket = place.open(
        control,
        "maker",
        lowers,
        if lowers.is_empty() { SIZE } else { 0 },
    );
    let mut client = Nbd::connect(&socket).unwrap();
    for (offset, data) in content {
        client.write(*offset, data).unwrap();
    }
    let params = json!({"device": "maker", "layer": place.text(layer)});
    let answer = control.call("seal", params).unwrap();
    // It is read-only now, for clients that were there before as well.
    assert_eq!(
        client.write(0, &[1; 512]).unwrap_err().to_string(),
        "NBD error 1"
    );
    drop(client);
    let list = control.call("list", json!({})).unwrap();
    let maker = list["devices"]
        .as_array()
        .unwrap()
        .iter()
        .find(|device| device["device"] == "maker");
    assert_eq!(maker.unwrap()["read_only"], true);
    control.call("close", json!({"device": "maker"})).unwrap();
    assert_eq!(
        std::fs::read_dir(place.path("disks/maker"))
            .unwrap()
            .count(),
        0
    );
    answer
}

#[test]
fn devices_share_layers_and_write_for_themselves() {
    let place = Place::new();
    let daemon = place.start();
    let mut control = daemon.control();
    let base = make_layer(&place, &mut control, "base", &[], &[(0, vec![1; 8192])]);
    let next = make_layer(
        &place,
        &mut control,
        "next",
        &["base"],
        &[(4096, vec![2; 8192])],
    );
    assert_eq!(next["layer"]["parent_uuid"], base["layer"]["uuid"]);
    assert_eq!(next["layer"]["virtual_size"], SIZE);
    assert_eq!(next["layer"]["data_bytes"], 8192);
    // The same file under another name is the same layer.
    std::fs::hard_link(place.path("base"), place.path("linked")).unwrap();
    let mut clients = Vec::new();
    for number in 0..8u8 {
        let name = format!("d{number}");
        let base = if number % 2 == 0 { "base" } else { "linked" };
        let socket = place.open(&mut control, &name, &[base, "next"], 0);
        let mut client = Nbd::connect(&socket).unwrap();
        client.write(8192, &[10 + number; 4096]).unwrap();
        clients.push(client);
    }
    for (number, client) in clients.iter_mut().enumerate() {
        let expected = [[1; 4096], [2; 4096], [10 + number as u8; 4096], [0; 4096]].concat();
        assert_eq!(client.read(0, 16384).unwrap(), expected);
    }
    let stats = control.call("stats", json!({})).unwrap();
    assert_eq!(stats["daemon"]["open_layers"], 2);
    let layers = stats["layers"].as_array().unwrap();
    assert_eq!(layers.len(), 2);
    assert!(layers.iter().all(|layer| layer["devices"] == 8));
    assert_eq!(stats["devices"]["d3"]["upper_data_bytes"], 4096);
    assert_eq!(stats["devices"]["d3"]["depth"], 3);
    let allocated = stats["devices"]["d3"]["upper_allocated_bytes"]
        .as_u64()
        .unwrap();
    assert!((4096..65536).contains(&allocated), "{allocated}");
    for number in 0..8 {
        let params = json!({"device": format!("d{number}"), "remove_upper": true});
        control.call("close", params).unwrap();
    }
    let stats = control.call("stats", json!({})).unwrap();
    assert_eq!(
        stats["daemon"]["open_layers"], 0,
        "layers are closed with their last device"
    );
}

#[test]
fn a_read_only_device_is_shared_and_closes_with_its_last_user() {
    let place = Place::new();
    let mut daemon = place.start();
    let mut control = daemon.control();
    make_layer(&place, &mut control, "base", &[], &[(0, vec![1; 4096])]);
    let open = json!({"device": "shared", "lowers": [place.text("base")]});
    assert_eq!(control.call("open", open.clone()).unwrap()["opens"], 1);
    assert_eq!(control.call("open", open.clone()).unwrap()["opens"], 2);
    let socket = place.export(&mut control, "shared");
    let mut client = Nbd::connect(&socket).unwrap();
    assert_eq!(client.flags & 2, 2, "READ_ONLY");
    assert!(client.write(0, &[0; 512]).is_err());
    assert!(client.trim(0, 512).is_err());
    assert_eq!(client.read(0, 4096).unwrap(), [1; 4096]);
    control.call("close", json!({"device": "shared"})).unwrap();
    assert_eq!(client.read(0, 4096).unwrap(), [1; 4096]);
    // The count outlives the daemon.
    control.call("shutdown", json!({})).unwrap();
    daemon.wait();
    let daemon = place.start();
    let mut control = daemon.control();
    assert_eq!(control.call("open", open).unwrap()["opens"], 2);
    control.call("close", json!({"device": "shared"})).unwrap();
    control.call("close", json!({"device": "shared"})).unwrap();
    assert_eq!(
        control
            .call("close", json!({"device": "shared"}))
            .unwrap_err(),
        "not_found"
    );
    assert!(!socket.exists());
}

#[test]
fn opening_twice_is_once_and_other_parts_are_a_conflict() {
    let place = Place::new();
    let daemon = place.start();
    let mut control = daemon.control();
    let params = place.device("d", &[], SIZE);
    let first = control.call("open", params.clone()).unwrap();
    assert_eq!(control.call("open", params).unwrap(), first);
    let socket = place.export(&mut control, "d");
    assert_eq!(place.export(&mut control, "d"), socket);
    for other in [
        place.device("d", &[], SIZE * 2),
        json!({"device": "d", "lowers": ["/x"]}),
    ] {
        assert_eq!(control.call("open", other).unwrap_err(), "conflict");
    }
    // A second device at the same socket or in the same directory.
    control.call("open", place.device("e", &[], SIZE)).unwrap();
    let params = json!({"device": "e", "kind": "nbd", "path": socket});
    assert_eq!(control.call("export", params).unwrap_err(), "conflict");
    let mut params = place.device("d", &[], SIZE);
    params["device"] = json!("f");
    assert_eq!(control.call("open", params).unwrap_err(), "conflict");
    Nbd::connect(&socket).unwrap().write(0, &[1; 512]).unwrap();
    // What was closed and not removed is found again.
    control.call("close", json!({"device": "d"})).unwrap();
    let socket = place.open(&mut control, "d", &[], SIZE);
    assert_eq!(
        Nbd::connect(&socket).unwrap().read(0, 512).unwrap(),
        [1; 512]
    );
}

#[test]
fn an_export_is_never_put_over_something_that_is_no_socket() {
    let place = Place::new();
    let daemon = place.start();
    let mut control = daemon.control();
    control.call("open", place.device("d", &[], SIZE)).unwrap();
    let missing = json!({"device": "d", "kind": "nbd", "path": place.text("nowhere/disk.sock")});
    assert_eq!(control.call("export", missing).unwrap_err(), "not_found");
    let params = json!({"device": "d", "path": place.text("nowhere/disk.sock")});
    assert_eq!(control.call("unexport", params).unwrap_err(), "not_found");
    let list = control.call("list", json!({})).unwrap();
    assert_eq!(list["devices"][0]["exports"], json!([]));
}

#[test]
fn devices_grow_and_never_shrink() {
    let place = Place::new();
    let daemon = place.start();
    let mut control = daemon.control();
    let socket = place.open(&mut control, "d", &[], SIZE);
    for (size, code) in [(SIZE - 512, "bad_request"), (SIZE + 1, "bad_request")] {
        let params = json!({"device": "d", "virtual_size": size});
        assert_eq!(control.call("resize", params).unwrap_err(), code);
    }
    let mut client = Nbd::connect(&socket).unwrap();
    assert!(client.read(SIZE, 512).is_err());
    let params = json!({"device": "d", "virtual_size": 2 * SIZE});
    control.call("resize", params).unwrap();
    client.write(2 * SIZE - 512, &[5; 512]).unwrap();
    client.flush().unwrap();
    daemon.kill();
    let daemon = place.start();
    let mut client = Nbd::connect(&socket).unwrap();
    assert_eq!(client.size, 2 * SIZE);
    assert_eq!(client.read(2 * SIZE - 512, 512).unwrap(), [5; 512]);
    drop(daemon);
}

#[test]
fn lowers_are_replaced_under_a_running_client() {
    let place = Place::new();
    let daemon = place.start();
    let mut control = daemon.control();
    make_layer(&place, &mut control, "a", &[], &[(0, vec![1; 8192])]);
    make_layer(&place, &mut control, "b", &["a"], &[(4096, vec![2; 4096])]);
    // What a merge of both holds.
    make_layer(
        &place,
        &mut control,
        "ab",
        &[],
        &[(0, vec![1; 4096]), (4096, vec![2; 4096])],
    );
    make_layer(
        &place,
        &mut control,
        "c",
        &["a", "b"],
        &[(8192, vec![3; 4096])],
    );
    let socket = place.open(&mut control, "d", &["a", "b", "c"], 0);
    let mut client = Nbd::connect(&socket).unwrap();
    client.write(12288, &[4; 4096]).unwrap();
    let expected = [[1; 4096], [2; 4096], [3; 4096], [4; 4096]].concat();
    let replace = |first: u64, count: u64| json!({"device": "d", "first": first, "count": count, "layer": place.text("ab")});
    for (first, count) in [(2, 2), (0, 4), (0, 0), (u64::MAX, 2)] {
        assert_eq!(
            control.call("replace", replace(first, count)).unwrap_err(),
            "bad_request"
        );
    }
    control.call("replace", replace(0, 2)).unwrap();
    assert_eq!(client.read(0, 16384).unwrap(), expected);
    let list = control.call("list", json!({})).unwrap();
    assert_eq!(
        list["devices"][0]["lowers"],
        json!([place.text("ab"), place.text("c")])
    );
    std::fs::remove_file(place.path("a")).unwrap();
    std::fs::remove_file(place.path("b")).unwrap();
    daemon.kill();
    let _daemon = place.start();
    assert_eq!(
        Nbd::connect(&socket).unwrap().read(0, 16384).unwrap(),
        expected
    );
}

#[test]
fn all_modes_of_uppers_keep_what_was_written() {
    let place = Place::new();
    for mode in ["hybrid", "append", "sparse"] {
        let daemon = place.start();
        let mut control = daemon.control();
        let mut params = place.device(mode, &[], SIZE);
        params["upper"]["mode"] = json!(mode);
        control.call("open", params).unwrap();
        let socket = place.export(&mut control, mode);
        let mut client = Nbd::connect(&socket).unwrap();
        client.write(0, &[1; 65536]).unwrap();
        client.write(4096, &[2; 4096]).unwrap();
        client.flush().unwrap();
        daemon.kill();
        let daemon = place.start();
        let mut client = Nbd::connect(&socket).unwrap();
        assert_eq!(
            client.read(0, 12288).unwrap(),
            [[1; 4096], [2; 4096], [1; 4096]].concat()
        );
        let mut control = daemon.control();
        let layer = format!("layer-{mode}");
        let params = json!({"device": mode, "layer": place.text(&layer)});
        if mode == "sparse" {
            let refused = control.call("restack", params.clone());
            assert_eq!(refused.unwrap_err(), "conflict");
            control.call("seal", params).unwrap();
        } else {
            control.call("restack", params).unwrap();
            client.write(0, &[3; 4096]).unwrap();
            let expected = [[3; 4096], [2; 4096]].concat();
            assert_eq!(client.read(0, 8192).unwrap(), expected);
        }
        control
            .call("close", json!({"device": mode, "remove_upper": true}))
            .unwrap();
        control
            .call(
                "open",
                json!({"device": "ro", "lowers": [place.text(&layer)]}),
            )
            .unwrap();
        let socket = place.export(&mut control, "ro");
        assert_eq!(
            Nbd::connect(&socket).unwrap().read(0, 8192).unwrap(),
            [[1; 4096], [2; 4096]].concat()
        );
        control.call("close", json!({"device": "ro"})).unwrap();
    }
    let daemon = place.start();
    let mut params = place.device("s", &["layer-hybrid"], 0);
    params["upper"]["mode"] = json!("sparse");
    assert_eq!(
        daemon.control().call("open", params).unwrap_err(),
        "bad_request"
    );
}

#[test]
fn a_restack_refuses_what_cannot_be_and_the_device_goes_on() {
    let place = Place::new();
    let daemon = place.start();
    let mut control = daemon.control();
    let socket = place.open(&mut control, "d", &[], SIZE);
    let mut client = Nbd::connect(&socket).unwrap();
    client.write(0, &[1; 512]).unwrap();
    std::fs::write(place.path("taken"), "x").unwrap();
    for (layer, code) in [
        (place.text("taken"), "conflict"),
        (place.text("nowhere/layer"), "not_found"),
        ("/proc/layer".into(), "bad_request"),
    ] {
        let params = json!({"device": "d", "layer": layer});
        assert_eq!(control.call("restack", params.clone()).unwrap_err(), code);
        assert_eq!(control.call("seal", params).unwrap_err(), code);
    }
    client.write(512, &[2; 512]).unwrap();
    assert_eq!(client.read(0, 1024).unwrap(), [[1; 512], [2; 512]].concat());
    let uuid = "01234567-89ab-4def-8123-456789abcdef";
    let params = json!({"device": "d", "layer": place.text("first"), "uuid": uuid});
    control.call("restack", params).unwrap();
    let params = json!({"device": "d", "layer": place.text("second")});
    let second = control.call("restack", params).unwrap();
    assert_eq!(second["layer"]["uuid"], uuid);
    assert_eq!(second["layer"]["records"], 0);
    assert_eq!(std::fs::read(place.path("taken")).unwrap(), b"x");
    let mut names: Vec<_> = std::fs::read_dir(place.path("disks/d"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    names.sort();
    assert_eq!(names, ["upper.data", "upper.index"]);
}

#[test]
fn restacks_under_load_lose_nothing() {
    let place = Place::new();
    let daemon = place.start();
    let mut control = daemon.control();
    let socket = place.open(&mut control, "d", &[], SIZE);
    let stop = AtomicBool::new(false);
    let lanes = 4u64;
    let lane_size = SIZE / lanes;
    let mut paused = Vec::new();
    let mut content = Vec::new();
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..lanes)
            .map(|lane| {
                let (socket, stop) = (&socket, &stop);
                scope.spawn(move || {
                    let mut client = Nbd::connect(socket).unwrap();
                    let mut random = Random(lane + 1);
                    let mut model = vec![0u8; lane_size as usize];
                    let mut round = 0u64;
                    while !stop.load(Ordering::Relaxed) {
                        round += 1;
                        let sectors = 1 + random.below(64);
                        let offset = random.below(lane_size / 512 - sectors) * 512;
                        let range = offset as usize..(offset + sectors * 512) as usize;
                        let at = lane * lane_size + offset;
                        match random.below(10) {
                            0 => {
                                client.trim(at, (sectors * 512) as u32).unwrap();
                                model[range].fill(0);
                            }
                            1 => client.flush().unwrap(),
                            2..=5 => {
                                let data = vec![(round % 255) as u8 + 1; (sectors * 512) as usize];
                                client.write(at, &data).unwrap();
                                model[range].copy_from_slice(&data);
                            }
                            _ => {
                                let data = client.read(at, (sectors * 512) as u32).unwrap();
                                assert!(data == model[range], "lane {lane}, round {round}");
                            }
                        }
                    }
                    model
                })
            })
            .collect();
        for number in 0..10 {
            let before = control.call("stats", json!({"device": "d"})).unwrap();
            let before = before["devices"]["d"]["writes"].as_u64().unwrap();
            // Every layer gets something.
            loop {
                let now = control.call("stats", json!({"device": "d"})).unwrap();
                if now["devices"]["d"]["writes"].as_u64().unwrap() > before + 50 {
                    break;
                }
            }
            let params = json!({"device": "d", "layer": place.text(&format!("layer{number}"))});
            let answer = control.call("restack", params).unwrap();
            assert!(answer["layer"]["records"].as_u64().unwrap() > 0);
            paused.push(answer["paused_us"].as_u64().unwrap());
        }
        stop.store(true, Ordering::Relaxed);
        for writer in writers {
            content.extend(writer.join().unwrap());
        }
    });
    eprintln!("paused, us: {paused:?}");
    let whole = u32::try_from(SIZE).unwrap();
    assert!(Nbd::connect(&socket).unwrap().read(0, whole).unwrap() == content);
    daemon.kill();
    let daemon = place.start();
    assert!(Nbd::connect(&socket).unwrap().read(0, whole).unwrap() == content);
    // The layers alone, with what is in the last upper, are the device.
    let mut control = daemon.control();
    control
        .call("seal", json!({"device": "d", "layer": place.text("last")}))
        .unwrap();
    let mut lowers: Vec<_> = (0..10)
        .map(|number| place.text(&format!("layer{number}")))
        .collect();
    lowers.push(place.text("last"));
    control.call("close", json!({"device": "d"})).unwrap();
    control
        .call("open", json!({"device": "r", "lowers": lowers}))
        .unwrap();
    let socket = place.export(&mut control, "r");
    assert!(Nbd::connect(&socket).unwrap().read(0, whole).unwrap() == content);
}
