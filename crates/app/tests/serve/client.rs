//! A client of a few lines that shows everything of an answer.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use serde_json::Value;

/// An answer.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: String,
}

impl Answer {
    /// A header's value.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| {
            let (known, value) = line.split_once(':')?;
            known.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    }

    /// The body as JSON.
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// The document of a good answer.
    pub(crate) fn document(&self) -> Value {
        assert_eq!(self.status, 200, "{}", self.body);
        self.json()
    }

    /// Status and field of a problem document.
    pub(crate) fn problem(&self) -> (u16, Option<String>) {
        assert_eq!(self.header("content-type"), Some("application/problem+json"), "{self:?}");
        let problem = self.json();
        assert_eq!(problem["status"], self.status);
        assert!(problem["detail"].as_str().is_some_and(|detail| !detail.is_empty()), "{self:?}");
        (self.status, problem["field"].as_str().map(str::to_owned))
    }
}

/// Sends bytes as they are and reads until the server closes; `None` when there is no answer.
pub(crate) fn raw(address: &str, request: &[u8]) -> Option<Answer> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(60))).ok()?;
    // A server that refuses a body need not read it.
    let _ = stream.write_all(request);
    let mut bytes = Vec::new();
    let _ = stream.read_to_end(&mut bytes);
    let text = String::from_utf8_lossy(&bytes);
    let (head, body) = text.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    Some(Answer { status, head: head.to_owned(), body: body.to_owned() })
}

/// A request with a head of one's own; `Connection: close` is added.
pub(crate) fn request(address: &str, head: &str, body: &str) -> Answer {
    let text = format!("{head}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}", body.len());
    raw(address, text.as_bytes()).unwrap_or_else(|| panic!("no answer to {head}"))
}

/// Posts a text.
pub(crate) fn post(address: &str, path: &str, body: &str) -> Answer {
    let head = format!("POST /api/v1{path} HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json");
    request(address, &head, body)
}

/// Gets a path.
pub(crate) fn get(address: &str, path: &str) -> Answer {
    request(address, &format!("GET {path} HTTP/1.1\r\nHost: {address}"), "")
}
