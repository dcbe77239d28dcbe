//! `POST /files` and `/files/compose` of the real agent: forms, raw bodies, encodings, owners, metadata, full disks.

mod files_support;

use std::{
    fs,
    io::{Read, Write},
    net::Shutdown,
    os::unix::fs::{symlink, MetadataExt},
};

use files_support::{is_root, Agent, Head, Reply, SmallDisk, OCTETS};
use flate2::{read::GzEncoder, Compression};
use serde_json::json;

const FORM: (&str, &str) = ("Content-Type", "multipart/form-data; boundary=B");

fn form(files: &[(&str, &str)]) -> Vec<u8> {
    let mut body = String::new();
    for (name, content) in files {
        body.push_str(&format!(
            "--B\r\nContent-Disposition: form-data; name=\"file\"; filename=\"{name}\"\r\n\r\n{content}\r\n"
        ));
    }
    body.push_str("--B--\r\n");
    body.into_bytes()
}

fn gzip(content: &[u8]) -> Vec<u8> {
    let mut coded = Vec::new();
    GzEncoder::new(content, Compression::fast())
        .read_to_end(&mut coded)
        .unwrap();
    coded
}

#[test]
fn forms_carry_several_files_with_directories() {
    let agent = Agent::plain();
    let (a, b) = (agent.path("x/y/a.txt"), agent.path("b"));
    let reply = agent.request(
        "POST",
        "/files",
        &[FORM],
        &form(&[(&a, "first\r\n"), (&b, "")]),
    );
    assert_eq!(reply.status, 200);
    assert_eq!(reply.header("content-type"), Some("application/json"));
    assert_eq!(
        reply.json(),
        json!([{"name": "a.txt", "path": a, "type": "file"}, {"name": "b", "path": b, "type": "file"}])
    );
    assert_eq!(fs::read(&a).unwrap(), b"first\r\n");
    assert_eq!(fs::read(&b).unwrap(), b"");

    let target = format!("/files?path={b}");
    let named = agent.request(
        "POST",
        &target,
        &[FORM],
        &form(&[("ignored/name", "by query")]),
    );
    assert_eq!(
        (named.status, fs::read_to_string(&b).unwrap().as_str()),
        (200, "by query")
    );
    agent
        .request("POST", &target, &[FORM], &form(&[("p", "1"), ("q", "2")]))
        .error(400);
    let twice = form(&[(&a, "1"), (&agent.path("x/./y//a.txt"), "2")]);
    agent.request("POST", "/files", &[FORM], &twice).error(400);
    let zipped = gzip(&form(&[(&b, "from gzip")]));
    let reply = agent.request(
        "POST",
        "/files",
        &[FORM, ("Content-Encoding", "gzip")],
        &zipped,
    );
    assert_eq!(
        (reply.status, fs::read_to_string(&b).unwrap().as_str()),
        (200, "from gzip")
    );
}

#[test]
fn broken_requests_are_refused() {
    let agent = Agent::plain();
    let target = format!("/files?path={}", agent.path("f"));
    agent.request("POST", "/files", &[OCTETS], b"x").error(400);
    agent
        .request("POST", "/files?path=", &[OCTETS], b"x")
        .error(400);
    agent
        .request("POST", &target, &[("Content-Type", "text/plain")], b"x")
        .error(400);
    agent.request("POST", &target, &[], b"x").error(400);
    agent
        .request(
            "POST",
            &target,
            &[("Content-Type", "multipart/form-data")],
            b"x",
        )
        .error(400);
    agent
        .request("POST", &target, &[FORM], b"no form")
        .error(400);
    agent
        .request("POST", &target, &[FORM], b"--B--\r\n")
        .error(400);
    agent
        .request("POST", "/files", &[FORM], &form(&[("", "x")]))
        .error(400);
    agent
        .request("POST", &target, &[OCTETS, ("Content-Encoding", "br")], b"x")
        .error(400);
    agent
        .request("POST", "/files?path=~who/x", &[OCTETS], b"x")
        .error(400);
    agent
        .request("POST", "/files?path=/%00", &[OCTETS], b"x")
        .error(400);
    agent
        .request("POST", "/files?path=/x&username=who", &[OCTETS], b"x")
        .error(401);
    agent
        .request(
            "POST",
            &format!("/files?path={}", agent.path("")),
            &[OCTETS],
            b"x",
        )
        .error(400);
    assert!(!agent.at("f").exists());
    // Metadata is refused before anything is written.
    let headers = [OCTETS, ("X-Metadata-K", "tab\there")];
    agent.request("POST", &target, &headers, b"x").error(400);
    let long = "v".repeat(4097);
    agent
        .request("POST", &target, &[OCTETS, ("X-Metadata-K", &long)], b"x")
        .error(400);
    assert!(!agent.at("f").exists());
}

#[test]
fn gzip_bodies_are_decoded_and_broken_ones_cost_nothing() {
    let agent = Agent::plain();
    let target = format!("/files?path={}", agent.path("f"));
    let headers = [OCTETS, ("Content-Encoding", "gzip")];
    let content = "compress me ".repeat(100_000).into_bytes();
    assert_eq!(
        agent
            .request("POST", &target, &headers, &gzip(&content))
            .status,
        200
    );
    assert!(fs::read(agent.at("f")).unwrap() == content);
    assert_eq!(
        agent.request("POST", &target, &headers, &gzip(b"")).status,
        200
    );
    assert!(fs::read(agent.at("f")).unwrap().is_empty());
    fs::write(agent.at("f"), "kept").unwrap();
    agent
        .request("POST", &target, &headers, b"not gzip at all")
        .error(400);
    assert_eq!(fs::read(agent.at("f")).unwrap(), b"kept");
    let cut = gzip(&content);
    agent
        .request("POST", &target, &headers, &cut[..cut.len() - 5])
        .error(400);
}

#[test]
fn files_and_parents_belong_to_the_user() {
    if !is_root() {
        eprintln!("only root can give files away");
        return;
    }
    let agent = Agent::plain();
    let target = format!("/files?username=daemon&path={}", agent.path("p/q/f"));
    assert_eq!(
        agent
            .request("POST", &target, &[OCTETS], b"a long first text")
            .status,
        200
    );
    let daemon = fs::metadata(agent.at("p")).unwrap().uid();
    assert_ne!(daemon, 0);
    for (name, mode) in [("p", 0o40755), ("p/q", 0o40755), ("p/q/f", 0o100644)] {
        let meta = fs::metadata(agent.at(name)).unwrap();
        assert_eq!((meta.uid(), meta.mode()), (daemon, mode), "{name}");
    }
    let inode = fs::metadata(agent.at("p/q/f")).unwrap().ino();
    symlink("f", agent.at("p/q/link")).unwrap();
    assert_eq!(agent.put("p/q/link", b"short").status, 200);
    let meta = fs::metadata(agent.at("p/q/f")).unwrap();
    assert_eq!((meta.ino(), meta.uid()), (inode, 0));
    assert_eq!(fs::read(agent.at("p/q/f")).unwrap(), b"short");
}

#[test]
fn metadata_is_kept_shown_and_replaced() {
    let agent = Agent::plain();
    let target = format!("/files?path={}", agent.path("f"));
    let headers = [
        OCTETS,
        ("X-Metadata-Foo", "bar baz"),
        ("x-metadata-two", "2"),
    ];
    let reply = agent.request("POST", &target, &headers, b"x");
    let expected = json!({"foo": "bar baz", "two": "2"});
    assert_eq!(
        (reply.status, &reply.json()[0]["metadata"]),
        (200, &expected)
    );
    let metadata = |method: &str, path: &str| {
        let (status, answer) = agent.call(method, &json!({"path": path}));
        assert_eq!(status, 200);
        let entry = if method == "Stat" {
            &answer["entry"]
        } else {
            &answer["entries"][0]
        };
        entry["metadata"].clone()
    };
    fs::rename(agent.at("state.json"), agent.at("zz")).unwrap();
    assert_eq!(metadata("Stat", &agent.path("f")), expected);
    assert_eq!(metadata("ListDir", &agent.path("")), expected);
    agent.call(
        "Move",
        &json!({"source": agent.path("f"), "destination": agent.path("g")}),
    );
    assert_eq!(metadata("Stat", &agent.path("g")), expected);
    let reply = agent.put("g", b"y");
    assert_eq!(reply.json()[0].get("metadata"), None);
    assert_eq!(metadata("Stat", &agent.path("g")), json!(null));
}

#[test]
fn a_full_disk_is_507_even_for_a_client_that_sends_on() {
    if !is_root() {
        eprintln!("only root can mount a small disk");
        return;
    }
    let agent = Agent::plain();
    let _disk = SmallDisk::mount(&agent.at("small"), "size=1m,nr_inodes=4");
    agent.put("small/f", &vec![7; 32 << 20]).error(507);
    fs::remove_file(agent.at("small/f")).unwrap();
    assert_eq!(agent.put("small/f", b"fits").status, 200);
    // Root of the disk, two files: the last of four inodes, and then none.
    assert_eq!(agent.put("small/g", b"").status, 200);
    agent.put("small/h/i", b"").error(507);
    let text = form(&[(&agent.path("small/f"), &"x".repeat(4 << 20))]);
    agent.request("POST", "/files", &[FORM], &text).error(507);
    let body =
        json!({"source_paths": [agent.path("state.json")], "destination": agent.path("small/x")});
    agent
        .request("POST", "/files/compose", &[], body.to_string().as_bytes())
        .error(507);
    assert!(agent.at("state.json").exists());
}

#[test]
fn half_an_upload_is_no_success() {
    let agent = Agent::plain();
    let target = format!("/files?path={}", agent.path("f"));
    let chunked = [OCTETS, ("Transfer-Encoding", "chunked")];
    let sized = [OCTETS, ("Content-Length", "1000")];
    for (headers, begin) in [(chunked, &b"4\r\nhalf\r\n"[..]), (sized, b"half")] {
        let mut stream = agent.open("POST", &target, &headers);
        stream.write_all(begin).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let status = Head::try_read(stream).map(|head| head.status);
        assert!(status.is_none_or(|status| status == 400), "{status:?}");
    }
    let text = form(&[(&agent.path("g"), "content")]);
    agent
        .request("POST", "/files", &[FORM], &text[..text.len() - 8])
        .error(400);
}

#[test]
fn chunked_bodies_arrive_as_they_are_sent() {
    let agent = Agent::plain();
    let target = format!("/files?path={}", agent.path("f"));
    let mut watch = agent.stream("WatchDir", &json!({"path": agent.path("")}));
    assert_eq!(watch.next(), json!({"start": {}}));
    let mut stream = agent.open("POST", &target, &[OCTETS, ("Transfer-Encoding", "chunked")]);
    stream.write_all(b"5\r\nfirst\r\n").unwrap();
    while watch.events(1)[0].1 != "WRITE" {}
    assert_eq!(fs::read(agent.at("f")).unwrap(), b"first");
    stream.write_all(b"6\r\nsecond\r\n0\r\n\r\n").unwrap();
    assert_eq!(Reply::read(stream).status, 200);
    assert_eq!(fs::read(agent.at("f")).unwrap(), b"firstsecond");
}

#[test]
fn compose_joins_and_removes() {
    let agent = Agent::plain();
    agent.put("a", b"one ");
    agent.put("b", b"two");
    let body = json!({"source_paths": [agent.path("a"), agent.path("b")], "destination": agent.path("n/c")});
    let reply = agent.request("POST", "/files/compose", &[], body.to_string().as_bytes());
    let expected = json!({"name": "c", "path": agent.path("n/c"), "type": "file"});
    assert_eq!((reply.status, reply.json()), (200, expected));
    assert_eq!(fs::read(agent.at("n/c")).unwrap(), b"one two");
    assert!(!agent.at("a").exists());
    agent
        .request("POST", "/files/compose", &[], body.to_string().as_bytes())
        .error(404);
    agent
        .request("POST", "/files/compose", &[], b"no json")
        .error(400);
    agent
        .request(
            "POST",
            "/files/compose",
            &[],
            br#"{"source_paths":[],"destination":"/x"}"#,
        )
        .error(400);
}
