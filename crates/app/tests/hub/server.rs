//! A real HTTP server on loopback that speaks as much of the hub's API as the client uses, and lies when told to.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// The commit every test repository is at.
pub(crate) const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// A request as received.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) path: String,
    pub(crate) headers: BTreeMap<String, String>,
}

impl Request {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }

    /// The first and last byte asked for.
    pub(crate) fn range(&self) -> Option<(usize, usize)> {
        let (first, last) = self.header("range")?.strip_prefix("bytes=")?.split_once('-')?;
        Some((first.parse().ok()?, last.parse().ok()?))
    }
}

/// What to do with a request.
pub(crate) enum Reply {
    /// Status, extra headers, body; the length is told truthfully.
    Send(u16, Vec<(String, String)>, Vec<u8>),
    /// These bytes, then the connection closes.
    Raw(Vec<u8>),
    /// These bytes, then silence.
    Hang(Vec<u8>),
    /// These bytes, then one more every now and then, without an end.
    Dribble(Vec<u8>),
}

impl Reply {
    pub(crate) fn status(status: u16) -> Self {
        Self::Send(status, Vec::new(), Vec::new())
    }

    pub(crate) fn error(status: u16, code: &str) -> Self {
        Self::Send(status, vec![("X-Error-Code".into(), code.into())], Vec::new())
    }

    pub(crate) fn redirect(to: &str) -> Self {
        Self::Send(307, vec![("Location".into(), to.into())], Vec::new())
    }
}

type Handler = Box<dyn Fn(&Request) -> Reply + Send + Sync>;

/// The server. Stops when dropped.
pub(crate) struct Server {
    address: SocketAddr,
    requests: Arc<Mutex<Vec<Request>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    pub(crate) fn start(handler: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("an address");
        let requests = Arc::new(Mutex::new(Vec::new()));
        let stop = Arc::new(AtomicBool::new(false));
        let handler: Arc<Handler> = Arc::new(Box::new(handler));
        let (log, stopped) = (Arc::clone(&requests), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if stopped.load(Ordering::SeqCst) {
                    break;
                }
                let (handler, log, stopped) = (Arc::clone(&handler), Arc::clone(&log), Arc::clone(&stopped));
                std::thread::spawn(move || serve(stream, &handler, &log, &stopped));
            }
        });
        Self { address, requests, stop, thread: Some(thread) }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Everything asked so far.
    pub(crate) fn requests(&self) -> Vec<Request> {
        self.requests.lock().expect("the log").clone()
    }

    /// How many requests had this in their path.
    pub(crate) fn count(&self, part: &str) -> usize {
        self.requests().iter().filter(|request| request.path.contains(part)).count()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.address);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn serve(mut stream: TcpStream, handler: &Handler, log: &Mutex<Vec<Request>>, stop: &AtomicBool) {
    let Ok(copy) = stream.try_clone() else { return };
    let mut lines = BufReader::new(copy).lines().map_while(Result::ok);
    let Some(first) = lines.next() else { return };
    let path = first.split(' ').nth(1).unwrap_or_default().to_owned();
    let headers = lines
        .take_while(|line| !line.is_empty())
        .filter_map(|line| line.split_once(':').map(|(k, v)| (k.to_ascii_lowercase(), v.trim().to_owned())))
        .collect();
    let request = Request { path, headers };
    log.lock().expect("the log").push(request.clone());
    match handler(&request) {
        Reply::Send(status, headers, body) => {
            let mut head = format!("HTTP/1.1 {status} X\r\nContent-Length: {}\r\nConnection: close\r\n", body.len());
            headers.iter().for_each(|(name, value)| head.push_str(&format!("{name}: {value}\r\n")));
            let _ = stream.write_all(format!("{head}\r\n").as_bytes()).and_then(|()| stream.write_all(&body));
        }
        Reply::Raw(bytes) => {
            let _ = stream.write_all(&bytes);
        }
        Reply::Dribble(bytes) => {
            let mut sent = stream.write_all(&bytes);
            while sent.is_ok() && !stop.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(50));
                sent = stream.write_all(b" ");
            }
        }
        Reply::Hang(bytes) => {
            let _ = stream.write_all(&bytes);
            while !stop.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(20));
            }
        }
    }
}

/// The files of one repository, served as the hub does.
#[derive(Clone, Default)]
pub(crate) struct Files(pub(crate) BTreeMap<String, Vec<u8>>);

impl Files {
    pub(crate) fn with(mut self, name: &str, bytes: impl Into<Vec<u8>>) -> Self {
        self.0.insert(name.to_owned(), bytes.into());
        self
    }

    /// The answer of a well-behaved hub for the repository `owner/name`.
    pub(crate) fn answer(&self, request: &Request) -> Reply {
        if request.path.starts_with("/api/models/owner/name/revision/") {
            let siblings: Vec<_> = self.0.keys().map(|name| serde_json::json!({ "rfilename": name })).collect();
            let listing = serde_json::json!({"id": "owner/name", "sha": COMMIT, "siblings": siblings});
            return Reply::Send(200, Vec::new(), listing.to_string().into_bytes());
        }
        let Some(name) = request.path.strip_prefix(&format!("/owner/name/resolve/{COMMIT}/")) else {
            return Reply::error(404, "RepoNotFound");
        };
        match self.0.get(name) {
            Some(bytes) => ranged(bytes, request),
            None => Reply::error(404, "EntryNotFound"),
        }
    }
}

/// A file, or the range of it that was asked for.
pub(crate) fn ranged(bytes: &[u8], request: &Request) -> Reply {
    let Some((first, last)) = request.range() else { return Reply::Send(200, Vec::new(), bytes.to_vec()) };
    if first >= bytes.len() {
        let range = ("Content-Range".to_owned(), format!("bytes */{}", bytes.len()));
        return Reply::Send(416, vec![range], Vec::new());
    }
    let last = last.min(bytes.len() - 1);
    let range = ("Content-Range".to_owned(), format!("bytes {first}-{last}/{}", bytes.len()));
    Reply::Send(206, vec![range], bytes[first..=last].to_vec())
}

/// A safetensors file of `count` bf16 matrices of 8 x 8, data and all.
pub(crate) fn safetensors(prefix: &str, count: usize) -> Vec<u8> {
    let entries: serde_json::Map<String, serde_json::Value> = (0..count)
        .map(|number| {
            let start = number * 128;
            let entry = serde_json::json!({"dtype": "BF16", "shape": [8, 8], "data_offsets": [start, start + 128]});
            (format!("{prefix}.{number}.weight"), entry)
        })
        .collect();
    let mut bytes = with_length(&serde_json::Value::Object(entries).to_string());
    bytes.extend(vec![7; count * 128]);
    bytes
}

/// A header with its true length before it.
pub(crate) fn with_length(header: &str) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes
}
