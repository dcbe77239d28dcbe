//! `filesystem.Filesystem` of the real agent, in JSON and protobuf.

mod files_support;

use std::{
    fs,
    io::Write,
    os::unix::fs::{symlink, MetadataExt},
};

use base64::Engine;
use files_support::{event, is_root, Agent, SmallDisk};
use serde_json::{json, Value};

fn code(answer: &(u16, Value)) -> (u16, &str) {
    (answer.0, answer.1["code"].as_str().unwrap())
}

fn pairs(expected: &[(&str, &str)]) -> Vec<(String, String)> {
    expected
        .iter()
        .map(|(name, kind)| ((*name).to_owned(), (*kind).to_owned()))
        .collect()
}

#[test]
fn make_dir_says_what_is_there() {
    let agent = Agent::plain();
    let make = |name: &str| agent.call("MakeDir", &json!({"path": agent.path(name)}));
    let (status, made) = make("a/b");
    assert_eq!(
        (status, &made["entry"]["type"]),
        (200, &json!("FILE_TYPE_DIRECTORY"))
    );
    assert_eq!(made["entry"]["permissions"], "drwxr-xr-x");
    assert_eq!(made["entry"]["mode"], 0o755);
    assert_eq!(code(&make("a/b")), (409, "already_exists"));
    fs::write(agent.at("f"), "").unwrap();
    assert_eq!(code(&make("f")), (400, "invalid_argument"));
    assert_eq!(code(&make("f/x")), (400, "invalid_argument"));
}

#[test]
fn users_own_what_they_make() {
    if !is_root() {
        eprintln!("only root can give files away");
        return;
    }
    let agent = Agent::plain();
    let basic = |name: &str| {
        let text = base64::engine::general_purpose::STANDARD.encode(format!("{name}:"));
        format!("Basic {text}")
    };
    let path = json!({"path": agent.path("p/d")});
    let (_, made) = agent.call_with("MakeDir", &path, &[("Authorization", &basic("daemon"))]);
    assert_eq!(
        (&made["entry"]["owner"], &made["entry"]["group"]),
        (&json!("daemon"), &json!("daemon"))
    );
    assert_ne!(fs::metadata(agent.at("p")).unwrap().uid(), 0);
    let refused = agent.call_with("Stat", &path, &[("Authorization", &basic("who"))]);
    assert_eq!(code(&refused), (401, "unauthenticated"));
    assert_eq!(refused.1["message"], "invalid username: 'who'");
}

#[test]
fn move_and_remove() {
    let agent = Agent::plain();
    let rename = |from: &str, to: &str| {
        agent.call(
            "Move",
            &json!({"source": agent.path(from), "destination": agent.path(to)}),
        )
    };
    fs::write(agent.at("f"), "x").unwrap();
    let (status, moved) = rename("f", "new/place/g");
    assert_eq!((status, &moved["entry"]["name"]), (200, &json!("g")));
    assert_eq!(code(&rename("f", "x")), (404, "not_found"));
    let remove = |name: &str| agent.call("Remove", &json!({"path": agent.path(name)}));
    for _ in 0..2 {
        assert_eq!(remove("new"), (200, json!({})));
    }
    assert!(!agent.at("new").exists());
    assert_eq!(
        code(&agent.call("Remove", &json!({"path": "/"}))),
        (400, "invalid_argument")
    );
}

#[test]
fn nothing_is_changed_without_a_path() {
    let agent = Agent::start(json!({"default_user": "root", "default_workdir": "/none/of/it"}));
    fs::write(agent.at("f"), "x").unwrap();
    let there = agent.path("f");
    for (method, message, field) in [
        ("Remove", json!({"path": ""}), "path"),
        ("Remove", json!({}), "path"),
        ("MakeDir", json!({"path": ""}), "path"),
        (
            "Move",
            json!({"source": "", "destination": there}),
            "source",
        ),
        (
            "Move",
            json!({"source": there, "destination": ""}),
            "destination",
        ),
    ] {
        let refused = agent.call(method, &message);
        assert_eq!(code(&refused), (400, "invalid_argument"), "{method}");
        let text = format!("the field '{field}' is empty; name a file or directory");
        assert_eq!(refused.1["message"], text);
    }
    assert!(agent.at("f").exists());
}

#[test]
fn a_full_disk_is_an_internal_error() {
    if !is_root() {
        eprintln!("only root can mount a small disk");
        return;
    }
    let agent = Agent::plain();
    // Its root takes one inode and the file another: a third is not to be had.
    let _disk = SmallDisk::mount(&agent.at("small"), "nr_inodes=2");
    fs::write(agent.at("small/f"), "").unwrap();
    let made = agent.call("MakeDir", &json!({"path": agent.path("small/d")}));
    let names = json!({"source": agent.path("small/f"), "destination": agent.path("small/d/f")});
    for refused in [made, agent.call("Move", &names)] {
        assert_eq!(code(&refused), (500, "internal"));
        let text = refused.1["message"].as_str().unwrap();
        assert!(
            text.ends_with("no space left on the disk of the sandbox"),
            "{text}"
        );
    }
    assert_eq!(agent.put("small/g", b"x").status, 507);
}

#[test]
fn a_walk_ends_with_its_client() {
    let agent = Agent::plain();
    // More than one answer may hold: a whole walk takes long and ends with an error instead of a long answer.
    for name in ["a", "b", "c", "d", "e", "f"] {
        let dir = agent.at("t").join(name);
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("0"), "").unwrap();
        for number in 1..35_000 {
            fs::hard_link(dir.join("0"), dir.join(number.to_string())).unwrap();
        }
    }
    let all = json!({"path": agent.path("t"), "depth": u32::MAX});
    let body = all.to_string();
    let length = body.len().to_string();
    let headers = [
        ("Content-Type", "application/json"),
        ("Content-Length", length.as_str()),
    ];
    let walk = || {
        let before = agent.cpu_ticks();
        let refused = agent.call("ListDir", &all);
        assert_eq!(code(&refused), (429, "resource_exhausted"));
        agent.cpu_ticks() - before
    };
    let one = walk();
    let before = agent.cpu_ticks();
    for _ in 0..6 {
        let started = agent.cpu_ticks();
        let mut left = agent.open("POST", "/filesystem.Filesystem/ListDir", &headers);
        left.write_all(body.as_bytes()).unwrap();
        while agent.cpu_ticks() < started + 3 {
            std::thread::yield_now();
        }
    }
    // Long enough for the others to go on, if they did.
    walk();
    let all = agent.cpu_ticks() - before;
    assert!(all < 3 * one, "{all} ticks for all, {one} for one");
}

#[test]
fn list_keeps_order_depth_and_prefix() {
    let agent = Agent::plain();
    fs::create_dir_all(agent.at("t/b/c")).unwrap();
    for file in ["t/a", "t/b/c/d", "t/e"] {
        fs::write(agent.at(file), "").unwrap();
    }
    symlink("t", agent.at("link")).unwrap();
    symlink("loop", agent.at("loop")).unwrap();
    let list = |name: &str, depth: u32| {
        let (status, answer) = agent.call(
            "ListDir",
            &json!({"path": agent.path(name), "depth": depth}),
        );
        assert_eq!(status, 200, "{answer}");
        let entries = answer["entries"].as_array().unwrap().clone();
        let start = agent.path(name).len() + 1;
        entries
            .iter()
            .map(|entry| entry["path"].as_str().unwrap()[start..].to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(list("t", 0), ["a", "b", "e"]);
    assert_eq!(list("t", 1), ["a", "b", "e"]);
    assert_eq!(list("link", 3), ["a", "b", "b/c", "b/c/d", "e"]);
    for (name, expected) in [
        ("none", (404, "not_found")),
        ("t/a", (400, "invalid_argument")),
        ("loop", (400, "failed_precondition")),
    ] {
        assert_eq!(
            code(&agent.call("ListDir", &json!({"path": agent.path(name)}))),
            expected
        );
    }
}

#[test]
fn stat_of_links() {
    let agent = Agent::plain();
    fs::create_dir(agent.at("d")).unwrap();
    symlink("d", agent.at("l")).unwrap();
    symlink("nowhere", agent.at("broken")).unwrap();
    let stat =
        |name: &str| agent.call("Stat", &json!({"path": agent.path(name)})).1["entry"].clone();
    let link = stat("l");
    assert_eq!(link["type"], "FILE_TYPE_DIRECTORY");
    assert_eq!(link["isSymlink"], true);
    assert_eq!(link["size"], "1");
    assert!(link["permissions"].as_str().unwrap().starts_with('L'));
    let real = fs::canonicalize(agent.at("d")).unwrap();
    assert_eq!(link["symlinkTarget"], real.to_str().unwrap());
    let modified = link["modifiedTime"].as_str().unwrap();
    assert!(
        modified.ends_with('Z') || modified.ends_with("+00:00"),
        "{modified}"
    );
    assert_eq!(stat("broken")["type"], "FILE_TYPE_SYMLINK");
    assert_eq!(stat("d").get("symlinkTarget"), None);
    for path in [agent.path("none"), "/a\0b".to_owned(), "~who".to_owned()] {
        let expected = if path.ends_with("none") {
            (404, "not_found")
        } else {
            (400, "invalid_argument")
        };
        assert_eq!(code(&agent.call("Stat", &json!({"path": path}))), expected);
    }
}

#[test]
fn protobuf_works_as_well() {
    let agent = Agent::plain();
    fs::write(agent.at("f"), "12345").unwrap();
    let path = agent.path("f");
    let mut message = vec![0x0a, u8::try_from(path.len()).unwrap()];
    message.extend_from_slice(path.as_bytes());
    let headers = [("Content-Type", "application/proto")];
    let reply = agent.request("POST", "/filesystem.Filesystem/Stat", &headers, &message);
    assert_eq!(
        (reply.status, reply.header("content-type")),
        (200, Some("application/proto"))
    );
    // Field 1 of the answer is the entry; its field 1 is the name, 2 the type, 3 the path, 4 the size.
    let mut begin = vec![
        0x0a,
        1,
        b'f',
        0x10,
        1,
        0x1a,
        u8::try_from(path.len()).unwrap(),
    ];
    begin.extend_from_slice(path.as_bytes());
    begin.extend_from_slice(&[0x20, 5]);
    assert_eq!(reply.body[0], 0x0a);
    let entry = reply
        .body
        .windows(begin.len())
        .position(|window| window == begin);
    assert!(entry.is_some(), "{:?}", reply.body);
}

#[test]
fn watch_dir_tells_of_uploads() {
    let agent = Agent::plain();
    fs::create_dir(agent.at("w")).unwrap();
    let request = json!({"path": agent.path("w"), "recursive": true, "includeEntry": true});
    let mut watch = agent.stream("WatchDir", &request);
    assert_eq!(watch.next(), json!({"start": {}}));
    let headers = [files_support::OCTETS, ("X-Metadata-K", "v")];
    let target = format!("/files?path={}", agent.path("w/f"));
    assert_eq!(
        agent
            .request("POST", &target, &headers, &vec![1; 3 << 20])
            .status,
        200
    );
    assert_eq!(watch.events(2), pairs(&[("f", "CREATE"), ("f", "CHMOD")]));
    let written = watch.next();
    assert_eq!(event(&written["filesystem"]), ("f".into(), "WRITE".into()));
    assert_eq!(
        written["filesystem"]["entry"]["metadata"],
        json!({"k": "v"})
    );

    // A directory that is new is followed, and what was in it before it was is not missed.
    fs::create_dir_all(agent.at("w/new/sub")).unwrap();
    fs::write(agent.at("w/new/sub/early"), "x").unwrap();
    let mut seen = Vec::new();
    while !seen.contains(&("new/sub/early".to_owned(), "CREATE".to_owned())) {
        seen.extend(watch.events(1));
    }
    fs::remove_file(agent.at("w/new/sub/early")).unwrap();
    loop {
        let (name, kind) = watch.events(1).remove(0);
        if kind == "REMOVE" {
            assert_eq!(name, "new/sub/early");
            break;
        }
    }
}

#[test]
fn watch_dir_refuses_with_an_end_frame() {
    let agent = Agent::plain();
    fs::write(agent.at("f"), "").unwrap();
    for (name, code) in [("none", "not_found"), ("f", "invalid_argument")] {
        let mut watch = agent.stream("WatchDir", &json!({"path": agent.path(name)}));
        assert_eq!(watch.next()["end"]["error"]["code"], code);
    }
}

#[test]
fn polled_watchers_have_uploads_at_once() {
    let agent = Agent::plain();
    fs::create_dir(agent.at("w")).unwrap();
    let (_, created) = agent.call("CreateWatcher", &json!({"path": agent.path("w")}));
    let id = json!({"watcherId": created["watcherId"]});
    let upload = [("f", "CREATE"), ("f", "CHMOD"), ("f", "WRITE")];
    for round in 0..20 {
        let size = if round % 2 == 0 { 5 } else { 2 << 20 };
        assert_eq!(agent.put("w/f", &vec![7; size]).status, 200);
        let (_, answer) = agent.call("GetWatcherEvents", &id);
        let events: Vec<_> = answer["events"]
            .as_array()
            .unwrap()
            .iter()
            .map(event)
            .collect();
        assert_eq!(events, pairs(&upload), "round {round}");
        fs::remove_file(agent.at("w/f")).unwrap();
        let (_, answer) = agent.call("GetWatcherEvents", &id);
        assert_eq!(answer["events"].as_array().unwrap().len(), 1, "{answer}");
    }
    assert_eq!(agent.call("GetWatcherEvents", &id), (200, json!({})));
    assert_eq!(agent.call("RemoveWatcher", &id), (200, json!({})));
    assert_eq!(
        code(&agent.call("GetWatcherEvents", &id)),
        (404, "not_found")
    );
    assert_eq!(code(&agent.call("RemoveWatcher", &id)), (404, "not_found"));
}
