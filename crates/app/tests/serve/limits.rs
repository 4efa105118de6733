//! What is refused, and how.

use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde_json::json;

use super::{Server, client};

const TRAIN: &str = r#"{"model":"gpt2"}"#;

#[test]
fn only_own_names() {
    let server = Server::start(&["--allowed-host", "box.example"]);
    let status = |host: &str| {
        let head = format!("GET /api/v1/health HTTP/1.1\r\nHost: {host}");
        client::request(&server.address, &head, "").status
    };
    assert_eq!(status("localhost"), 200);
    assert_eq!(status("box.example:80"), 200);
    assert_eq!(status("evil.example"), 421);
    assert_eq!(client::request(&server.address, "GET / HTTP/1.0", "").status, 421);
    let page = format!("GET / HTTP/1.1\r\nHost: {}\r\nOrigin: https://evil.example", server.address);
    assert_eq!(client::request(&server.address, &page, "").problem().0, 403);
    let own = format!("GET / HTTP/1.1\r\nHost: {0}\r\nOrigin: http://{0}", server.address);
    assert_eq!(client::request(&server.address, &own, "").status, 200);
}

#[test]
fn bodies_are_json_of_some_size() {
    let server = Server::start(&["--max-body", "4KiB"]);
    let large = json!({"model": "gpt2", "auto_class": "x".repeat(5000)}).to_string();
    assert_eq!(client::post(&server.address, "/train", &large).problem().0, 413);
    for broken in ["", "{", "nonsense", "[1,", "{\"model\": \"gpt2\"} {}", "\u{0}", "{\"model\": 1e999}"] {
        assert_eq!(client::post(&server.address, "/train", broken).problem().0, 400, "{broken:?}");
    }
    let deep = format!("{{\"plan\": {{\"frozen\": {}{}}}}}", "[".repeat(1000), "]".repeat(1000));
    assert_eq!(client::post(&server.address, "/train", &deep).problem().0, 400);
    for wrong in ["3", "null", "[]", "\"gpt2\""] {
        assert_eq!(client::post(&server.address, "/train", wrong).problem().0, 422, "{wrong:?}");
    }
    let plain = format!("POST /api/v1/train HTTP/1.1\r\nHost: {}\r\nContent-Type: text/plain", server.address);
    assert_eq!(client::request(&server.address, &plain, TRAIN).problem().0, 415);
    let bytes = format!(
        "POST /api/v1/train HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\nContent-Length: 3\r\nConnection: close\r\n\r\n\u{1}",
        server.address
    );
    let bytes = [bytes.as_bytes(), &[0xff, 0xfe]].concat();
    assert_eq!(client::raw(&server.address, &bytes).unwrap().problem().0, 400);
    assert_eq!(client::post(&server.address, "/train", TRAIN).status, 200);
}

#[test]
fn addresses_and_methods() {
    let server = Server::start(&[]);
    assert_eq!(server.get("/api/v1/nothing").problem().0, 404);
    assert_eq!(server.get("/../Cargo.toml").problem().0, 404);
    assert_eq!(server.get("/%2e%2e/Cargo.toml").problem().0, 404);
    let answer = server.get("/api/v1/train");
    assert_eq!(answer.problem().0, 405);
    assert_eq!(answer.header("allow"), Some("POST"));
    assert_eq!(server.post("/gpus", &json!({})).problem().0, 405);
    assert_eq!(server.get("/api/v1/models?limit=x").problem().0, 422);
}

#[test]
fn answers_are_protected() {
    let server = Server::start(&[]);
    for answer in
        [server.get("/"), server.get("/api/v1/health"), server.get("/nothing"), server.post("/train", &json!(3))]
    {
        let policy = answer.header("content-security-policy").unwrap();
        assert!(
            policy.starts_with("default-src 'none'; script-src 'self';") && policy.contains("frame-ancestors 'none'")
        );
        assert_eq!(answer.header("x-content-type-options"), Some("nosniff"));
        assert_eq!(answer.header("x-frame-options"), Some("DENY"));
        assert_eq!(answer.header("referrer-policy"), Some("no-referrer"));
        assert!(answer.header("access-control-allow-origin").is_none());
    }
}

/// Whatever a name says, nothing but the catalogue is looked at.
#[test]
fn paths_and_addresses_are_no_models() {
    let server = Server::start(&[]);
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("config.json");
    std::fs::write(&config, r#"{"model_type": "gpt2", "secret": 1}"#).unwrap();
    let names = [
        config.to_str().unwrap(),
        folder.path().to_str().unwrap(),
        "/etc/passwd",
        "../../etc/passwd",
        "./Cargo.toml",
        "~/x",
        "file:///etc/passwd",
        "http://127.0.0.1:1/a/b",
        "hf://a/b",
        "nobody/nothing",
        "gpt2@main",
        "",
    ];
    for name in names {
        let answer = server.post("/train", &json!({"model": name}));
        assert_eq!(answer.problem(), (422, Some("/model".into())), "{name}");
        let draft = json!({"model": "gpt2", "engine": "vllm", "engine_options": {"speculative_model": name}});
        assert_eq!(server.post("/infer", &draft).status, 422, "{name}");
        let read = server.post("/plan/read", &json!({"text": "{\"clip\": true}", "name": name}));
        assert!(read.status == 200 || read.status == 422, "{name}");
    }
}

#[test]
fn too_many_requests() {
    let server = Server::start(&["--rate", "1"]);
    let answers: Vec<_> = (0..30).map(|_| server.get("/api/v1/health")).collect();
    let refused: Vec<_> = answers.iter().filter(|answer| answer.status == 429).collect();
    assert!(!refused.is_empty() && answers[..5].iter().all(|answer| answer.status == 200));
    let seconds: u64 = refused[0].header("retry-after").unwrap().parse().unwrap();
    assert!((1..=10).contains(&seconds));
    assert_eq!(refused[0].problem().0, 429);
    // The page itself is not counted.
    assert_eq!(server.get("/").status, 200);
}

/// A few bytes that ask for billions of operations get an answer, soon, and leave the server as it was.
#[test]
fn large_questions_end() {
    let server = Server::start(&["--timeout", "1", "--concurrency", "2"]);
    let small = |layers: u64| {
        json!({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": layers, "num_attention_heads": 4,
            "vocab_size": 100, "intermediate_size": 64})
    };
    let questions = [
        ("/train", json!({"config": small(1_000_000_000)})),
        ("/train", json!({"config": small(4096), "plan": {"gradient_accumulation": 4_000_000_000_u32}})),
        (
            "/train",
            json!({"config": small(4096), "plan": {"parallel": {"mesh": {"dp_shard": 8}, "engine": {"fsdp2": {}}}, "gradient_accumulation": 100_000}}),
        ),
        (
            "/infer",
            json!({"config": small(4096), "plan": {"new_tokens": 16_000_000, "batch": {"seq_len": 16_000_000}}}),
        ),
        ("/infer", json!({"config": small(100), "plan": {"beams": 1024, "batch": {"batch_size": 1_000_000}}})),
        ("/train", json!({"model": "state-spaces/mamba-130m-hf", "plan": {"batch": {"seq_len": 16_000_000}}})),
        (
            "/suggest",
            json!({"config": small(4096), "plan": {"batch": {"batch_size": 1_000_000, "seq_len": 16_000_000}}, "gpu": "t4"}),
        ),
        (
            "/train",
            json!({"config": {"model_type": "mixtral", "num_local_experts": 4_000_000_000_u64, "num_hidden_layers": 4096}}),
        ),
    ];
    for (path, question) in questions {
        let started = Instant::now();
        let answer = server.post(path, &question);
        // 429: on a busy machine the one before may still hold what heavy ones share.
        assert!([200, 422, 429, 503].contains(&answer.status), "{question}: {answer:?}");
        assert!(started.elapsed() < Duration::from_secs(30), "{question}");
    }
    // Every slot is free again.
    let until = Instant::now() + Duration::from_secs(20);
    while server.get("/api/v1/health").json()["running"] != 0 {
        assert!(Instant::now() < until, "an estimate still runs");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(client::post(&server.address, "/train", TRAIN).status, 200);
}

/// A client that went away takes no room.
#[test]
fn abandoned_requests_leave_no_trace() {
    let server = Server::start(&["--concurrency", "1"]);
    let body = r#"{"model":"gpt2","plan":{"gradient_accumulation":4000000}}"#;
    for _ in 0..20 {
        let mut stream = TcpStream::connect(&server.address).unwrap();
        let head = format!(
            "POST /api/v1/train HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        std::io::Write::write_all(&mut stream, format!("{head}{body}").as_bytes()).unwrap();
    }
    // A connection that never asks anything.
    let _idle = TcpStream::connect(&server.address).unwrap();
    let until = Instant::now() + Duration::from_secs(60);
    while client::post(&server.address, "/train", TRAIN).status != 200 {
        assert!(Instant::now() < until, "no room comes free");
    }
}

/// With the hub allowed, names reach it; paths of this machine are names of the hub at most.
#[test]
fn the_hub_is_asked_only_where_allowed() {
    let server = Server::start(&["--allow-hub"]);
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), r#"{"model_type": "gpt2"}"#).unwrap();
    // The tests' network is off.
    let answer = server.post("/train", &json!({"model": "nobody/nothing"}));
    assert_eq!(answer.problem(), (502, Some("/model".into())));
    assert!(answer.body.contains("the network is off"), "{}", answer.body);
    for path in [folder.path().to_str().unwrap(), "../..", "file:///etc/passwd", "http://127.0.0.1:1/a/b"] {
        let answer = server.post("/train", &json!({"model": path}));
        assert!(answer.status == 422 || answer.status == 502, "{path}: {}", answer.body);
    }
    assert_eq!(server.post("/train", &json!({"model": "gpt2"})).status, 200);
}

/// What a client sent comes back cut.
#[test]
fn errors_do_not_repeat_long_names() {
    let server = Server::start(&[]);
    for body in [json!({"model": "x".repeat(900_000)}), json!({"model": "gpt2", "plan": {"y".repeat(900_000): 1}})] {
        for path in ["/train", "/inspect"] {
            let answer = server.post(path, &body);
            assert_eq!(answer.status, 422);
            assert!(answer.body.len() < 10_000, "{} bytes", answer.body.len());
        }
    }
    let validated = server.post("/validate", &json!({"kind": "train", "model": "z".repeat(900_000)}));
    assert!(validated.body.len() < 10_000, "{} bytes", validated.body.len());
}

/// A client's model is fetched without the operator's token unless the operator says so.
#[test]
fn the_token_stays_with_the_operator() {
    use std::io::{Read, Write};
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let hub = format!("http://{}", listener.local_addr().unwrap());
    let (sender, heads) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut head = vec![0; 4096];
            let read = stream.read(&mut head).unwrap_or(0);
            let _ = sender.send(String::from_utf8_lossy(&head[..read]).to_ascii_lowercase());
            let _ = stream.write_all(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
        }
    });
    for (flags, sent) in [(&["--allow-hub"][..], false), (&["--allow-hub", "--hub-token"], true)] {
        let around = [("HF_ENDPOINT", hub.as_str()), ("HF_TOKEN", "hf_secret"), ("HF_HUB_OFFLINE", "0")];
        let server = Server::start_in(flags, &around);
        server.post("/train", &json!({"model": "somebody/private"}));
        let head = heads.recv_timeout(Duration::from_secs(20)).unwrap();
        assert_eq!(head.contains("hf_secret"), sent, "{flags:?}: {head}");
        while heads.try_recv().is_ok() {}
    }
}

/// One address cannot take every connection.
#[test]
fn an_address_holds_some_connections_and_no_more() {
    let server = Server::start(&[]);
    let mut open = Vec::new();
    for _ in 0..256 {
        open.push(TcpStream::connect(&server.address).unwrap());
    }
    let mut further = TcpStream::connect(&server.address).unwrap();
    further.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    let mut byte = [0];
    assert!(matches!(std::io::Read::read(&mut further, &mut byte), Ok(0) | Err(_)), "closed at once");
    drop(open);
    let until = Instant::now() + Duration::from_secs(30);
    while client::raw(&server.address, b"GET /api/v1/health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        .is_none()
    {
        assert!(Instant::now() < until, "no room comes free");
    }
}
