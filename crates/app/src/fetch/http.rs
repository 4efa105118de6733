//! One request to the hub, done properly: redirects by hand so that the token stays with its host, retries with
//! back-off, ranges, a limit on every body, a time-out on every wait.

use std::io::{ErrorKind, Read};
use std::time::{Duration, Instant};

use ureq::http::{HeaderMap, StatusCode};
use ureq::tls::{RootCerts, TlsConfig};

use super::FetchOptions;

/// As many redirects as browsers follow would be silly; the hub needs two.
const MAX_REDIRECTS: usize = 8;
/// A whole body may take this many times the wait for one piece.
const READS_PER_BODY: u32 = 3;
/// All requests for one model together may.
const READS_IN_ALL: u32 = 9;

/// What is wanted of a file.
#[derive(Debug, Clone, Copy)]
pub(super) enum Wanted {
    /// All of it, unless it is longer than this.
    Whole { limit: u64 },
    /// The bytes from `start` up to, not including, `end`.
    Range { start: u64, end: u64 },
}

/// What came back.
#[derive(Debug)]
pub(super) struct Answer {
    /// The bytes; fewer than wanted only where the file ends.
    pub(super) body: Vec<u8>,
    /// How long the whole file is, where the server says.
    pub(super) total: Option<u64>,
}

/// A refusal.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) status: u16,
    /// `X-Error-Code`: `GatedRepo`, `RepoNotFound`, `RevisionNotFound`, `EntryNotFound`.
    pub(super) code: Option<String>,
    /// `X-Error-Message`.
    pub(super) message: Option<String>,
    /// `Retry-After`, in seconds.
    pub(super) retry_after: Option<u64>,
}

/// Why there is no answer.
#[derive(Debug)]
pub(super) enum Failure {
    Unreachable(String),
    NoHost,
    TimedOut,
    CutShort,
    TooLong,
    Bad(String),
    Refused(Refusal),
}

impl Failure {
    /// Whether trying again may help.
    fn is_passing(&self) -> bool {
        match self {
            Self::Unreachable(_) | Self::TimedOut | Self::CutShort => true,
            Self::Refused(refusal) => matches!(refusal.status, 408 | 429 | 500..),
            Self::NoHost | Self::TooLong | Self::Bad(_) => false,
        }
    }
}

/// A client for one hub.
pub(super) struct Http<'a> {
    agent: ureq::Agent,
    options: &'a FetchOptions,
    /// When all must be over, however slowly bytes come.
    until: Instant,
}

impl<'a> Http<'a> {
    pub(super) fn new(options: &'a FetchOptions) -> Self {
        let mut config = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("vramcast/", env!("CARGO_PKG_VERSION")))
            // Ranges count bytes of the file itself, not of a compressed copy.
            .accept_encoding("identity")
            .timeout_resolve(Some(options.answer_timeout))
            .timeout_connect(Some(options.answer_timeout))
            .timeout_send_request(Some(options.answer_timeout))
            .timeout_recv_response(Some(options.answer_timeout))
            .timeout_per_read(Some(options.read_timeout))
            .timeout_recv_body(Some(options.read_timeout * READS_PER_BODY))
            .tls_config(TlsConfig::builder().root_certs(RootCerts::PlatformVerifier).build());
        if is_loopback(&options.endpoint) {
            config = config.proxy(None);
        }
        let until = Instant::now() + options.read_timeout.max(options.answer_timeout) * READS_IN_ALL;
        Self { agent: config.build().new_agent(), options, until }
    }

    /// Gets a file, trying again when that may help.
    pub(super) fn get(&self, url: &str, wanted: Wanted) -> Result<Answer, Failure> {
        let mut pause = self.options.backoff;
        let mut left = self.options.attempts.max(1);
        loop {
            if self.left().is_zero() {
                return Err(Failure::TimedOut);
            }
            let failure = match self.once(url, wanted) {
                Ok(answer) => return Ok(answer),
                Err(failure) => failure,
            };
            // Each time-out costs its full wait, so only one is forgiven.
            left = if matches!(failure, Failure::TimedOut) { left.min(2) - 1 } else { left - 1 };
            let asked = match &failure {
                Failure::Refused(refusal) => refusal.retry_after.map(Duration::from_secs),
                _ => None,
            };
            if left == 0 || !failure.is_passing() || asked.is_some_and(|wait| wait > self.options.longest_wait) {
                return Err(failure);
            }
            let wait = asked.unwrap_or(pause).min(self.options.longest_wait);
            if wait >= self.left() {
                return Err(failure);
            }
            std::thread::sleep(wait);
            pause *= 2;
        }
    }

    /// What is left of the time for all requests.
    fn left(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }

    fn once(&self, url: &str, wanted: Wanted) -> Result<Answer, Failure> {
        let mut url = url.to_owned();
        for _ in 0..=MAX_REDIRECTS {
            let mut request = self.agent.get(&url);
            if let Some(token) = &self.options.token
                && origin(&url).is_some_and(|there| origin(&self.options.endpoint) == Some(there))
            {
                request = request.header("Authorization", token.header());
            }
            if let Wanted::Range { start, end } = wanted {
                request = request.header("Range", format!("bytes={start}-{}", end.saturating_sub(1)));
            }
            let request = request.config().timeout_global(Some(self.left().max(Duration::from_millis(1)))).build();
            let response = request.call().map_err(failure)?;
            if !response.status().is_redirection() {
                return read(response, wanted);
            }
            let location = text(response.headers(), "location");
            let location = location.ok_or_else(|| Failure::Bad("a redirect to nowhere".to_owned()))?;
            let next = join(&url, &location).ok_or_else(|| Failure::Bad("a redirect to no web address".to_owned()))?;
            if url.starts_with("https://") && !next.starts_with("https://") {
                return Err(Failure::Bad("a redirect from https to http".to_owned()));
            }
            url = next;
        }
        Err(Failure::Bad("too many redirects".to_owned()))
    }
}

fn read(response: ureq::http::Response<ureq::Body>, wanted: Wanted) -> Result<Answer, Failure> {
    let (head, body) = response.into_parts();
    match (head.status, wanted) {
        (StatusCode::OK, Wanted::Whole { limit }) => {
            let body = take(body, limit.saturating_add(1))?;
            if body.len() as u64 > limit {
                return Err(Failure::TooLong);
            }
            Ok(Answer { total: Some(body.len() as u64), body })
        }
        (StatusCode::PARTIAL_CONTENT, Wanted::Range { start, end }) => {
            let range = text(&head.headers, "content-range").and_then(|value| content_range(&value));
            let Some((first, last, total)) = range else { return Err(Failure::Bad("no Content-Range".to_owned())) };
            if first != start || last < first || last >= end {
                return Err(Failure::Bad(format!("bytes {first}-{last} instead of {start}-{}", end.saturating_sub(1))));
            }
            let announced = last - first + 1;
            let body = take(body, announced.saturating_add(1))?;
            match (body.len() as u64).cmp(&announced) {
                std::cmp::Ordering::Less => Err(Failure::CutShort),
                std::cmp::Ordering::Greater => Err(Failure::Bad("more bytes than announced".to_owned())),
                std::cmp::Ordering::Equal => Ok(Answer { body, total }),
            }
        }
        // A server that does not know ranges sends all: read as far as needed, then hang up.
        (StatusCode::OK, Wanted::Range { start, end }) => {
            let total = text(&head.headers, "content-length").and_then(|value| value.parse().ok());
            let mut body = take(body, end)?;
            let skipped = usize::try_from(start).unwrap_or(usize::MAX).min(body.len());
            body.drain(..skipped);
            Ok(Answer { body, total })
        }
        // Nothing at that place: the file is no longer than `start`.
        (StatusCode::RANGE_NOT_SATISFIABLE, Wanted::Range { .. }) => {
            let total = text(&head.headers, "content-range").and_then(|value| value.rsplit_once('/')?.1.parse().ok());
            Ok(Answer { body: Vec::new(), total })
        }
        (status, _) if status.is_success() => Err(Failure::Bad(format!("status {}", status.as_u16()))),
        (status, _) => Err(Failure::Refused(Refusal {
            status: status.as_u16(),
            code: text(&head.headers, "x-error-code"),
            message: text(&head.headers, "x-error-message").map(|message| printable(&message)),
            retry_after: text(&head.headers, "retry-after").and_then(|value| value.trim().parse().ok()),
        })),
    }
}

/// Reads at most `limit` bytes, growing as they come, whatever length was announced.
fn take(body: ureq::Body, limit: u64) -> Result<Vec<u8>, Failure> {
    let mut bytes = Vec::new();
    // ureq's own limit on a body would count an announced length; ours counts what arrives.
    let reader = body.into_with_config().limit(u64::MAX).reader();
    match reader.take(limit).read_to_end(&mut bytes) {
        Ok(_) => Ok(bytes),
        Err(error) => Err(body_failure(&error)),
    }
}

fn body_failure(error: &std::io::Error) -> Failure {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<ureq::Error>());
    let timed_out = matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::WouldBlock);
    if timed_out || matches!(inner, Some(ureq::Error::Timeout(_))) { Failure::TimedOut } else { Failure::CutShort }
}

fn failure(error: ureq::Error) -> Failure {
    match error {
        ureq::Error::Timeout(_) => Failure::TimedOut,
        ureq::Error::Io(error) if matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::WouldBlock) => {
            Failure::TimedOut
        }
        ureq::Error::Io(error) if error.kind() == ErrorKind::ConnectionRefused => {
            Failure::Unreachable("the connection was refused".to_owned())
        }
        ureq::Error::HostNotFound => Failure::NoHost,
        // The system's own words have no kind.
        ureq::Error::Io(error) if error.to_string().contains("lookup address") => Failure::NoHost,
        ureq::Error::Protocol(error) => Failure::Bad(printable(&error.to_string())),
        ureq::Error::BadUri(_) => Failure::Bad("an address that is none".to_owned()),
        ureq::Error::LargeResponseHeader(..) => Failure::Bad("endless headers".to_owned()),
        other => Failure::Unreachable(printable(&other.to_string())),
    }
}

fn text(headers: &HeaderMap, name: &str) -> Option<String> {
    headers.get(name)?.to_str().ok().map(str::to_owned)
}

/// A server's words, short and without control characters, fit for a terminal.
fn printable(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(300).collect()
}

/// `bytes 0-99/1234`, the total `*` when unknown.
fn content_range(value: &str) -> Option<(u64, u64, Option<u64>)> {
    let (range, total) = value.trim().strip_prefix("bytes")?.trim_start().split_once('/')?;
    let (first, last) = range.split_once('-')?;
    Some((first.trim().parse().ok()?, last.trim().parse().ok()?, total.trim().parse().ok()))
}

/// Scheme, host and port: what must be the same for the token to travel.
fn origin(url: &str) -> Option<(String, String)> {
    let (scheme, rest) = url.split_once("://")?;
    let authority = rest.split(['/', '?', '#']).next()?;
    let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host).to_ascii_lowercase();
    let scheme = scheme.to_ascii_lowercase();
    let default_port = if scheme == "https" { ":443" } else { ":80" };
    let host = host.strip_suffix(default_port).unwrap_or(&host).to_owned();
    Some((scheme, host))
}

/// Where a `Location` leads, seen from the address it came from.
fn join(base: &str, location: &str) -> Option<String> {
    let lower = location.to_ascii_lowercase();
    if lower.starts_with("http://") || lower.starts_with("https://") {
        return Some(location.to_owned());
    }
    let (scheme, rest) = base.split_once("://")?;
    if let Some(rest) = location.strip_prefix("//") {
        return Some(format!("{scheme}://{rest}"));
    }
    if location.contains("://") || location.is_empty() {
        return None;
    }
    let authority = rest.split(['/', '?', '#']).next()?;
    if location.starts_with('/') {
        return Some(format!("{scheme}://{authority}{location}"));
    }
    let path = rest.get(authority.len()..)?.split(['?', '#']).next()?;
    let folder = path.rsplit_once('/').map_or("", |(folder, _)| folder);
    Some(format!("{scheme}://{authority}{folder}/{location}"))
}

fn is_loopback(endpoint: &str) -> bool {
    origin(endpoint).is_some_and(|(_, host)| {
        let name = host.rsplit_once(':').map_or(host.as_str(), |(name, _)| name);
        name == "localhost" || name == "[::1]" || name.starts_with("127.")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_origin_is_scheme_host_and_port() {
        assert_eq!(origin("https://Hub:443/x"), origin("HTTPS://hub?y"));
        assert_ne!(origin("http://hub/x"), origin("https://hub/x"));
        assert_ne!(origin("http://hub:1/x"), origin("http://hub:2/x"));
        assert_eq!(origin("http://hub@evil/x"), origin("http://evil"));
        assert_ne!(origin("http://hub.evil/x"), origin("http://hub/x"));
    }

    #[test]
    fn locations() {
        let base = "https://hub:1/a/b?c";
        assert_eq!(join(base, "https://x/y").as_deref(), Some("https://x/y"));
        assert_eq!(join(base, "//x/y").as_deref(), Some("https://x/y"));
        assert_eq!(join(base, "/y?z").as_deref(), Some("https://hub:1/y?z"));
        assert_eq!(join(base, "y").as_deref(), Some("https://hub:1/a/y"));
        assert_eq!(join(base, "file:///etc/passwd"), None);
        assert_eq!(join(base, ""), None);
    }

    #[test]
    fn ranges() {
        assert_eq!(content_range("bytes 0-99/1234"), Some((0, 99, Some(1234))));
        assert_eq!(content_range("bytes 5-9/*"), Some((5, 9, None)));
        assert_eq!(content_range("lines 1-2/3"), None);
        assert!(is_loopback("http://127.0.0.1:80") && is_loopback("http://localhost") && !is_loopback("http://hub"));
    }
}
