//! Everything of vramcast that touches the world: the command line, files, the hub.
//!
//! | module | its work |
//! |---|---|
//! | [`cli`] | the commands, one file each |
//! | [`api`] | questions as trees of values: what Python asks |
//! | [`ask`] | from a question to its answer, for every interface |
//! | `disk` | files, read with a cap and written without harm |
//! | [`env`] | every environment variable, read here only |
//! | [`detect`] | the GPUs of this machine, through NVML |
//! | `foreign` | readers of foreign bytes by themselves, for `fuzz/` |
//! | [`fetch`] | from what a user typed to a model's facts |
//! | [`probe`] | a plan run for real, through the user's Python |
//! | [`rehearse`] | the user's own program on a pretend GPU |
//! | [`render`] | reports as text, SVG and JSON |
//! | [`http`] | the HTTP API, with or without a server |
//! | [`serve`] | the server: the page and the API |
//! | [`settings`] | a user's own data types, cards and display settings |
#![cfg_attr(target_family = "wasm", allow(dead_code, unused_imports, reason = "what the command alone uses"))]

pub mod api;
pub mod ask;
#[cfg(not(target_family = "wasm"))]
pub mod cli;
#[cfg_attr(target_family = "wasm", path = "web/detect.rs")]
pub mod detect;
mod disk;
pub mod env;
pub mod exit;
pub mod failure;
pub mod fetch;
#[cfg(not(target_family = "wasm"))]
#[doc(hidden)]
pub mod foreign;
pub mod http;
#[cfg(not(target_family = "wasm"))]
pub mod learn;
#[cfg(not(target_family = "wasm"))]
pub mod probe;
#[cfg(not(target_family = "wasm"))]
pub mod rehearse;
pub mod render;
#[cfg(not(target_family = "wasm"))]
pub mod serve;
pub mod settings;

/// Runs the command line of this process.
#[cfg(not(target_family = "wasm"))]
pub fn run() -> std::process::ExitCode {
    cli::run(std::env::args_os().collect()).into()
}
