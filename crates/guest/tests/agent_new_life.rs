//! What `/init` does for a new life of a memory that was saved: the generation file, failures that are named, the clock in
//! the answer, and connections of the former life, which are real ones between network namespaces of this machine.

mod support;

use std::{
    fs,
    io::{self, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    process::{Child, Command},
    sync::mpsc,
    thread,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use base64::{engine::general_purpose::STANDARD, Engine};
use nix::sched::{unshare, CloneFlags};
use serde_json::json;
use support::{Agent, CAP_SYS_ADMIN};

/// Longer than any of this takes, so that a connection that should end cannot block a test for ever.
const PATIENCE: Duration = Duration::from_secs(60);

fn body(life: &str, sandbox: &str) -> String {
    json!({"lifecycleID": life, "sandboxId": sandbox, "entropy": STANDARD.encode([7; 32])})
        .to_string()
}

async fn init(agent: &Agent, body: &str) -> (u16, String) {
    let (status, _, body) = agent.http("POST", "/init", &[], body).await;
    (status, String::from_utf8(body.to_vec()).unwrap())
}

fn generation(agent: &Agent) -> (String, String) {
    let text = fs::read_to_string(agent.path("generation")).unwrap();
    let (life, id) = text.trim_end().split_once(' ').unwrap();
    (life.to_owned(), id.to_owned())
}

#[tokio::test]
async fn each_life_has_a_generation_of_its_own() {
    let agent = Agent::start();
    assert!(!agent.path("generation").exists());
    assert_eq!(init(&agent, &body("1", "a")).await.0, 204);
    let first = generation(&agent);
    assert_eq!(first.0, "1");
    // Said again, it is the same life; so it is for a request without names.
    for same in [&body("1", "a"), r#"{"envVars":{"A":"1"}}"#] {
        assert_eq!(init(&agent, same).await.0, 204);
        assert_eq!(generation(&agent), first);
    }
    let mut seen = vec![first.1];
    for (life, sandbox) in [("2", "a"), ("2", "b"), ("1", "b")] {
        assert_eq!(init(&agent, &body(life, sandbox)).await.0, 204);
        let (found, id) = generation(&agent);
        assert_eq!(found, life);
        assert!(!seen.contains(&id), "{id} was there before");
        seen.push(id);
    }
    // An agent that was killed and started again goes on with the same life.
    let agent = Agent::start_in(agent.kill(), &[]);
    let before = generation(&agent);
    assert_eq!(init(&agent, &body("1", "b")).await.0, 204);
    assert_eq!(generation(&agent), before);
}

#[tokio::test]
async fn a_reset_that_fails_is_named_and_changes_no_settings() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("generation")).unwrap();
    let agent = Agent::start_in(dir, &[]);
    let (status, message) = init(&agent, &body("1", "a")).await;
    assert_eq!(status, 500);
    assert!(
        message.contains("cannot write the generation file"),
        "{message}"
    );
    assert_eq!(
        agent.http("GET", "/envs", &[], "").await.2,
        r#"{"E2B_SANDBOX":"true"}"#
    );

    let agent = Agent::start_without(&[CAP_SYS_ADMIN], tempfile::tempdir().unwrap(), &[]);
    let (status, message) = init(&agent, &body("1", "a")).await;
    assert_eq!(status, 500);
    assert!(
        message.contains("cannot reseed the random generator"),
        "{message}"
    );
    let (status, message) = init(&agent, r#"{"hostname":"x"}"#).await;
    assert_eq!(status, 500);
    assert!(message.contains("cannot set the hostname"), "{message}");
    assert!(!agent.path("generation").exists());

    // No agent of these tests may set the clock, so a wrong time cannot be repaired.
    let (status, message) = init(&agent, r#"{"timestamp":"2020-01-01T00:00:00Z"}"#).await;
    assert_eq!(status, 500);
    assert!(message.contains("cannot set the clock"), "{message}");
}

#[tokio::test]
async fn the_answer_tells_the_guests_time() {
    let now = || {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        u64::try_from(since.as_nanos()).unwrap()
    };
    let agent = Agent::start();
    let before = now();
    let (status, headers, _) = agent.http("POST", "/init", &[], &body("1", "a")).await;
    assert_eq!(status, 204);
    let told: u64 = headers["x-aenv-clock"].to_str().unwrap().parse().unwrap();
    assert!((before..=now()).contains(&told));
}

fn ip(arguments: &str) {
    let done = Command::new("ip")
        .args(arguments.split(' '))
        .output()
        .unwrap();
    assert!(
        done.status.success(),
        "ip {arguments}: {}",
        String::from_utf8_lossy(&done.stderr)
    );
}

/// A thread in a network namespace of its own that runs what it is sent.
struct Namespace {
    tasks: mpsc::Sender<Box<dyn FnOnce() + Send>>,
    thread: i32,
}

impl Namespace {
    fn new() -> Self {
        let (tasks, queue) = mpsc::channel::<Box<dyn FnOnce() + Send>>();
        let (tell, told) = mpsc::channel();
        thread::spawn(move || {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            ip("link set lo up");
            tell.send(nix::unistd::gettid().as_raw()).unwrap();
            queue.iter().for_each(|task| task());
        });
        Self {
            tasks,
            thread: told.recv().unwrap(),
        }
    }

    fn run<T: Send + 'static>(&self, task: impl FnOnce() -> T + Send + 'static) -> T {
        let (tell, told) = mpsc::channel();
        self.tasks
            .send(Box::new(move || drop(tell.send(task()))))
            .unwrap();
        told.recv().expect("the task failed")
    }

    /// A connection between two addresses; the first end is the one that connected.
    fn connect(&self, to: &Self, address: &str) -> (TcpStream, TcpStream) {
        let address = address.to_owned();
        let listener = to.run(move || TcpListener::bind(address).unwrap());
        let target = listener.local_addr().unwrap();
        let client = self.run(move || TcpStream::connect(target).unwrap());
        let server = listener.accept().unwrap().0;
        for end in [&client, &server] {
            end.set_read_timeout(Some(PATIENCE)).unwrap();
        }
        (client, server)
    }
}

/// Killed when dropped.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn is_alive((one, other): &(TcpStream, TcpStream)) -> bool {
    let mut byte = [0];
    let sent = (&mut &*one).write_all(b"x");
    sent.is_ok() && matches!((&mut &*other).read(&mut byte), Ok(1))
}

fn post_init(namespace: &Namespace, agent: SocketAddr, body: String) -> String {
    namespace.run(move || {
        let mut stream = TcpStream::connect(agent).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let head = format!(
            "POST /init HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all((head + &body).as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    })
}

/// Two machines on one link, the second with an inner network that a thread of a third namespace is in.
#[test]
fn connections_of_the_former_life_end_and_inner_ones_go_on() {
    let (world, guest, inner) = (Namespace::new(), Namespace::new(), Namespace::new());
    let (world_thread, inner_thread) = (world.thread, inner.thread);
    guest.run(move || {
        ip(&format!(
            "link add eth0 type veth peer name eth0 netns {world_thread}"
        ));
        ip("addr add 192.0.2.1/30 dev eth0");
        ip("link set eth0 up");
        ip(&format!(
            "link add bridge0 type veth peer name eth0 netns {inner_thread}"
        ));
        ip("addr add 198.51.100.1/24 dev bridge0");
        ip("link set bridge0 up");
    });
    world.run(|| {
        ip("addr add 192.0.2.2/30 dev eth0");
        ip("link set eth0 up");
    });
    inner.run(|| {
        ip("addr add 198.51.100.2/24 dev eth0");
        ip("link set eth0 up");
        ip("route add default via 198.51.100.1");
    });
    world.run(|| ip("route add 198.51.100.0/24 via 192.0.2.1"));
    guest.run(|| fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap());

    // Namespaces are found by the processes in them.
    let _container = inner.run(|| Process(Command::new("sleep").arg("3600").spawn().unwrap()));
    let agent = guest.run(|| {
        let dir = tempfile::tempdir().unwrap();
        Agent::start_in(dir, &["--listen", "0.0.0.0:0", "--uplink", "eth0"])
    });
    let address = SocketAddr::from(([192, 0, 2, 1], agent.address.port()));
    assert!(post_init(&world, address, body("1", "a")).starts_with("HTTP/1.1 204"));

    let outward = guest.connect(&world, "192.0.2.2:0");
    let inward = world.connect(&guest, "192.0.2.1:0");
    // An IPv6 socket that talks IPv4.
    let mapped = guest.connect(&world, "[::ffff:192.0.2.2]:0");
    let nested = inner.connect(&world, "192.0.2.2:0");
    let doomed = [&outward, &inward, &mapped, &nested];
    let loopback = guest.connect(&guest, "127.0.0.1:0");
    let to_itself = guest.connect(&guest, "192.0.2.1:0");
    let between = guest.connect(&inner, "198.51.100.2:0");
    let kept = [&loopback, &to_itself, &between];
    let unaccepted = guest.run(|| TcpListener::bind("192.0.2.1:0").unwrap());
    let waiting = unaccepted.local_addr().unwrap();
    let caller = world.run(move || TcpStream::connect(waiting).unwrap());
    caller.set_read_timeout(Some(PATIENCE)).unwrap();

    assert!(post_init(&world, address, body("1", "a")).starts_with("HTTP/1.1 204"));
    assert!(
        doomed.into_iter().chain(kept).all(is_alive),
        "the same life goes on"
    );

    let answer = post_init(&world, address, body("2", "a"));
    assert!(answer.starts_with("HTTP/1.1 204"), "{answer}");
    assert!(kept.into_iter().all(is_alive));
    let mut byte = [0];
    for (number, ours) in [&outward.0, &inward.1, &mapped.0, &nested.0]
        .into_iter()
        .enumerate()
    {
        let error = (&mut &*ours).read(&mut byte).expect_err("still open");
        assert_eq!(error.kind(), io::ErrorKind::ConnectionAborted, "{number}");
    }
    for theirs in [&outward.1, &inward.0, &mapped.1, &nested.1, &caller] {
        let error = (&mut &*theirs).read(&mut byte).expect_err("still open");
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
    }
    // Listeners are not connections.
    let again = world.run(move || TcpStream::connect(waiting));
    assert!(again.is_ok());
}
