//! The NBD server as clients see it: negotiation, commands, and clients that misbehave.

mod common;

use std::io::{Read, Write};

use common::nbd::{self, Nbd};
use common::{Daemon, Place};
use serde_json::json;

const SIZE: u64 = 8 << 20;

fn device() -> (Place, Daemon, std::path::PathBuf) {
    let place = Place::new();
    let daemon = place.start();
    let socket = place.open(&mut daemon.control(), "disk", &[], SIZE);
    (place, daemon, socket)
}

#[test]
fn negotiation_tells_what_the_export_is() {
    let (_place, _daemon, socket) = device();
    let mut client = Nbd::greet(&socket).unwrap();
    // LIST, and options that are unknown or malformed.
    assert_eq!(
        client.option(3, &[]).unwrap()[0],
        (2, b"\0\0\0\x04disk".to_vec())
    );
    assert_eq!(client.option(3, &[1]).unwrap()[0].0, 0x8000_0003);
    assert_eq!(client.option(5, &[]).unwrap()[0].0, 0x8000_0001);
    assert_eq!(client.option(999, b"abc").unwrap()[0].0, 0x8000_0001);
    assert_eq!(client.option(7, &[0, 0, 0, 9]).unwrap()[0].0, 0x8000_0003);
    // Contexts need structured replies.
    assert_eq!(client.option(10, &[0; 8]).unwrap()[0].0, 0x8000_0003);
    // INFO for another name, then for ours with all items.
    assert_eq!(
        client.option(6, b"\0\0\0\x05other\0\0").unwrap()[0].0,
        0x8000_0006
    );
    let items = client
        .option(6, b"\0\0\0\x04disk\0\x02\0\x01\0\x03")
        .unwrap();
    let sizes = [512u32, 4096, 32 << 20].map(u32::to_be_bytes).concat();
    assert!(
        items.contains(&(3, [vec![0, 3], sizes].concat())),
        "{items:?}"
    );
    assert!(items.contains(&(3, b"\0\x01disk".to_vec())));
    client.go("disk").unwrap();
    assert_eq!(client.size, SIZE);
    // HAS_FLAGS, FLUSH, FUA, TRIM, WRITE_ZEROES, CAN_MULTI_CONN.
    assert_eq!(client.flags, 0b1_0110_1101);
    client.write(0, &[1; 512]).unwrap();

    let mut client = Nbd::greet(&socket).unwrap();
    assert_eq!(client.option(2, &[]).unwrap(), vec![(1, vec![])]);
    assert_eq!(
        client.stream.read(&mut [0]).unwrap(),
        0,
        "ABORT ends the connection"
    );
}

#[test]
fn the_oldest_way_to_name_an_export_works() {
    let (_place, _daemon, socket) = device();
    let mut client = Nbd::greet(&socket).unwrap();
    let mut bytes = nbd::OPTION_MAGIC.to_be_bytes().to_vec();
    bytes.extend_from_slice(b"\0\0\0\x01\0\0\0\0");
    client.stream.write_all(&bytes).unwrap();
    let mut answer = [0; 10];
    client.stream.read_exact(&mut answer).unwrap();
    assert_eq!(answer[..8], SIZE.to_be_bytes());
    client.write(512, &[3; 512]).unwrap();
    assert_eq!(client.read(512, 512).unwrap(), [3; 512]);
}

#[test]
fn commands_do_what_they_say() {
    let (_place, _daemon, socket) = device();
    for structured in [false, true] {
        let mut client = if structured {
            Nbd::connect_structured(&socket).unwrap()
        } else {
            Nbd::connect(&socket).unwrap()
        };
        client.write(0, &[1; 65536]).unwrap();
        assert_eq!(client.read(0, 65536).unwrap(), [1; 65536]);
        client.trim(4096, 4096).unwrap();
        assert_eq!(
            client.read(4096, 8192).unwrap(),
            [[0; 4096], [1; 4096]].concat()
        );
        assert_eq!(
            client
                .call(nbd::WRITE, nbd::FUA, 4096, 512, &[2; 512])
                .unwrap()
                .error,
            0
        );
        assert_eq!(
            client.read(4096, 1024).unwrap(),
            [[2; 512], [0; 512]].concat()
        );
        assert_eq!(
            client
                .call(nbd::WRITE_ZEROES, nbd::FUA, 4096, 512, &[])
                .unwrap()
                .error,
            0
        );
        assert_eq!(client.read(4096, 512).unwrap(), [0; 512]);
        client.flush().unwrap();
        // Larger than any buffer, to and fro.
        let large: Vec<u8> = (0..3 << 20).map(|at: u32| (at >> 9) as u8).collect();
        client.write(1 << 20, &large).unwrap();
        assert_eq!(client.read(1 << 20, 3 << 20).unwrap(), large);
        client.trim(0, u32::try_from(SIZE).unwrap()).unwrap();
        assert_eq!(
            client.read(0, u32::try_from(SIZE).unwrap()).unwrap(),
            vec![0; 8 << 20]
        );
    }
}

#[test]
fn block_status_shows_data_and_holes() {
    let (_place, daemon, socket) = device();
    let mut client = Nbd::connect_structured(&socket).unwrap();
    assert_eq!(client.status(0, 1 << 20).unwrap(), vec![(1 << 20, 3)]);
    client.write(4096, &[1; 8192]).unwrap();
    client.trim(8192, 4096).unwrap();
    let rest = (1 << 20) - 8192;
    assert_eq!(
        client.status(0, 1 << 20).unwrap(),
        vec![(4096, 3), (4096, 0), (rest, 3)]
    );
    let first = client
        .call(nbd::BLOCK_STATUS, nbd::ONE_EXTENT, 0, 1 << 20, &[])
        .unwrap();
    assert_eq!(first.extents, vec![(4096, 3)]);
    // Zeros that must not be a hole are stored.
    client
        .call(nbd::WRITE_ZEROES, nbd::NO_HOLE, 65536, 4096, &[])
        .unwrap();
    assert_eq!(
        client.status(65536, 8192).unwrap(),
        vec![(4096, 0), (4096, 3)]
    );
    // Without agreement there is none.
    let mut plain = Nbd::connect(&socket).unwrap();
    assert_eq!(
        plain
            .call(nbd::BLOCK_STATUS, 0, 0, 4096, &[])
            .unwrap()
            .error,
        22
    );
    drop(daemon);
}

#[test]
fn requests_that_cannot_be_are_errors_and_the_connection_goes_on() {
    let (_place, _daemon, socket) = device();
    for structured in [false, true] {
        let mut client = if structured {
            Nbd::connect_structured(&socket).unwrap()
        } else {
            Nbd::connect(&socket).unwrap()
        };
        for (command, flags, offset, length, error) in [
            (nbd::READ, 0, 1, 512, 22),
            (nbd::READ, 0, 0, 511, 22),
            (nbd::READ, 0, SIZE, 512, 22),
            (nbd::READ, 0, u64::MAX - 511, 512, 22),
            (nbd::READ, 0, 0, 0xffff_fe00, 22),
            (nbd::READ, 0x80, 0, 512, 22),
            (nbd::TRIM, 0, SIZE - 512, 1024, 28),
            (nbd::TRIM, nbd::NO_HOLE, 0, 1024, 22),
            (nbd::WRITE_ZEROES, 0, 0, 0xffff_fe00, 28),
            (nbd::FLUSH, nbd::ONE_EXTENT, 0, 0, 22),
            (77, 0, 0, 0, 22),
        ] {
            let reply = client.call(command, flags, offset, length, &[]).unwrap();
            assert_eq!(reply.error, error, "{command} {flags} {offset} {length}");
        }
        let reply = client
            .call(nbd::WRITE, 0, SIZE - 512, 1024, &[1; 1024])
            .unwrap();
        assert_eq!(reply.error, 28);
        let reply = client.call(nbd::WRITE, 0, 100, 1024, &[1; 1024]).unwrap();
        assert_eq!(reply.error, 22);
        assert_eq!(client.read(SIZE - 512, 512).unwrap(), [0; 512]);
    }
}

#[test]
fn clients_that_break_the_protocol_are_disconnected_and_hurt_nobody() {
    let (_place, daemon, socket) = device();
    let mut good = Nbd::connect(&socket).unwrap();
    good.write(0, &[9; 4096]).unwrap();
    let ended = |mut client: Nbd| {
        let mut rest = Vec::new();
        let _ = client.stream.read_to_end(&mut rest);
    };
    let mut client = Nbd::connect(&socket).unwrap();
    client.stream.write_all(&[0xaa; 28]).unwrap();
    ended(client);
    // A write whose length no client can mean.
    let mut client = Nbd::connect(&socket).unwrap();
    client
        .stream
        .write_all(&Nbd::request(nbd::WRITE, 0, 1, 0, u32::MAX))
        .unwrap();
    ended(client);
    // Half a header, half a payload, half a handshake.
    for half in [3, 28, 28 + 700] {
        let mut client = Nbd::connect(&socket).unwrap();
        let mut bytes = Nbd::request(nbd::WRITE, 0, 1, 0, 4096);
        bytes.extend_from_slice(&[1; 4096]);
        client.stream.write_all(&bytes[..half]).unwrap();
        drop(client);
    }
    let mut client = Nbd::greet(&socket).unwrap();
    client
        .stream
        .write_all(&nbd::OPTION_MAGIC.to_be_bytes())
        .unwrap();
    client
        .stream
        .write_all(&[0, 0, 0, 7, 0xff, 0xff, 0xff, 0xff])
        .unwrap();
    ended(client);
    let mut client = Nbd::greet(&socket).unwrap();
    client.stream.write_all(&[0x55; 16]).unwrap();
    ended(client);
    assert_eq!(good.read(0, 4096).unwrap(), [9; 4096]);
    assert!(daemon.control().call("list", json!({})).is_ok());
}

#[test]
fn a_client_that_does_not_read_costs_bounded_memory_and_nobody_elses_time() {
    let (place, daemon, socket) = device();
    let mut writer = Nbd::connect(&socket).unwrap();
    let piece: Vec<u8> = (0..1 << 20).map(|at: u32| (at >> 9) as u8).collect();
    for at in 0..8 {
        writer.write(at << 20, &piece).unwrap();
    }
    let other = place.open(&mut daemon.control(), "other", &[], SIZE);
    let before = daemon.status("VmRSS");
    let mut idle = Vec::new();
    for _ in 0..4 {
        let client = Nbd::connect(&socket).unwrap();
        client.stream.set_nonblocking(true).unwrap();
        // 2048 MiB are asked for, as far as the socket takes the requests, and nothing is read.
        for cookie in 0..256 {
            let request = Nbd::request(nbd::READ, 0, cookie, 0, 8 << 20);
            if (&client.stream).write_all(&request).is_err() {
                break;
            }
        }
        idle.push(client);
    }
    let mut quick = Nbd::connect(&other).unwrap();
    for round in 0..100u8 {
        quick.write(0, &[round; 4096]).unwrap();
        quick.flush().unwrap();
        assert_eq!(quick.read(0, 4096).unwrap(), [round; 4096]);
    }
    assert_eq!(writer.read(0, 1 << 20).unwrap(), piece);
    let grown = daemon.status("VmRSS").saturating_sub(before) / 1024;
    assert!(grown < 400, "{grown} MiB");
    // They are no obstacle to the end of the export either.
    let params = json!({"device": "disk", "path": socket});
    daemon.control().call("unexport", params).unwrap();
    assert!(!socket.exists());
    drop(idle);
}

#[test]
fn requests_in_flight_are_answered_in_whatever_order() {
    let (_place, _daemon, socket) = device();
    let mut client = Nbd::connect(&socket).unwrap();
    let mut random = common::Random(42);
    let mut model = vec![0u8; SIZE as usize];
    for round in 0..60u64 {
        // Requests of one round do not overlap, so that their order does not matter.
        let mut lengths = std::collections::HashMap::new();
        let mut bytes = Vec::new();
        for lane in 0..16u64 {
            let lane_size = SIZE / 16;
            let offset = lane * lane_size + random.below(lane_size / 512 - 512) * 512;
            let length = (1 + random.below(512)) * 512;
            let range = offset as usize..(offset + length) as usize;
            let length32 = u32::try_from(length).unwrap();
            let cookie = round * 100 + lane;
            let mut request = |command, flags, length| {
                bytes.extend_from_slice(&Nbd::request(command, flags, cookie, offset, length));
            };
            match random.below(8) {
                0 => request(nbd::FLUSH, 0, 0),
                1 => {
                    request(nbd::TRIM, 0, length32);
                    model[range].fill(0);
                }
                2..=4 => {
                    request(
                        nbd::WRITE,
                        if random.below(4) == 0 { nbd::FUA } else { 0 },
                        length32,
                    );
                    let data: Vec<u8> = (0..length)
                        .map(|at| (round + lane + at / 512) as u8)
                        .collect();
                    bytes.extend_from_slice(&data);
                    model[range].copy_from_slice(&data);
                }
                _ => {
                    request(nbd::READ, 0, length32);
                    lengths.insert(cookie, range);
                }
            }
        }
        // Who sends without reading may wait for a server that waits for it.
        let stream = client.stream.try_clone().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(move || (&stream).write_all(&bytes).unwrap());
            for _ in 0..16 {
                let length = |cookie| lengths.get(&cookie).map_or(0, ExactSizeIterator::len);
                let reply = client.receive(length).unwrap();
                assert_eq!(reply.error, 0);
                if let Some(range) = lengths.get(&reply.cookie) {
                    assert!(reply.data == model[range.clone()]);
                }
            }
        });
    }
}

#[test]
fn many_connections_share_one_device() {
    let (_place, daemon, socket) = device();
    let mut clients: Vec<_> = (0..100).map(|_| Nbd::connect(&socket).unwrap()).collect();
    for (number, client) in clients.iter_mut().enumerate() {
        client
            .write(number as u64 * 512, &[number as u8; 512])
            .unwrap();
    }
    clients[0].flush().unwrap();
    let all = clients[99].read(0, 51200).unwrap();
    assert!(all
        .chunks(512)
        .enumerate()
        .all(|(number, sector)| sector == [number as u8; 512]));
    let stats = daemon
        .control()
        .call("stats", json!({"device": "disk"}))
        .unwrap();
    assert_eq!(stats["devices"]["disk"]["connections"], 100);
    assert_eq!(stats["devices"]["disk"]["writes"], 100);
    assert_eq!(stats["devices"]["disk"]["read_bytes"], 51200);
    // Beyond the limit a client is turned away, the others stay.
    let more: Vec<_> = (0..40).filter_map(|_| Nbd::connect(&socket).ok()).collect();
    assert_eq!(more.len(), 28);
    clients[5].read(0, 512).unwrap();
}
