//! The server stops when told to, and a killed one leaves nothing behind.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde_json::json;

use super::{Server, client};

fn signal(server: &Server, name: &str) {
    let sent = Command::new("sh").args(["-c", &format!("kill {name} {}", server.child.id())]).status().unwrap();
    assert!(sent.success());
}

/// What is in flight is answered, and the process ends well.
#[test]
fn it_stops_gracefully() {
    for name in ["-TERM", "-INT"] {
        let mut server = Server::start(&[]);
        let address = server.address.clone();
        // 64 layers and many micro-batches: some tenths of a second.
        let body = json!({"model": "gpt2", "plan": {"gradient_accumulation": 60}}).to_string();
        let asked = std::thread::spawn(move || client::post(&address, "/train", &body));
        let started = Instant::now();
        while server.get("/api/v1/health").json()["running"] == 0 && !asked.is_finished() {
            assert!(started.elapsed() < Duration::from_secs(20));
        }
        signal(&server, name);
        assert_eq!(asked.join().unwrap().status, 200);
        let status = server.child.wait().unwrap();
        assert_eq!(status.code(), Some(0), "{name}");
    }
}

/// Killed in the middle of a storm and started again: only what was in flight is lost, and no answer is half an answer.
#[test]
fn a_kill_loses_only_what_is_in_flight() {
    let first = Server::start(&["--rate", "0"]);
    let address = first.address.clone();
    let port = address.rsplit_once(':').unwrap().1.to_owned();
    let (over, good, lost) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let body = json!({"model": "gpt2", "plan": {}}).to_string();
    let expected = client::post(&address, "/train", &body).document();
    let request = format!(
        "POST /api/v1/train HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    );
    // Also when something fails below.
    struct Over<'a>(&'a AtomicBool);
    impl Drop for Over<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    std::thread::scope(|scope| {
        let end = Over(&over);
        for _ in 0..4 {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    let answer = client::raw(&address, request.as_bytes());
                    match answer.filter(|answer| answer.status == 200) {
                        Some(answer)
                            if serde_json::from_str::<serde_json::Value>(&answer.body).ok().as_ref()
                                == Some(&expected) =>
                        {
                            good.fetch_add(1, Ordering::Relaxed);
                        }
                        _ => {
                            lost.fetch_add(1, Ordering::Relaxed);
                            std::thread::sleep(Duration::from_millis(5));
                        }
                    }
                }
            });
        }
        let wait_for_more = |count: u64| {
            let until = Instant::now() + Duration::from_secs(60);
            let before = good.load(Ordering::Relaxed);
            while good.load(Ordering::Relaxed) < before + count {
                assert!(Instant::now() < until, "no answers come");
                std::thread::sleep(Duration::from_millis(2));
            }
        };
        wait_for_more(10);
        signal(&first, "-KILL");
        drop(first);
        let second = Server::start_on(&port, &["--rate", "0"]);
        assert_eq!(second.address, address);
        wait_for_more(10);
        let refused = lost.load(Ordering::Relaxed);
        wait_for_more(10);
        drop(end);
        assert_eq!(lost.load(Ordering::Relaxed), refused, "requests are lost after the restart");
    });
}

#[test]
fn a_taken_port_is_said() {
    let server = Server::start(&[]);
    let port = server.address.rsplit_once(':').unwrap().1;
    let output = super::program().args(["serve", "--port", port]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("cannot listen on 127.0.0.1"));
    for wrong in [["--timeout", "0"], ["--max-body", "1"], ["--concurrency", "0"], ["--bind", "x"]] {
        assert_eq!(super::program().arg("serve").args(wrong).output().unwrap().status.code(), Some(2), "{wrong:?}");
    }
}

/// Every request is a line of JSON, without query and body; the end is one, too.
#[test]
fn requests_are_logged() {
    let mut child = super::program()
        .args(["serve", "--port", "0", "--log-format", "json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let address = line.trim().trim_start_matches("listening on http://").trim_end_matches('/').to_owned();
    client::get(&address, "/api/v1/models?search=secret");
    client::get(&address, "/no\u{1b}such");
    Command::new("sh").args(["-c", &format!("kill -TERM {}", child.id())]).status().unwrap();
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    let lines: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let first = &lines[0];
    assert_eq!(
        (&first["event"], &first["status"], &first["path"]),
        (&json!("request"), &json!(200), &json!("/api/v1/models"))
    );
    assert!(first["milliseconds"].as_f64().is_some() && first["client"] == "127.0.0.1" && !text.contains("secret"));
    assert_eq!(lines.last().unwrap()["event"], "stopped");
}
