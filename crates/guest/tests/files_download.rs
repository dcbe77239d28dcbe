//! `GET /files` of the real agent: refusals, encodings, ranges, signatures, memory.

mod files_support;

use std::{
    fs::{self, File},
    io::{Read, Write},
};

use base64::Engine;
use files_support::{Agent, Head};
use flate2::read::GzDecoder;
use serde_json::json;
use sha2::{Digest, Sha256};

#[test]
fn refusals_come_in_order() {
    let agent = Agent::plain();
    fs::create_dir(agent.at("dir")).unwrap();
    nix::unistd::mkfifo(&agent.at("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    fs::write(agent.at("file"), "x").unwrap();
    let target = |name: &str| format!("/files?path={}", agent.path(name));
    let none = agent.get(&target("none"), &[]).error(404);
    assert_eq!(
        none,
        format!("path '{}' does not exist", agent.path("none"))
    );
    agent.get(&target("file/x"), &[]).error(404);
    agent
        .get(&target("dir"), &[("Accept-Encoding", "identity;q=0")])
        .error(400);
    agent.get(&target("pipe"), &[]).error(400);
    agent.get("/files?path=~other", &[]).error(400);
    agent.get("/files?path=/a%00b", &[]).error(400);
    agent.get("/files?path=/%ff", &[]).error(400);
    agent.get(&target(&"n".repeat(300)), &[]).error(400);
    let nobody = agent.get("/files?path=~other&username=who", &[]).error(401);
    assert!(nobody.contains("error looking up user 'who'"), "{nobody}");
    agent
        .get(&target("file"), &[("Accept-Encoding", "br, identity;q=0")])
        .error(406);
}

#[test]
fn paths_start_at_the_home_and_empty_is_the_workdir() {
    let agent = Agent::start(json!({"default_user": "root", "default_workdir": "/proc"}));
    fs::write(agent.at("f"), "content").unwrap();
    // From any home up to the root and down again.
    let relative = format!("../../../..{}", agent.path("f"));
    for prefix in ["", "~/"] {
        let reply = agent.get(&format!("/files?path={prefix}{relative}"), &[]);
        assert_eq!(
            (reply.status, reply.body.as_slice()),
            (200, &b"content"[..])
        );
    }
    for target in ["/files?path=", "/files"] {
        assert_eq!(
            agent.get(target, &[]).error(400),
            "path '/proc' is a directory"
        );
    }
    let (_, home) = agent.call("Stat", &json!({"path": "~"}));
    let (_, here) = agent.call("Stat", &json!({"path": "."}));
    assert_eq!(home, here);
    assert_eq!(home["entry"]["path"], "/root");
}

#[test]
fn gzip_is_correct_and_has_no_length() {
    let agent = Agent::plain();
    let text = "some words, again and again\n".repeat(20_000);
    fs::write(agent.at("big file.txt"), &text).unwrap();
    let target = format!("/files?path={}", agent.path("big+file.txt"));
    let coded = agent.get(&target, &[("Accept-Encoding", "gzip, deflate")]);
    assert_eq!(coded.status, 200);
    assert_eq!(coded.header("content-encoding"), Some("gzip"));
    assert_eq!(coded.header("content-length"), None);
    assert_eq!(coded.header("vary"), Some("Accept-Encoding"));
    let mut decoded = String::new();
    GzDecoder::new(&coded.body[..])
        .read_to_string(&mut decoded)
        .unwrap();
    assert_eq!(decoded, text);

    let plain = agent.get(&target, &[]);
    assert_eq!(plain.header("content-encoding"), None);
    assert_eq!(
        plain.header("content-length"),
        Some(text.len().to_string().as_str())
    );
    assert_eq!(
        plain.header("content-disposition"),
        Some("inline; filename=\"big file.txt\"")
    );
    assert_eq!(
        plain.header("content-type"),
        Some("text/plain; charset=utf-8")
    );
    assert_eq!(plain.body, text.as_bytes());

    // Larger than what is compressed for clients that need not have it, so from a client that must.
    let large = "0123456789abcdef".repeat(500_000);
    fs::write(agent.at("large"), &large).unwrap();
    let only_gzip = [("Accept-Encoding", "gzip, identity;q=0")];
    let coded = agent.get(&format!("/files?path={}", agent.path("large")), &only_gzip);
    let mut decoded = String::new();
    GzDecoder::new(&coded.body[..])
        .read_to_string(&mut decoded)
        .unwrap();
    assert!(decoded == large);
}

#[test]
fn ranges_and_conditions() {
    let agent = Agent::plain();
    let content: Vec<u8> = (0..300_000u32).map(|number| (number % 251) as u8).collect();
    fs::write(agent.at("f"), &content).unwrap();
    let target = format!("/files?path={}", agent.path("f"));
    let gzip = ("Accept-Encoding", "gzip, deflate");
    for (range, from, to) in [
        ("bytes=5-9", 5, 10),
        ("bytes=100000-250000", 100_000, 250_001),
        ("bytes=-7", 299_993, 300_000),
    ] {
        let part = agent.get(&target, &[("Range", range), gzip]);
        assert_eq!(part.status, 206);
        let expected = format!("bytes {from}-{}/300000", to - 1);
        assert_eq!(part.header("content-range"), Some(expected.as_str()));
        assert!(part.body == content[from..to]);
    }
    let beyond = agent.get(&target, &[("Range", "bytes=300000-")]);
    beyond.error(416);
    assert_eq!(beyond.header("content-range"), Some("bytes */300000"));

    let whole = agent.get(&target, &[]);
    let tag = whole.header("etag").unwrap();
    let date = whole.header("last-modified").unwrap();
    let unchanged = agent.get(&target, &[("If-None-Match", tag), gzip]);
    assert_eq!((unchanged.status, unchanged.body.len()), (304, 0));
    assert_eq!(
        agent.get(&target, &[("If-Modified-Since", date)]).status,
        304
    );
    agent.get(&target, &[("If-Match", "\"other\"")]).error(412);
    fs::write(agent.at("f"), "changed").unwrap();
    let changed = agent.get(&target, &[("If-None-Match", tag)]);
    assert_eq!(
        (changed.status, changed.body.as_slice()),
        (200, &b"changed"[..])
    );
    let head = Head::read(agent.open("HEAD", &target, &[]));
    assert_eq!(
        (head.status, head.header("content-length")),
        (200, Some("7"))
    );
}

#[test]
fn files_without_a_true_size_are_sent_whole() {
    let agent = Agent::plain();
    let version = fs::read("/proc/version").unwrap();
    assert_eq!(agent.get("/files?path=/proc/version", &[]).body, version);
    let page = "/sys/kernel/mm/transparent_hugepage/enabled";
    if let Ok(expected) = fs::read(page) {
        assert_eq!(
            agent.get(&format!("/files?path={page}"), &[]).body,
            expected
        );
    }
    fs::write(agent.at("empty"), "").unwrap();
    let empty = agent.get(&format!("/files?path={}", agent.path("empty")), &[]);
    assert_eq!(
        (empty.status, empty.header("content-length")),
        (200, Some("0"))
    );
}

#[test]
fn a_file_that_shrinks_cuts_the_answer() {
    let agent = Agent::plain();
    let file = File::create(agent.at("f")).unwrap();
    file.set_len(64 << 20).unwrap();
    let stream = agent.open("GET", &format!("/files?path={}", agent.path("f")), &[]);
    let mut head = Head::read(stream);
    assert_eq!(head.header("content-length"), Some("67108864"));
    file.set_len(1).unwrap();
    let mut rest = Vec::new();
    // A reset counts as cut, too.
    let _ = head.body.read_to_end(&mut rest);
    assert!(rest.len() < 64 << 20);
}

fn signature(text: &str) -> String {
    let hash = base64::engine::general_purpose::STANDARD_NO_PAD.encode(Sha256::digest(text));
    format!("v1_{}", hash.replace('+', "%2B").replace('/', "%2F"))
}

#[test]
fn signatures_replace_the_token() {
    let agent = Agent::start(json!({"default_user": "root", "access_token": "secret"}));
    fs::write(agent.at("f"), "content").unwrap();
    let path = agent.path("f");
    let file = format!("/files?path={path}");
    let refused = |target: String, headers: &[(&str, &str)]| agent.get(&target, headers).error(401);
    refused(file.clone(), &[]);
    refused(file.clone(), &[("X-Access-Token", "wrong")]);
    assert_eq!(
        agent.get(&file, &[("X-Access-Token", "secret")]).status,
        200
    );

    let read = signature(&format!("{path}:read::secret"));
    assert_eq!(
        agent.get(&format!("{file}&signature={read}"), &[]).body,
        b"content"
    );
    refused(
        format!("{file}&signature={read}"),
        &[("X-Access-Token", "wrong")],
    );
    refused(format!("{file}&signature={read}&username=root"), &[]);
    refused(format!("{file}x&signature={read}"), &[]);
    let write = signature(&format!("{path}:write::secret"));
    let wrong = refused(format!("{file}&signature={write}"), &[]);
    assert_eq!(wrong, "invalid signature");

    let with_user = signature(&format!("{path}:read:root:secret:4102444800"));
    let target =
        format!("{file}&username=root&signature_expiration=4102444800&signature={with_user}");
    assert_eq!(agent.get(&target, &[]).status, 200);
    let old = signature(&format!("{path}:read::secret:1000"));
    let late = refused(
        format!("{file}&signature_expiration=1000&signature={old}"),
        &[],
    );
    assert_eq!(late, "signature is already expired");

    // Upload links may leave the path to the form.
    let open_path = signature(":write::secret");
    let form = "--B\r\nContent-Disposition: form-data; name=\"file\"; filename=\"".to_owned()
        + &agent.path("up")
        + "\"\r\n\r\nnew\r\n--B--\r\n";
    let multipart = [("Content-Type", "multipart/form-data; boundary=B")];
    let target = format!("/files?signature={open_path}");
    assert_eq!(
        agent
            .request("POST", &target, &multipart, form.as_bytes())
            .status,
        200
    );
    assert_eq!(fs::read(agent.at("up")).unwrap(), b"new");
    agent
        .request("POST", "/files", &multipart, form.as_bytes())
        .error(401);
    agent
        .request("POST", "/files/compose", &[], b"{}")
        .error(401);
}

#[test]
fn large_transfers_need_little_memory() {
    const SIZE: usize = 200 << 20;
    let agent = Agent::plain();
    // Warm up, so that what is compared is only the transfer.
    assert_eq!(agent.put("warm", &[1; 1 << 20]).status, 200);
    let before = agent.peak_memory();
    let piece: Vec<u8> = (0..1 << 20)
        .map(|number: u32| (number.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    let headers = [files_support::OCTETS, ("Content-Length", &SIZE.to_string())];
    let mut stream = agent.open(
        "POST",
        &format!("/files?path={}", agent.path("big")),
        &headers,
    );
    for _ in 0..SIZE / piece.len() {
        stream.write_all(&piece).unwrap();
    }
    assert_eq!(files_support::Reply::read(stream).status, 200);
    assert_eq!(fs::metadata(agent.at("big")).unwrap().len(), SIZE as u64);

    let stream = agent.open(
        "GET",
        &format!("/files?path={}", agent.path("big")),
        &[("Accept-Encoding", "gzip")],
    );
    let mut head = Head::read(stream);
    let mut received = vec![0; piece.len()];
    for _ in 0..SIZE / piece.len() {
        head.body.read_exact(&mut received).unwrap();
        assert!(received == piece);
    }
    assert_eq!(head.body.read(&mut received).unwrap(), 0);
    let grown = agent.peak_memory() - before;
    assert!(grown < 16 << 10, "the agent grew by {grown} KiB");
}
