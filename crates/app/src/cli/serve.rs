//! `vramcast serve`.

use std::net::IpAddr;
use std::time::Duration;

use clap::{Args, ValueEnum};

use super::context::Context;
use super::{Answer, Failure};
use crate::ask::found::Reach;
use crate::serve::{self, Limits, LogFormat, Options};

/// Where to listen, and what to allow.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// The port; 0: any free one, which is printed.
    #[arg(long, value_name = "PORT", default_value_t = 8420)]
    port: u16,
    /// The address to listen on. Any other than loopback makes the server reachable by others.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    bind: IpAddr,
    /// Open the page in a browser.
    #[arg(long)]
    open: bool,
    /// Let requests name models of the hub, which are then fetched.
    #[arg(long)]
    allow_hub: bool,
    /// Send the hub token of this machine for those models, private and gated ones among them.
    #[arg(long, requires = "allow_hub")]
    hub_token: bool,
    /// Answer `/metrics` with counts for Prometheus.
    #[arg(long)]
    metrics: bool,
    /// A further name that requests may be addressed to (may be given several times); `localhost` and loopback
    /// addresses always are.
    #[arg(long, value_name = "NAME", help_heading = "Limits")]
    allowed_host: Vec<String>,
    /// The largest body of a request, in bytes or as 256KiB.
    #[arg(long, value_name = "SIZE", default_value = "1MiB", help_heading = "Limits")]
    max_body: String,
    /// Seconds after which an estimate is given up.
    #[arg(long, value_name = "SECONDS", default_value_t = 10.0, help_heading = "Limits")]
    timeout: f64,
    /// Estimates at once [default: the number of cores].
    #[arg(long, value_name = "N", help_heading = "Limits")]
    concurrency: Option<usize>,
    /// Requests per second and client, over time; ten times as many at once. 0: no limit.
    #[arg(long, value_name = "N", default_value_t = 50, help_heading = "Limits")]
    rate: u32,
    /// How requests are logged, to stderr: text, json or off.
    #[arg(long, value_name = "FORM", default_value = "text", hide_possible_values = true)]
    log_format: Log,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Log {
    Text,
    Json,
    Off,
}

pub(super) fn run(arguments: &Arguments, context: Context) -> Result<Answer, Failure> {
    context.text_or_json("serve")?;
    let body = arguments.max_body.parse::<vramcast_core::units::Bytes>().ok().map(|bytes| bytes.get());
    let body = body.filter(|bytes| (1 << 10..=1 << 28).contains(bytes)).ok_or_else(|| {
        Failure::bad_input(format!("--max-body: {} is not a size from 1KiB to 256MiB", arguments.max_body))
    })?;
    if !(0.01..=3600.0).contains(&arguments.timeout) {
        return Err(Failure::bad_input(format!("--timeout: {} is not from 0.01 to 3600 seconds", arguments.timeout)));
    }
    let cores = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
    let concurrency = arguments.concurrency.unwrap_or(cores);
    if !(1..=1024).contains(&concurrency) {
        return Err(Failure::bad_input(format!("--concurrency: {concurrency} is not from 1 to 1024")));
    }
    let limits = Limits {
        body: body as usize,
        time: Duration::from_secs_f64(arguments.timeout),
        concurrency,
        rate: arguments.rate,
    };
    let options = Options {
        address: (arguments.bind, arguments.port).into(),
        open: arguments.open,
        reach: match (arguments.allow_hub, arguments.hub_token) {
            (true, true) => Reach::HubWithToken,
            (true, false) => Reach::Hub,
            (false, _) => Reach::Catalogue,
        },
        metrics: arguments.metrics,
        allowed_hosts: arguments.allowed_host.clone(),
        limits,
        log: match (context.quiet, arguments.log_format) {
            (true, _) | (_, Log::Off) => LogFormat::Off,
            (_, Log::Text) => LogFormat::Text,
            (_, Log::Json) => LogFormat::Json,
        },
    };
    serve::run(&options, context.settings)?;
    Ok(Answer::success(String::new()))
}
