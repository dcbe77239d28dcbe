//! Long and difficult streams: readers that leave, come back, stall or are slow; deadlines; keepalives; cgroups.

mod support;

use std::{fs, path::PathBuf};

use http_body_util::BodyExt;
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::json;
use support::{frame, request, shell, Agent, Call};
use tokio::net::TcpStream;

const MIB: usize = 1 << 20;

#[tokio::test]
async fn a_deadline_kills_the_process_and_ends_the_stream() {
    let agent = Agent::start();
    let outcome = agent
        .start_process(
            json!({"process": {"cmd": "sleep", "args": ["600"]}}),
            &[("connect-timeout-ms", "300")],
        )
        .await
        .finish()
        .await;
    assert_eq!(outcome.error_code(), "deadline_exceeded");
    let again = agent
        .stream("Connect", json!({"process": {"pid": outcome.pid}}), &[])
        .await
        .finish()
        .await;
    assert_eq!(again.end.unwrap()["status"], "signal: killed");
}

#[tokio::test]
async fn a_deadline_holds_after_the_client_has_left() {
    let agent = Agent::start();
    let mut call = agent
        .start_process(
            json!({"process": {"cmd": "sleep", "args": ["600"]}}),
            &[("connect-timeout-ms", "500")],
        )
        .await;
    let pid = call.pid().await;
    drop(call);
    let outcome = agent
        .stream("Connect", json!({"process": {"pid": pid}}), &[])
        .await
        .finish()
        .await;
    assert_eq!(outcome.end.unwrap()["status"], "signal: killed");
}

#[tokio::test]
async fn a_deadline_on_connect_bounds_only_the_stream() {
    let agent = Agent::start();
    let mut call = agent
        .start_process(
            json!({"process": {"cmd": "cat"}}),
            &[("connect-timeout-ms", "0")],
        )
        .await;
    let process = json!({"pid": call.pid().await});
    let outcome = agent
        .stream(
            "Connect",
            json!({"process": process}),
            &[("connect-timeout-ms", "100")],
        )
        .await
        .finish()
        .await;
    assert_eq!(
        (outcome.error_code(), &outcome.end),
        ("deadline_exceeded", &None)
    );
    agent.unary("CloseStdin", json!({"process": process})).await;
    assert_eq!(call.finish().await.exit_code(), 0);
}

#[tokio::test]
async fn a_client_may_leave_and_come_back() {
    let agent = Agent::start();
    let message = json!({"process": {"cmd": "sh", "args": ["-c", "read x; echo got $x; exit 4"]}, "tag": "job"});
    let mut call = agent.start_process(message, &[]).await;
    let pid = call.pid().await;
    drop(call);
    let mut again = agent
        .stream("Connect", json!({"process": {"tag": "job"}}), &[])
        .await;
    assert_eq!(again.pid().await, pid);
    agent
        .unary(
            "SendInput",
            json!({"process": {"pid": pid}, "input": {"stdin": "aGkK"}}),
        )
        .await;
    let outcome = again.finish().await;
    assert_eq!(
        (outcome.text().as_str(), outcome.exit_code()),
        ("got hi\n", 4)
    );
    // The end is kept for those who come late, by either name, but the process is not listed any more.
    for selector in [json!({"pid": pid}), json!({"tag": "job"})] {
        let late = agent
            .stream("Connect", json!({"process": selector}), &[])
            .await
            .finish()
            .await;
        assert_eq!((late.pid, late.exit_code(), late.stdout.len()), (pid, 4, 0));
    }
    assert_eq!(agent.unary("List", json!({})).await, (200, json!({})));
    let never = agent
        .stream("Connect", json!({"process": {"pid": 4_000_000}}), &[])
        .await
        .finish()
        .await;
    assert_eq!(never.error_code(), "not_found");
}

#[tokio::test]
async fn unread_output_neither_blocks_nor_grows() {
    let agent = Agent::start();
    let mut call = agent
        .start_process(shell("head -c 104857600 /dev/zero; exit 6"), &[])
        .await;
    let pid = call.pid().await;
    drop(call);
    // Nobody reads until the process has ended by itself.
    while agent.unary("List", json!({})).await.1 != json!({}) {}
    let outcome = agent
        .stream("Connect", json!({"process": {"pid": pid}}), &[])
        .await
        .finish()
        .await;
    assert_eq!(outcome.exit_code(), 6);
    assert!(
        agent.peak_memory() < 40 * MIB as u64,
        "{} bytes",
        agent.peak_memory()
    );
}

#[tokio::test]
async fn a_slow_reader_gets_every_byte_in_flat_memory() {
    let agent = Agent::start();
    let mut call = agent
        .start_process(shell("head -c 16777216 /dev/zero"), &[])
        .await;
    let pid = call.pid().await;
    call.event().await.unwrap();
    // While we do something else the process is held back, not drained.
    assert_eq!(
        agent
            .sh("for i in 1 2 3 4 5; do head -c 1000000 /dev/zero | wc -c; done")
            .await
            .exit_code(),
        0
    );
    let (_, list) = agent.unary("List", json!({})).await;
    assert_eq!(list["processes"][0]["pid"], pid);
    let first = 32 << 10;
    let rest = call.finish().await.stdout.len();
    assert!((16 * MIB - first..16 * MIB).contains(&rest), "{rest}");
    assert!(
        agent.peak_memory() < 40 * MIB as u64,
        "{} bytes",
        agent.peak_memory()
    );
}

#[tokio::test]
async fn a_stalled_reader_is_cut_off_and_others_get_everything() {
    let agent = Agent::start();
    let message =
        json!({"process": {"cmd": "sh", "args": ["-c", "read x; head -c 16777216 /dev/zero"]}});
    let mut stalled = agent.start_process(message, &[]).await;
    let pid = stalled.pid().await;
    let mut reader = agent
        .stream("Connect", json!({"process": {"pid": pid}}), &[])
        .await;
    reader.pid().await;
    agent
        .unary(
            "SendInput",
            json!({"process": {"pid": pid}, "input": {"stdin": "Cg=="}}),
        )
        .await;
    let outcome = reader.finish().await;
    assert_eq!((outcome.stdout.len(), outcome.exit_code()), (16 * MIB, 0));
    let outcome = stalled.finish().await;
    assert_eq!(outcome.error_code(), "resource_exhausted");
    assert!(outcome.stdout.len() < 16 * MIB && outcome.end.is_none());
}

#[tokio::test]
async fn keepalives_fill_only_idle_time() {
    let agent = Agent::start();
    let headers = [("keepalive-ping-interval", "1")];
    let quiet = agent
        .start_process(shell("sleep 2.5"), &headers)
        .await
        .finish()
        .await;
    assert!((1..=2).contains(&quiet.keepalives), "{}", quiet.keepalives);
    let connected = agent
        .start_process(shell("sleep 2.5"), &[])
        .await
        .pid()
        .await;
    let quiet = agent
        .stream("Connect", json!({"process": {"pid": connected}}), &headers)
        .await
        .finish()
        .await;
    assert!((1..=2).contains(&quiet.keepalives), "{}", quiet.keepalives);
    let patient = agent
        .start_process(shell("sleep 1.5"), &[("keepalive-ping-interval", "50")])
        .await;
    assert_eq!(patient.finish().await.keepalives, 0);
}

#[tokio::test]
async fn the_end_waits_for_background_children_with_our_pipes() {
    let agent = Agent::start();
    let mut call = agent
        .start_process(json!({"process": {"cmd": "sh", "args": ["-c", "(exec <&3; cat; echo late) 3<&0 & exit 0"]}}), &[])
        .await;
    let pid = call.pid().await;
    // The shell itself is over soon, and then it is not listed; `cat` still holds the pipes.
    while agent.unary("List", json!({})).await.1 != json!({}) {}
    agent
        .unary("CloseStdin", json!({"process": {"pid": pid}}))
        .await;
    let outcome = call.finish().await;
    assert_eq!(
        (outcome.text().as_str(), outcome.exit_code()),
        ("late\n", 0)
    );
}

#[tokio::test]
async fn many_calls_share_one_http2_connection() {
    let agent = Agent::start();
    let stream = TcpStream::connect(agent.address).await.unwrap();
    let (sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
            .await
            .unwrap();
    tokio::spawn(connection);
    let mut tasks = tokio::task::JoinSet::new();
    for number in 0..50i64 {
        let mut sender = sender.clone();
        tasks.spawn(async move {
            let message = shell(&format!("head -c 200000 /dev/zero; exit {number}"));
            let mut request = request(
                "POST",
                "/process.Process/Start",
                &[("content-type", "application/connect+json")],
                frame(message.to_string().as_bytes()),
            );
            request.headers_mut().remove("host");
            *request.uri_mut() = "http://agent/process.Process/Start".parse().unwrap();
            let outcome = Call::new(sender.send_request(request).await.unwrap())
                .finish()
                .await;
            assert_eq!(
                (outcome.stdout.len(), outcome.exit_code()),
                (200_000, number)
            );
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
    let (status, ..) = agent.http("GET", "/health", &[], "").await;
    assert_eq!(status, 204);
}

/// A cgroup v2 directory of our own, if this machine lets us have one.
struct TestCgroup(PathBuf);

impl TestCgroup {
    fn new() -> Option<Self> {
        let root = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"]
            .into_iter()
            .map(PathBuf::from)
            .find(|root| root.join("cgroup.controllers").exists())?;
        let path = root.join(format!("aenv-test-{}", std::process::id()));
        fs::create_dir(&path).ok()?;
        path.join("cgroup.kill").exists().then_some(Self(path))
    }
}

impl Drop for TestCgroup {
    fn drop(&mut self) {
        let _ = fs::write(self.0.join("cgroup.kill"), "1");
        while fs::read_to_string(self.0.join("cgroup.events"))
            .is_ok_and(|events| events.contains("populated 1"))
        {}
        for part in ["agent", "user"] {
            for group in fs::read_dir(self.0.join(part))
                .into_iter()
                .flatten()
                .flatten()
            {
                let _ = fs::remove_dir(group.path());
            }
            let _ = fs::remove_dir(self.0.join(part));
        }
        let _ = fs::remove_dir(&self.0);
    }
}

#[tokio::test]
async fn with_cgroups_sigkill_takes_children_along_and_daemons_survive_an_end() {
    let Some(cgroup) = TestCgroup::new() else {
        eprintln!("skipped: this machine gives us no cgroup v2");
        return;
    };
    let agent = Agent::start_with(&["--cgroup", cgroup.0.to_str().unwrap()]);
    let membership = fs::read_to_string(format!("/proc/{}/cgroup", agent.pid())).unwrap();
    assert!(
        membership
            .lines()
            .any(|line| line.starts_with("0::") && line.ends_with("/agent")),
        "{membership}"
    );

    // The child of the shell holds its pipe, so without the group's kill the end would not come for ten minutes.
    let mut call = agent
        .start_process(shell("sleep 600 & echo started; wait"), &[])
        .await;
    let pid = call.pid().await;
    call.expect("stdout", "started").await;
    agent
        .unary(
            "SendSignal",
            json!({"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"}),
        )
        .await;
    assert_eq!(call.finish().await.end.unwrap()["status"], "signal: killed");

    let outcome = agent
        .sh("nohup sleep 600 >/dev/null 2>&1 & echo $!; cat /proc/self/cgroup")
        .await;
    let text = outcome.text();
    assert!(
        text.lines()
            .any(|line| line.starts_with("0::") && line.contains("/user/")),
        "{text}"
    );
    let daemon: i32 = text.lines().next().unwrap().parse().unwrap();
    assert_eq!(outcome.exit_code(), 0);
    // SAFETY: signal 0 only asks whether the process is there.
    assert_eq!(unsafe { libc::kill(daemon, 0) }, 0);
    // The groups of commands that left nothing behind are gone.
    let groups = || {
        fs::read_dir(cgroup.0.join("user"))
            .unwrap()
            .flatten()
            .filter(|e| e.path().is_dir())
            .count()
    };
    while groups() != 1 {
        agent.sh("true").await;
    }
    drop(agent);
}

#[tokio::test]
async fn a_body_that_never_ends_is_bounded_by_its_deadline() {
    let agent = Agent::start();
    let (_sender, body) = channel_body();
    let request = http::Request::post("/process.Process/StreamInput")
        .header("host", "agent")
        .header("content-type", "application/connect+json")
        .header("connect-timeout-ms", "100")
        .body(body)
        .unwrap();
    let outcome = Call::new(agent.send(request).await).finish().await;
    assert_eq!(outcome.error_code(), "deadline_exceeded");
}

/// A request body that stays open as long as its sender lives.
fn channel_body() -> (tokio::sync::mpsc::Sender<bytes::Bytes>, support::Body) {
    let (sender, receiver) = tokio::sync::mpsc::channel::<bytes::Bytes>(1);
    let frames = futures_util::stream::unfold(receiver, |mut receiver| async move {
        let data = receiver.recv().await?;
        Some((Ok(hyper::body::Frame::data(data)), receiver))
    });
    (
        sender,
        BodyExt::boxed_unsync(http_body_util::StreamBody::new(frames)),
    )
}
