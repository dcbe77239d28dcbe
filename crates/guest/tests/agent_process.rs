//! `process.Process` over the wire: starting, users, directories, environment, input, signals, terminals, codecs.

mod support;

use std::collections::BTreeMap;

use futures_util::stream;
use http::Request;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use prost::Message;
use serde_json::json;
use support::{
    basic, frame,
    proto::process::{
        process_event::{self, data_event::Output},
        ListRequest, ListResponse, ProcessConfig, StartRequest, StartResponse,
    },
    request, shell, Agent, Call,
};

#[tokio::test]
async fn start_comes_first_and_the_end_tells_the_exit() {
    let agent = Agent::start();
    let mut call = agent
        .start_process(shell("echo out; echo err >&2; exit 3"), &[])
        .await;
    assert_eq!(call.response.status, 200);
    assert_eq!(
        call.response.headers["content-type"],
        "application/connect+json"
    );
    assert_ne!(call.pid().await, 0);
    let outcome = call.finish().await;
    assert_eq!(
        (&outcome.stdout[..], &outcome.stderr[..]),
        (&b"out\n"[..], &b"err\n"[..])
    );
    let end = outcome.end.unwrap();
    assert_eq!(
        end,
        json!({"exitCode": 3, "exited": true, "status": "exit status 3", "error": "exit status 3"})
    );
    assert_eq!(outcome.trailer, json!({}));
}

#[tokio::test]
async fn exit_zero_omits_code_and_error() {
    let outcome = Agent::start().sh("true").await;
    assert_eq!(
        outcome.end,
        Some(json!({"exited": true, "status": "exit status 0"}))
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_hundred_parallel_commands_keep_their_exits() {
    let agent = std::sync::Arc::new(Agent::start());
    let mut tasks = tokio::task::JoinSet::new();
    for number in 0..300i64 {
        let agent = std::sync::Arc::clone(&agent);
        tasks.spawn(async move {
            // Every third leaves an orphan, every fifth dies by a signal.
            let orphan = if number % 3 == 0 { "(true &) ;" } else { "" };
            let end = match number % 5 {
                0 => "kill -KILL $$".to_owned(),
                1 => "kill -TERM $$".to_owned(),
                _ => format!("exit {}", number % 251),
            };
            let outcome = agent.sh(&format!("{orphan} echo {number}; {end}")).await;
            assert_eq!(outcome.text(), format!("{number}\n"));
            let status = outcome.end.as_ref().unwrap()["status"]
                .as_str()
                .unwrap()
                .to_owned();
            match number % 5 {
                0 => assert_eq!(
                    (outcome.exit_code(), status.as_str()),
                    (-1, "signal: killed")
                ),
                1 => assert_eq!(
                    (outcome.exit_code(), status.as_str()),
                    (-1, "signal: terminated")
                ),
                _ => assert_eq!(outcome.exit_code(), number % 251),
            }
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
    assert_eq!(agent.unary("List", json!({})).await, (200, json!({})));
}

#[tokio::test]
async fn a_missing_program_ends_like_in_a_shell() {
    let agent = Agent::start();
    for (cmd, code, text) in [
        (
            "no-such-program",
            127,
            "no-such-program: command not found\n",
        ),
        ("/no/such", 127, "/no/such: No such file or directory\n"),
        ("/etc/passwd", 126, "/etc/passwd: Permission denied\n"),
    ] {
        let outcome = agent
            .start_process(json!({"process": {"cmd": cmd}}), &[])
            .await
            .finish()
            .await;
        assert_eq!(
            (
                outcome.exit_code(),
                String::from_utf8(outcome.stderr).unwrap().as_str()
            ),
            (code, text)
        );
    }
}

#[tokio::test]
async fn a_script_without_interpreter_line_runs_under_sh() {
    use std::os::unix::fs::PermissionsExt;
    let agent = Agent::start();
    let script = agent.path("script");
    std::fs::write(&script, "echo \"$0 $1\"\n").unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    let message = json!({"process": {"cmd": script, "args": ["x"]}});
    let outcome = agent.start_process(message, &[]).await.finish().await;
    assert_eq!(outcome.text(), format!("{} x\n", script.display()));
}

#[tokio::test]
async fn users_get_their_ids_groups_and_home() {
    let agent = Agent::start();
    let script = "id -u; id -g; echo $HOME $USER $LOGNAME; umask; pwd";
    let outcome = agent
        .start_process(shell(script), &[("authorization", &basic("nobody"))])
        .await
        .finish()
        .await;
    assert_eq!(
        outcome.text(),
        "65534\n65534\n/nonexistent nobody nobody\n0022\n/\n"
    );
    let outcome = agent
        .start_process(shell("id -u; pwd"), &[("authorization", &basic("root"))])
        .await
        .finish()
        .await;
    assert_eq!(outcome.text(), "0\n/root\n");
}

#[tokio::test]
async fn unknown_users_are_unauthenticated() {
    let agent = Agent::start();
    let outcome = agent
        .start_process(shell("true"), &[("authorization", &basic("who"))])
        .await
        .finish()
        .await;
    assert_eq!(outcome.error_code(), "unauthenticated");
    assert_eq!(
        outcome.trailer["error"]["message"],
        "invalid username: 'who'"
    );
    let headers = [
        ("content-type", "application/json"),
        ("authorization", &basic("who")),
    ];
    let (status, _, body) = agent
        .http("POST", "/process.Process/List", &headers, "{}")
        .await;
    assert_eq!(status, 401);
    assert!(String::from_utf8_lossy(&body).contains(r#""code":"unauthenticated""#));
}

#[tokio::test]
async fn cwd_is_checked_and_relative_to_the_home() {
    let agent = Agent::start();
    let run = |cwd: &str| json!({"process": {"cmd": "pwd", "cwd": cwd}});
    let outcome = agent
        .start_process(run("/no/such"), &[])
        .await
        .finish()
        .await;
    assert_eq!(outcome.error_code(), "invalid_argument");
    assert_eq!(
        outcome.trailer["error"]["message"],
        "cwd '/no/such' does not exist"
    );
    let outcome = agent
        .start_process(run("../usr"), &[("authorization", &basic("root"))])
        .await
        .finish()
        .await;
    assert_eq!(outcome.text(), "/usr\n");
    let outcome = agent
        .start_process(run("/root"), &[("authorization", &basic("nobody"))])
        .await
        .finish()
        .await;
    assert_eq!(outcome.error_code(), "invalid_argument");
}

#[tokio::test]
async fn the_environment_is_only_what_the_contract_says() {
    let agent = Agent::start();
    let (status, ..) = agent
        .http(
            "POST",
            "/init",
            &[],
            r#"{"envVars":{"A":"sandbox","B":"sandbox"},"sandboxId":"sbx","templateId":"tpl"}"#,
        )
        .await;
    assert_eq!(status, 204);
    let message = json!({"process": {"cmd": "env", "envs": {"B": "request", "C": "a b\nc"}}});
    let outcome = agent
        .start_process(message, &[("authorization", &basic("root"))])
        .await
        .finish()
        .await;
    let text = outcome.text().replace("C=a b\nc\n", "");
    let env: BTreeMap<_, _> = text
        .lines()
        .map(|line| line.split_once('=').unwrap())
        .collect();
    let names: Vec<_> = env.keys().copied().collect();
    assert_eq!(
        names,
        [
            "A",
            "B",
            "E2B_SANDBOX",
            "E2B_SANDBOX_ID",
            "E2B_TEMPLATE_ID",
            "HOME",
            "LOGNAME",
            "PATH",
            "USER"
        ]
    );
    assert_eq!(
        (env["A"], env["B"], env["E2B_SANDBOX_ID"]),
        ("sandbox", "request", "sbx")
    );
}

#[tokio::test]
async fn children_inherit_nothing_of_the_agent() {
    let outcome = Agent::start()
        .sh("ls /proc/self/fd; grep -E '^Sig(Blk|Ign)' /proc/self/status; cut -d' ' -f19 /proc/self/stat")
        .await;
    assert_eq!(
        outcome.text(),
        "0\n1\n2\n3\nSigBlk:\t0000000000000000\nSigIgn:\t0000000000000000\n0\n"
    );
}

#[tokio::test]
async fn stdin_is_a_pipe_unless_refused() {
    let agent = Agent::start();
    let closed = agent
        .start_process(json!({"process": {"cmd": "cat"}, "stdin": false}), &[])
        .await;
    assert_eq!(closed.finish().await.exit_code(), 0);

    let mut call = agent
        .start_process(json!({"process": {"cmd": "cat"}, "tag": "cat"}), &[])
        .await;
    let pid = call.pid().await;
    // "hello" and a byte that is no UTF-8.
    let input = json!({"process": {"pid": pid}, "input": {"stdin": "aGVsbG//"}});
    assert_eq!(
        agent.unary("SendInput", input.clone()).await,
        (200, json!({}))
    );
    let close = json!({"process": {"tag": "cat"}});
    assert_eq!(agent.unary("CloseStdin", close).await, (200, json!({})));
    let outcome = call.finish().await;
    assert_eq!(outcome.stdout, b"hello\xff");
    let (status, error) = agent.unary("SendInput", input).await;
    assert_eq!((status, &error["code"]), (404, &json!("not_found")));
}

#[tokio::test]
async fn stdin_may_be_closed_twice_but_not_written_then() {
    let agent = Agent::start();
    let message = json!({"process": {"cmd": "sleep", "args": ["600"]}});
    let mut call = agent.start_process(message, &[]).await;
    let process = json!({"pid": call.pid().await});
    for _ in 0..2 {
        let closed = agent.unary("CloseStdin", json!({"process": process}));
        assert_eq!(closed.await, (200, json!({})));
    }
    let input = json!({"process": process, "input": {"stdin": "eA=="}});
    let (status, error) = agent.unary("SendInput", input).await;
    assert_eq!((status, &error["code"]), (500, &json!("internal")));
    let kill = json!({"process": process, "signal": "SIGNAL_SIGKILL"});
    agent.unary("SendSignal", kill).await;
    call.finish().await;
}

#[tokio::test]
async fn input_of_the_wrong_kind_is_internal() {
    let agent = Agent::start();
    let mut call = agent
        .start_process(
            json!({"process": {"cmd": "sleep", "args": ["60"]}, "stdin": false}),
            &[],
        )
        .await;
    let process = json!({"pid": call.pid().await});
    for input in [json!({"stdin": "eA=="}), json!({"pty": "eA=="})] {
        let (status, error) = agent
            .unary("SendInput", json!({"process": process, "input": input}))
            .await;
        assert_eq!((status, &error["code"]), (500, &json!("internal")));
    }
    agent
        .unary(
            "SendSignal",
            json!({"process": process, "signal": "SIGNAL_SIGKILL"}),
        )
        .await;
    call.finish().await;
}

#[tokio::test]
async fn stream_input_keeps_the_order_over_chunked_http() {
    let agent = Agent::start();
    let mut call = agent
        .start_process(json!({"process": {"cmd": "cat"}}), &[])
        .await;
    let pid = call.pid().await;
    let mut messages = vec![
        json!({"start": {"process": {"pid": pid}}}),
        json!({"keepalive": {}}),
    ];
    let mut expected = Vec::new();
    for number in 0..500 {
        let text = format!("line {number}\n");
        let encoded = base64::Engine::encode(&base64::engine::general_purpose::STANDARD, &text);
        messages.push(json!({"data": {"input": {"stdin": encoded}}}));
        expected.extend_from_slice(text.as_bytes());
    }
    // Chunks that do not respect the frames.
    let wire: Vec<u8> = messages
        .iter()
        .flat_map(|message| frame(message.to_string().as_bytes()))
        .collect();
    let chunks: Vec<_> = wire
        .chunks(97)
        .map(|chunk| Ok(Frame::data(chunk.to_vec().into())))
        .collect();
    let request = Request::post("/process.Process/StreamInput")
        .header("host", "agent")
        .header("content-type", "application/connect+json")
        .body(BodyExt::boxed_unsync(StreamBody::new(stream::iter(chunks))))
        .unwrap();
    let mut reply = Call::new(agent.send(request).await);
    assert_eq!(reply.frame().await.unwrap(), (0, "{}".into()));
    assert_eq!(reply.frame().await.unwrap(), (2, "{}".into()));
    agent
        .unary("CloseStdin", json!({"process": {"pid": pid}}))
        .await;
    assert_eq!(call.finish().await.stdout, expected);
}

#[tokio::test]
async fn stream_input_must_begin_with_a_start() {
    let agent = Agent::start();
    let first = json!({"data": {"input": {"stdin": "eA=="}}});
    let outcome = agent.stream("StreamInput", first, &[]).await.finish().await;
    assert_eq!(outcome.error_code(), "invalid_argument");
    let first = json!({"start": {"process": {"pid": 4_000_000}}});
    let outcome = agent.stream("StreamInput", first, &[]).await.finish().await;
    assert_eq!(outcome.error_code(), "not_found");
}

#[tokio::test]
async fn signals_reach_the_process() {
    let agent = Agent::start();
    for (signal, status) in [
        (json!("SIGNAL_SIGKILL"), "signal: killed"),
        (json!("SIGNAL_SIGTERM"), "signal: terminated"),
        (json!(15), "signal: terminated"),
    ] {
        let mut call = agent
            .start_process(
                json!({"process": {"cmd": "sleep", "args": ["60"]}, "tag": "x"}),
                &[],
            )
            .await;
        call.pid().await;
        let message = json!({"process": {"tag": "x"}, "signal": signal});
        assert_eq!(agent.unary("SendSignal", message).await, (200, json!({})));
        let end = call.finish().await.end.unwrap();
        assert_eq!(
            end,
            json!({"exitCode": -1, "status": status, "error": status})
        );
    }
}

#[tokio::test]
async fn odd_signals_and_selectors_have_their_codes() {
    let agent = Agent::start();
    let mut call = agent
        .start_process(json!({"process": {"cmd": "cat"}, "tag": "t"}), &[])
        .await;
    let pid = call.pid().await;
    for signal in [json!(0), json!(2), json!("SIGNAL_SIGINT"), json!(null)] {
        let (status, error) = agent
            .unary(
                "SendSignal",
                json!({"process": {"pid": pid}, "signal": signal}),
            )
            .await;
        assert_eq!(
            (status, &error["code"]),
            (501, &json!("unimplemented")),
            "{signal}"
        );
    }
    for (selector, status, code) in [
        (json!({"pid": 4_000_000}), 404, "not_found"),
        (json!({"tag": "other"}), 404, "not_found"),
        (json!({}), 501, "unimplemented"),
    ] {
        for method in ["SendSignal", "SendInput", "CloseStdin", "Update"] {
            let (seen, error) = agent
                .unary(method, json!({"process": selector, "signal": 9}))
                .await;
            assert_eq!(
                (seen, &error["code"]),
                (status, &json!(code)),
                "{method} {selector}"
            );
        }
    }
    let (_, list) = agent.unary("List", json!({})).await;
    assert_eq!(list["processes"][0]["pid"], pid);
    assert_eq!(list["processes"][0]["tag"], "t");
    assert_eq!(list["processes"][0]["config"]["cmd"], "cat");
    agent
        .unary("CloseStdin", json!({"process": {"pid": pid}}))
        .await;
    call.finish().await;
}

#[tokio::test]
async fn a_terminal_has_a_size_and_can_be_resized() {
    let agent = Agent::start();
    let script =
        "test -t 0 && echo is-tty; stty size; read x; stty size; read y || echo eof; exit 5";
    let mut message = shell(script);
    message["pty"] = json!({"size": {"cols": 101, "rows": 33}});
    let mut call = agent.start_process(message, &[]).await;
    let process = json!({"pid": call.pid().await});
    call.expect("pty", "33 101").await;
    let resize = json!({"process": process, "pty": {"size": {"cols": 120, "rows": 40}}});
    assert_eq!(agent.unary("Update", resize).await, (200, json!({})));
    agent
        .unary(
            "SendInput",
            json!({"process": process, "input": {"pty": "DQ=="}}),
        )
        .await;
    call.expect("pty", "40 120").await;
    let (status, error) = agent
        .unary(
            "SendInput",
            json!({"process": process, "input": {"stdin": "eA=="}}),
        )
        .await;
    assert_eq!((status, &error["code"]), (500, &json!("internal")));
    let (status, error) = agent.unary("CloseStdin", json!({"process": process})).await;
    assert_eq!((status, &error["code"]), (500, &json!("unknown")));
    agent
        .unary(
            "SendInput",
            json!({"process": process, "input": {"pty": "BA=="}}),
        )
        .await;
    let outcome = call.finish().await;
    assert!(String::from_utf8_lossy(&outcome.pty).contains("eof"));
    assert_eq!(outcome.exit_code(), 5);
}

#[tokio::test]
async fn control_c_interrupts_what_runs_in_a_terminal() {
    let agent = Agent::start();
    let mut message = shell("echo ready; exec cat");
    message["pty"] = json!({});
    let mut call = agent
        .start_process(message, &[("authorization", &basic("nobody"))])
        .await;
    let process = json!({"pid": call.pid().await});
    call.expect("pty", "ready").await;
    agent
        .unary(
            "SendInput",
            json!({"process": process, "input": {"pty": "Aw=="}}),
        )
        .await;
    assert_eq!(
        call.finish().await.end.unwrap()["status"],
        "signal: interrupt"
    );
}

#[tokio::test]
async fn the_protobuf_codec_says_the_same() {
    let agent = Agent::start();
    let start = StartRequest {
        process: Some(ProcessConfig {
            cmd: "sh".into(),
            args: vec!["-c".into(), "echo hi; exit 2".into()],
            ..Default::default()
        }),
        ..Default::default()
    };
    let headers = [("content-type", "application/connect+proto")];
    let response = agent
        .send(request(
            "POST",
            "/process.Process/Start",
            &headers,
            frame(&start.encode_to_vec()),
        ))
        .await;
    assert_eq!(
        response.headers()["content-type"],
        "application/connect+proto"
    );
    let mut call = Call::new(response);
    let (mut output, mut code) = (Vec::new(), None);
    loop {
        let (flags, payload) = call.frame().await.unwrap();
        if flags == 2 {
            assert_eq!(payload, "{}");
            break;
        }
        match StartResponse::decode(payload)
            .unwrap()
            .event
            .unwrap()
            .event
            .unwrap()
        {
            process_event::Event::Start(start) => assert_ne!(start.pid, 0),
            process_event::Event::Data(data) => match data.output.unwrap() {
                Output::Stdout(bytes) => output.extend(bytes),
                other => panic!("{other:?}"),
            },
            process_event::Event::End(end) => code = Some(end.exit_code),
            process_event::Event::Keepalive(_) => {}
        }
    }
    assert_eq!((&output[..], code), (&b"hi\n"[..], Some(2)));

    let headers = [("content-type", "application/proto")];
    let response = agent
        .send(request(
            "POST",
            "/process.Process/List",
            &headers,
            ListRequest {}.encode_to_vec(),
        ))
        .await;
    assert_eq!(response.headers()["content-type"], "application/proto");
    let body = response.into_body().collect().await.unwrap().to_bytes();
    assert_eq!(ListResponse::decode(body).unwrap(), ListResponse::default());
}

#[tokio::test]
async fn malformed_calls_are_answered_in_the_protocol() {
    let agent = Agent::start();
    let json = [("content-type", "application/json")];
    let (status, _, body) = agent
        .http("POST", "/process.Process/List", &json, "{")
        .await;
    assert_eq!(status, 400);
    assert!(String::from_utf8_lossy(&body).contains(r#""code":"invalid_argument""#));
    let (status, ..) = agent
        .http(
            "POST",
            "/process.Process/List",
            &[("content-type", "text/plain")],
            "x",
        )
        .await;
    assert_eq!(status, 415);
    let (status, ..) = agent.http("GET", "/process.Process/List", &[], "").await;
    assert_eq!(status, 405);
    let headers = [
        ("content-type", "application/json"),
        ("connect-protocol-version", "1"),
    ];
    let (status, _, body) = agent
        .http("POST", "/process.Process/Nope", &headers, "{}")
        .await;
    assert_eq!(status, 404);
    assert!(String::from_utf8_lossy(&body).contains(r#""code":"unimplemented""#));

    let headers = [("content-type", "application/connect+json")];
    let truncated = &frame(b"{\"process\":{}}")[..9];
    for body in [
        &b""[..],
        truncated,
        &[0, 0xff, 0xff, 0xff, 0xff][..],
        &[1, 0, 0, 0, 0][..],
    ] {
        let response = agent
            .send(request(
                "POST",
                "/process.Process/Start",
                &headers,
                body.to_vec(),
            ))
            .await;
        assert_eq!(response.status(), 200);
        assert_ne!(Call::new(response).finish().await.error_code(), "");
    }
}
