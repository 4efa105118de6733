//! Everything of vramcast that touches the world: the command line, files, the hub.

pub mod env;
pub mod fetch;

/// Runs the command line.
pub fn run() -> std::process::ExitCode {
    std::process::ExitCode::SUCCESS
}
