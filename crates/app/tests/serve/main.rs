//! The server over real sockets: the real binary, a plain client.
#![allow(clippy::disallowed_methods, reason = "tests run programs")]

mod answers;
mod client;
mod doors;
mod limits;
mod page;
mod pictures;
mod random;
mod schemathesis;
#[path = "../support/site.rs"]
mod site;
mod stopping;

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use serde_json::Value;

/// The program under test.
fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vramcast"));
    // Nothing of the machine's own settings takes part.
    command.env_clear().env("HF_HUB_OFFLINE", "1").env("PATH", std::env::var_os("PATH").unwrap_or_default());
    command
}

/// A server of its own, killed when dropped.
struct Server {
    child: Child,
    address: String,
}

impl Server {
    /// Starts one on a free port.
    fn start(arguments: &[&str]) -> Self {
        Self::start_on("0", arguments)
    }

    /// Starts one on a port.
    fn start_on(port: &str, arguments: &[&str]) -> Self {
        Self::started(port, arguments, &[])
    }

    /// Starts one with variables of the environment.
    fn start_in(arguments: &[&str], around: &[(&str, &str)]) -> Self {
        Self::started("0", arguments, around)
    }

    fn started(port: &str, arguments: &[&str], around: &[(&str, &str)]) -> Self {
        let mut child = program()
            .envs(around.iter().copied())
            .args(["serve", "--port", port, "--log-format", "off"])
            .args(arguments)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("listening on http://").unwrap_or_else(|| panic!("{line:?}"));
        Self { address: address.trim_end_matches('/').to_owned(), child }
    }

    /// Posts a body.
    fn post(&self, path: &str, body: &Value) -> client::Answer {
        client::post(&self.address, path, &body.to_string())
    }

    /// Gets a path.
    fn get(&self, path: &str) -> client::Answer {
        client::get(&self.address, path)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What a command prints with `--json`.
fn printed(arguments: &[&str]) -> Value {
    let output = program().args(arguments).arg("--json").output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{arguments:?}: {error}: {text}"))
}

/// A plan file of a value.
fn file_of(value: &Value) -> tempfile::NamedTempFile {
    let file = tempfile::Builder::new().suffix(".json").tempfile().unwrap();
    std::fs::write(file.path(), value.to_string()).unwrap();
    file
}
