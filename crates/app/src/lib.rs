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
//! | [`serve`] | the web page and the HTTP API |
//! | [`settings`] | a user's own data types, cards and display settings |

pub mod api;
pub mod ask;
pub mod cli;
pub mod detect;
mod disk;
pub mod env;
pub mod exit;
pub mod failure;
pub mod fetch;
#[doc(hidden)]
pub mod foreign;
pub mod probe;
pub mod rehearse;
pub mod render;
pub mod serve;
pub mod settings;

/// Runs the command line of this process.
pub fn run() -> std::process::ExitCode {
    cli::run(std::env::args_os().collect()).into()
}
