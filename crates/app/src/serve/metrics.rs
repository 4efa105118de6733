//! Counts for Prometheus, in its text form.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Upper bounds of the histogram, in seconds.
const BOUNDS: [f64; 10] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 2.5, 10.0];

/// What was answered since the start.
pub(crate) struct Metrics {
    started: Instant,
    routes: Mutex<BTreeMap<(String, u16), Answers>>,
}

#[derive(Default)]
struct Answers {
    count: u64,
    bytes: u64,
    seconds: f64,
    buckets: [u64; BOUNDS.len()],
}

impl Metrics {
    /// Nothing yet.
    pub(crate) fn new() -> Self {
        Self { started: Instant::now(), routes: Mutex::default() }
    }

    /// An answer of a route.
    pub(crate) fn answered(&self, route: &str, status: u16, took: Duration, bytes: u64) {
        let seconds = took.as_secs_f64();
        let mut routes = self.routes.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let answers = routes.entry((route.to_owned(), status)).or_default();
        answers.count += 1;
        answers.bytes += bytes;
        answers.seconds += seconds;
        if let Some(bucket) = BOUNDS.iter().position(|bound| seconds <= *bound) {
            answers.buckets[bucket] += 1;
        }
    }

    /// Everything as text.
    pub(crate) fn text(&self, (running, waiting): (usize, usize)) -> String {
        let mut text = String::new();
        let head = |text: &mut String, name: &str, kind: &str, help: &str| {
            let _ = writeln!(text, "# HELP vramcast_{name} {help}\n# TYPE vramcast_{name} {kind}");
        };
        let routes = self.routes.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        head(&mut text, "requests_total", "counter", "Answers by route and status.");
        for ((route, status), answers) in routes.iter() {
            let labels = format!("route=\"{route}\",status=\"{status}\"");
            let _ = writeln!(text, "vramcast_requests_total{{{labels}}} {}", answers.count);
        }
        head(&mut text, "response_bytes_total", "counter", "Bytes of bodies by route and status.");
        for ((route, status), answers) in routes.iter() {
            let labels = format!("route=\"{route}\",status=\"{status}\"");
            let _ = writeln!(text, "vramcast_response_bytes_total{{{labels}}} {}", answers.bytes);
        }
        head(&mut text, "request_seconds", "histogram", "How long answers took.");
        for ((route, status), answers) in routes.iter() {
            let labels = format!("route=\"{route}\",status=\"{status}\"");
            let mut sum = 0;
            for (bound, count) in BOUNDS.iter().zip(answers.buckets) {
                sum += count;
                let _ = writeln!(text, "vramcast_request_seconds_bucket{{{labels},le=\"{bound}\"}} {sum}");
            }
            let _ = writeln!(text, "vramcast_request_seconds_bucket{{{labels},le=\"+Inf\"}} {}", answers.count);
            let _ = writeln!(text, "vramcast_request_seconds_sum{{{labels}}} {}", answers.seconds);
            let _ = writeln!(text, "vramcast_request_seconds_count{{{labels}}} {}", answers.count);
        }
        head(&mut text, "estimates_running", "gauge", "Estimates that run now.");
        let _ = writeln!(text, "vramcast_estimates_running {running}");
        head(&mut text, "estimates_waiting", "gauge", "Estimates that wait for room.");
        let _ = writeln!(text, "vramcast_estimates_waiting {waiting}");
        head(&mut text, "uptime_seconds", "gauge", "Seconds since the start.");
        let _ = writeln!(text, "vramcast_uptime_seconds {}", self.started.elapsed().as_secs());
        head(&mut text, "build_info", "gauge", "The version that runs.");
        let _ = writeln!(text, "vramcast_build_info{{version=\"{}\"}} 1", env!("CARGO_PKG_VERSION"));
        text
    }
}
