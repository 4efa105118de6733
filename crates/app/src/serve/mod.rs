//! `vramcast serve`: the web page and the HTTP API, over the same functions as the commands.
//!
//! | module | what is in it |
//! |---|---|
//! | `router` | the API (`crate::http`) and the page, and what every request goes through |
//! | `rate`, `hosts` | requests per second; whom a request is addressed to |
//! | `metrics`, `logs` | counts for Prometheus; a line for every request |
//! | `listen`, `patience` | connections, and how long they may wait |
//! | `assets` | the files of the page |

pub(crate) mod assets;
mod hosts;
mod listen;
mod logs;
mod metrics;
mod patience;
mod rate;
mod router;

use std::io::Write;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use crate::ask::found::Reach;
use crate::failure::Failure;
use crate::http::Service;
use crate::http::pool::Pool;
use crate::http::room::Room;
use crate::settings::Settings;
use hosts::Hosts;
use metrics::Metrics;
use rate::Rates;

/// How to serve.
pub(crate) struct Options {
    /// Where to listen.
    pub(crate) address: SocketAddr,
    /// Whether to open a browser.
    pub(crate) open: bool,
    /// How far a model's name may reach.
    pub(crate) reach: Reach,
    /// Whether `/metrics` is answered.
    pub(crate) metrics: bool,
    /// Names that requests may be addressed to, beside loopback's.
    pub(crate) allowed_hosts: Vec<String>,
    /// How much at once.
    pub(crate) limits: Limits,
    /// How requests are logged.
    pub(crate) log: LogFormat,
}

/// How much a client may ask.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Bytes of a body.
    pub(crate) body: usize,
    /// How long an estimate may take.
    pub(crate) time: Duration,
    /// Estimates at once.
    pub(crate) concurrency: usize,
    /// Requests per second and client; 0: any.
    pub(crate) rate: u32,
}

/// How requests are logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LogFormat {
    /// A line for people.
    Text,
    /// A JSON object a line.
    Json,
    /// Not at all.
    Off,
}

/// What is around the API.
pub(crate) struct Server {
    service: Arc<Service>,
    limits: Limits,
    log: LogFormat,
    hosts: Hosts,
    rates: Rates,
    metrics: Metrics,
}

/// Serves until the process is told to stop.
pub(crate) fn run(options: &Options, settings: Settings) -> Result<(), Failure> {
    let broken = |what: &str, error: std::io::Error| Failure::bad_input(format!("{what}: {error}"));
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(|e| broken("serve", e))?;
    let log = options.log;
    let room = Room::Server(Box::new(Pool::new(options.limits.concurrency, options.limits.time)));
    let server = Arc::new(Server {
        service: Arc::new(Service { settings, reach: options.reach, room }),
        limits: options.limits,
        log,
        hosts: Hosts::new(&options.allowed_hosts),
        rates: Rates::new(options.limits.rate),
        metrics: Metrics::new(),
    });
    let served = runtime.block_on(async {
        let stop = stop_signal().map_err(|e| broken("serve", e))?;
        let listener = tokio::net::TcpListener::bind(options.address)
            .await
            .map_err(|e| broken(&format!("cannot listen on {}", options.address), e))?;
        let address = listener.local_addr().map_err(|e| broken("serve", e))?;
        let mut out = std::io::stdout();
        let _ = writeln!(out, "listening on http://{address}/").and_then(|()| out.flush());
        if options.open {
            open(&format!("http://{address}/"));
        }
        if !address.ip().is_loopback() {
            logs::event(log, "warning", "others can reach this server; it has no passwords");
        }
        let finished = listen::serve(listener, router::router(server, options.metrics), stop).await;
        logs::event(log, "stopped", if finished { "every request was answered" } else { "requests were cut off" });
        Ok(())
    });
    // Threads of estimates that nobody waits for end with the process.
    runtime.shutdown_background();
    served
}

/// Over when the process is told to stop: Ctrl-C, or SIGTERM.
fn stop_signal() -> std::io::Result<impl Future<Output = ()>> {
    #[cfg(unix)]
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    Ok(async move {
        #[cfg(unix)]
        tokio::select! {
            _ = tokio::signal::ctrl_c() => {}
            _ = terminate.recv() => {}
        }
        #[cfg(not(unix))]
        let _ = tokio::signal::ctrl_c().await;
    })
}

/// Opens a browser; without one the address is printed anyway.
fn open(address: &str) {
    let program = if cfg!(target_os = "macos") { "open" } else { "xdg-open" };
    let quiet = std::process::Stdio::null;
    let _ = std::process::Command::new(program).arg(address).stdout(quiet()).stderr(quiet()).spawn();
}
