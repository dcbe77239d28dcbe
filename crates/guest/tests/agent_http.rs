//! The plain HTTP endpoints of the agent: health, metrics, variables, `/init`, the tunnel, tokens, CORS, error bodies.

mod support;

use std::{fs, os::unix::fs::PermissionsExt};

use base64::{engine::general_purpose::STANDARD, Engine};
use hyper_util::rt::TokioIo;
use serde_json::{json, Value};
use support::{request, shell, Agent};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
};

fn json_of(body: &[u8]) -> Value {
    serde_json::from_slice(body).unwrap()
}

#[tokio::test]
async fn only_health_is_open_once_a_token_is_set() {
    let agent = Agent::start();
    assert_eq!(agent.http("GET", "/envs", &[], "").await.0, 200);
    assert_eq!(
        agent
            .http("POST", "/init", &[], r#"{"accessToken":"secret"}"#)
            .await
            .0,
        204
    );
    let (status, headers, _) = agent.http("GET", "/health", &[], "").await;
    assert_eq!(
        (status, &headers["cache-control"]),
        (204, &"no-store".parse().unwrap())
    );
    for (method, path) in [
        ("GET", "/metrics"),
        ("GET", "/envs"),
        ("POST", "/process.Process/List"),
        ("GET", "/nope"),
    ] {
        for token in ["", "secreT", "secret2"] {
            let (status, headers, body) = agent
                .http(method, path, &[("x-access-token", token)], "{}")
                .await;
            assert_eq!(
                (status, &json_of(&body)["code"]),
                (401, &json!(401)),
                "{path}"
            );
            assert_eq!(headers["access-control-allow-origin"], "*");
        }
    }
    let (status, ..) = agent
        .http("GET", "/metrics", &[("x-access-token", "secret")], "")
        .await;
    assert_eq!(status, 200);
}

#[test]
fn a_wrong_flag_is_one_line_in_the_log() {
    let ended = std::process::Command::new(env!("CARGO_BIN_EXE_aenv-guest"))
        .args(["agent", "--no-such-flag"])
        .output()
        .unwrap();
    assert_eq!(ended.status.code(), Some(2));
    let entry = json_of(&ended.stderr);
    assert_eq!(entry["level"], "error");
    assert!(entry["error"].as_str().unwrap().contains("--no-such-flag"));
}

#[tokio::test]
async fn preflights_need_no_token() {
    let agent = Agent::start();
    agent
        .http("POST", "/init", &[], r#"{"accessToken":"secret"}"#)
        .await;
    let headers = [
        ("origin", "https://example.org"),
        ("access-control-request-method", "POST"),
        (
            "access-control-request-headers",
            "authorization,x-access-token",
        ),
    ];
    let (status, headers, _) = agent
        .http("OPTIONS", "/process.Process/Start", &headers, "")
        .await;
    assert_eq!(status, 204);
    assert_eq!(headers["access-control-allow-origin"], "*");
    assert_eq!(
        headers["access-control-allow-headers"],
        "authorization,x-access-token"
    );
    assert!(headers["access-control-allow-methods"]
        .to_str()
        .unwrap()
        .contains("POST"));
}

#[tokio::test]
async fn router_errors_are_json() {
    let agent = Agent::start();
    for (method, path, expected) in [
        ("GET", "/nope", 404),
        ("POST", "/health", 405),
        ("DELETE", "/init", 405),
    ] {
        let (status, headers, body) = agent.http(method, path, &[], "").await;
        assert_eq!(
            (status, &json_of(&body)["code"]),
            (expected, &json!(expected))
        );
        assert_eq!(headers["content-type"], "application/json");
        assert!(json_of(&body)["message"].is_string());
    }
}

#[tokio::test]
async fn metrics_have_every_field() {
    let agent = Agent::start();
    let (status, _, body) = agent.http("GET", "/metrics", &[], "").await;
    let metrics = json_of(&body);
    assert_eq!(status, 200);
    for field in [
        "ts",
        "cpu_count",
        "mem_total",
        "mem_used",
        "mem_total_mib",
        "disk_total",
        "disk_used",
    ] {
        assert!(metrics[field].as_u64().unwrap() > 0, "{field}: {metrics}");
    }
    assert!(metrics["mem_cache"].is_u64());
    assert!((0.0..=100.0).contains(&metrics["cpu_used_pct"].as_f64().unwrap()));
}

#[tokio::test]
async fn init_sets_variables_facts_user_and_directory() {
    let agent = Agent::start();
    let body = json!({
        "envVars": {"A": "1"}, "sandboxId": "sbx1", "templateId": "tpl1", "defaultUser": "nobody",
        "defaultWorkdir": "/usr", "hyperloopIP": "192.0.2.1", "entropy": STANDARD.encode([7; 32]), "extra": {},
    });
    let (status, headers, _) = agent.http("POST", "/init", &[], &body.to_string()).await;
    assert_eq!(
        (status, &headers["x-envd-version"]),
        (204, &"0.6.7".parse().unwrap())
    );
    let (_, _, envs) = agent.http("GET", "/envs", &[], "").await;
    assert_eq!(
        json_of(&envs),
        json!({"A": "1", "E2B_SANDBOX": "true", "E2B_SANDBOX_ID": "sbx1", "E2B_TEMPLATE_ID": "tpl1",
               "E2B_EVENTS_ADDRESS": "http://192.0.2.1"})
    );
    assert_eq!(
        fs::read_to_string(agent.path("run/.E2B_SANDBOX")).unwrap(),
        "true"
    );
    assert_eq!(
        fs::read_to_string(agent.path("run/.E2B_SANDBOX_ID")).unwrap(),
        "sbx1"
    );
    assert_eq!(
        fs::read_to_string(agent.path("run/.E2B_TEMPLATE_ID")).unwrap(),
        "tpl1"
    );
    assert_eq!(agent.sh("id -un; pwd").await.text(), "nobody\n/usr\n");
    // New variables replace the old ones, but not ours.
    agent
        .http("POST", "/init", &[], r#"{"envVars":{"B":"2"}}"#)
        .await;
    assert_eq!(
        agent.sh("echo $A-$B-$E2B_SANDBOX_ID").await.text(),
        "-2-sbx1\n"
    );
}

#[tokio::test]
async fn a_fork_gets_another_name_and_machine_id() {
    let agent = Agent::start();
    fs::write(
        agent.path("etc/machine-id"),
        "00000000000000000000000000000000\n",
    )
    .unwrap();
    fs::write(agent.path("etc/hosts"), "127.0.0.1\tlocalhost\n").unwrap();
    agent
        .http(
            "POST",
            "/init",
            &[],
            r#"{"sandboxId":"one","hostname":"one"}"#,
        )
        .await;
    let first = fs::read_to_string(agent.path("etc/machine-id")).unwrap();
    assert_ne!(first, "00000000000000000000000000000000\n");
    // The same sandbox after a pause keeps its identity, a fork does not.
    agent
        .http("POST", "/init", &[], r#"{"sandboxId":"one"}"#)
        .await;
    assert_eq!(
        fs::read_to_string(agent.path("etc/machine-id")).unwrap(),
        first
    );
    let (status, ..) = agent
        .http(
            "POST",
            "/init",
            &[],
            r#"{"sandboxId":"two","hostname":"two"}"#,
        )
        .await;
    assert_eq!(status, 204);
    assert_ne!(
        fs::read_to_string(agent.path("etc/machine-id")).unwrap(),
        first
    );
    assert_eq!(
        agent.sh("cat /proc/sys/kernel/hostname").await.text(),
        "two\n"
    );
    assert_eq!(
        fs::read_to_string(agent.path("etc/hosts")).unwrap(),
        "127.0.0.1\tlocalhost\n127.0.1.1\ttwo\t# agentenv\n"
    );
    assert_eq!(
        fs::read_to_string(agent.path("etc/hostname")).unwrap(),
        "two\n"
    );
}

#[tokio::test]
async fn init_needs_the_token_that_is_set() {
    let agent = Agent::start();
    let init = async |headers: &[(&str, &str)], body: &str| {
        agent.http("POST", "/init", headers, body).await.0
    };
    assert_eq!(init(&[], "{").await, 400);
    assert_eq!(init(&[], r#"{"envVars":[]}"#).await, 400);
    assert_eq!(init(&[], r#"{"accessToken":"one"}"#).await, 204);
    assert_eq!(init(&[], "{}").await, 401);
    assert_eq!(init(&[], r#"{"accessToken":"two"}"#).await, 401);
    assert_eq!(init(&[], r#"{"accessToken":"one"}"#).await, 204);
    // Who knows the old token in the header may bring a new one.
    assert_eq!(
        init(&[("x-access-token", "one")], r#"{"accessToken":"two"}"#).await,
        204
    );
    assert_eq!(init(&[], r#"{"accessToken":"one"}"#).await, 401);
    assert_eq!(init(&[], r#"{"accessToken":"two"}"#).await, 204);
}

#[tokio::test]
async fn requests_older_than_the_last_one_change_nothing() {
    let agent = Agent::start();
    // Just behind this machine's clock, so that it is not set.
    let at = |seconds_ago: u64| {
        let when = std::time::SystemTime::now() - std::time::Duration::from_secs(seconds_ago);
        let since = when.duration_since(std::time::UNIX_EPOCH).unwrap();
        let stamp = pbjson_types::Timestamp {
            seconds: since.as_secs() as i64,
            nanos: 0,
        };
        serde_json::to_value(stamp).unwrap()
    };
    let init = async |stamp: &Value, value: &str| {
        let body = json!({"timestamp": stamp, "envVars": {"V": value}}).to_string();
        assert_eq!(agent.http("POST", "/init", &[], &body).await.0, 204);
        json_of(&agent.http("GET", "/envs", &[], "").await.2)["V"].clone()
    };
    let young = at(1);
    assert_eq!(init(&young, "young").await, "young");
    assert_eq!(init(&at(3), "old").await, "young");
    assert_eq!(init(&young, "same").await, "same");
}

#[tokio::test]
async fn a_restarted_agent_knows_what_it_was_told() {
    let agent = Agent::start();
    let body = r#"{"accessToken":"secret","envVars":{"A":"1"},"sandboxId":"sbx"}"#;
    agent.http("POST", "/init", &[], body).await;
    let state = fs::metadata(agent.path("state.json")).unwrap();
    assert_eq!(state.permissions().mode() & 0o777, 0o600);
    let agent = Agent::start_in(agent.kill(), &[]);
    assert_eq!(agent.http("GET", "/envs", &[], "").await.0, 401);
    let (_, _, body) = agent
        .http("GET", "/envs", &[("x-access-token", "secret")], "")
        .await;
    assert_eq!(
        json_of(&body),
        json!({"A": "1", "E2B_SANDBOX": "true", "E2B_SANDBOX_ID": "sbx"})
    );
}

#[tokio::test]
async fn private_paths_answer_only_the_private_peer() {
    let agent = Agent::start_with(&["--private-peer", "192.0.2.1"]);
    for (method, path) in [("POST", "/init"), ("GET", "/tunnel?port=1")] {
        let (status, _, body) = agent.http(method, path, &[], "{}").await;
        assert_eq!(
            (status, &json_of(&body)["code"]),
            (403, &json!(403)),
            "{path}"
        );
    }
    assert_eq!(agent.http("GET", "/health", &[], "").await.0, 204);
    let agent = Agent::start_with(&["--private-peer", "127.0.0.1"]);
    assert_eq!(agent.http("POST", "/init", &[], "{}").await.0, 204);
}

#[tokio::test]
async fn a_tunnel_carries_bytes_both_ways_until_both_sides_close() {
    let agent = Agent::start();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let service = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut received = Vec::new();
        stream.read_to_end(&mut received).await.unwrap();
        stream.write_all(&received).await.unwrap();
        received.len()
    });
    let headers = [("connection", "Upgrade"), ("upgrade", "aenv-tunnel")];
    let path = format!("/tunnel?port={port}");
    let response = agent.send(request("GET", &path, &headers, "")).await;
    assert_eq!(response.status(), 101);
    let tunnel = TokioIo::new(hyper::upgrade::on(response).await.unwrap());
    let (mut reader, mut writer) = tokio::io::split(tunnel);
    let sent: Vec<u8> = (0..3_000_000u32).map(|number| number as u8).collect();
    let writing = {
        let sent = sent.clone();
        tokio::spawn(async move {
            writer.write_all(&sent).await.unwrap();
            writer.shutdown().await.unwrap();
            writer
        })
    };
    let mut received = Vec::new();
    reader.read_to_end(&mut received).await.unwrap();
    writing.await.unwrap();
    assert_eq!(service.await.unwrap(), sent.len());
    assert!(received == sent);
}

#[tokio::test]
async fn a_tunnel_to_nowhere_says_so() {
    let agent = Agent::start();
    let closed = TcpListener::bind("127.0.0.1:0")
        .await
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let headers = [("connection", "Upgrade"), ("upgrade", "aenv-tunnel")];
    let (status, _, body) = agent
        .http("GET", &format!("/tunnel?port={closed}"), &headers, "")
        .await;
    assert_eq!(status, 502);
    let expected = format!("port {closed} is not open");
    assert!(json_of(&body)["message"]
        .as_str()
        .unwrap()
        .starts_with(&expected));
    assert_eq!(
        agent.http("GET", "/tunnel?port=x", &headers, "").await.0,
        400
    );
    assert_eq!(agent.http("GET", "/tunnel?port=80", &[], "").await.0, 426);
}

#[tokio::test]
async fn calls_with_a_token_work_as_without() {
    let agent = Agent::start();
    agent
        .http("POST", "/init", &[], r#"{"accessToken":"secret"}"#)
        .await;
    let outcome = agent
        .start_process(shell("echo in"), &[("x-access-token", "secret")])
        .await
        .finish()
        .await;
    assert_eq!(outcome.text(), "in\n");
}

#[tokio::test]
async fn the_ready_datagram_is_sent_three_times() {
    let socket = tokio::net::UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let target = socket.local_addr().unwrap().to_string();
    let _agent = Agent::start_with(&["--ready", &target]);
    for _ in 0..3 {
        let mut buffer = [0; 16];
        let len = socket.recv(&mut buffer).await.unwrap();
        assert_eq!(&buffer[..len], b"ready");
    }
}
