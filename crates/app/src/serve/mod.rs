//! `vramcast serve`: the web page and the HTTP API, over the same functions as the commands.
//!
//! | module | what is in it |
//! |---|---|
//! | `router` | which address leads where |
//! | `handlers` | the answers, by topic |
//! | `body` | what a request may hold, and how it is read |
//! | `problem`, `fields` | errors as problem documents that name the field |
//! | `pool` | estimates at once, and how long one may take |
//! | `assets` | the files of the page |
//!
//! Nothing of a request reaches the file system, and nothing the network unless the operator allows the hub.

mod assets;
mod body;
mod document;
mod fields;
mod handlers;
mod pool;
mod problem;
mod router;

use std::io::Write;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use vramcast_core::plan::Gpus;

use crate::cli::Failure;
use crate::cli::context::Context;
use crate::estimate::source::Reach;
use pool::Pool;

/// How to serve.
pub(crate) struct Options {
    /// Where to listen.
    pub(crate) address: SocketAddr,
    /// Whether to open a browser.
    pub(crate) open: bool,
    /// How far a model's name may reach.
    pub(crate) reach: Reach,
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

/// What every handler shares.
pub(crate) struct Service {
    context: Context,
    cards: Gpus,
    reach: Reach,
    limits: Limits,
    pool: Pool,
}

/// Serves until the process is told to stop.
pub(crate) fn run(options: Options, context: Context) -> Result<(), Failure> {
    let broken = |what: &str, error: std::io::Error| Failure::bad_input(format!("{what}: {error}"));
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(|e| broken("serve", e))?;
    let service = Arc::new(Service {
        cards: context.cards(),
        context,
        reach: options.reach,
        limits: options.limits,
        pool: Pool::new(options.limits),
    });
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::bind(options.address)
            .await
            .map_err(|e| broken(&format!("cannot listen on {}", options.address), e))?;
        let address = listener.local_addr().map_err(|e| broken("serve", e))?;
        let mut out = std::io::stdout();
        let _ = writeln!(out, "listening on http://{address}/").and_then(|()| out.flush());
        axum::serve(listener, router::router(service)).await.map_err(|e| broken("serve", e))
    })
}
