//! The page in a real Chromium, on the real server and without one: `tests/browser/` under node, which this sets up by itself.
#![allow(clippy::disallowed_methods, reason = "tests run programs")]

#[path = "support/site.rs"]
mod site;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::LazyLock;

const NAMES: [&str; 4] = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"];

/// What a command prints, where it runs and succeeds.
fn output(command: &mut Command) -> Option<String> {
    let output = command.output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn run(what: &str, command: &mut Command) {
    let output = command.output().unwrap_or_else(|error| panic!("{what}: {error}"));
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    println!("{text}");
    assert!(output.status.success(), "{what}: {}\n{text}", output.status);
}

/// Copies the files of a folder, and of those in it.
fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
        let (source, target) = (entry.path(), to.join(entry.file_name()));
        if source.is_dir() {
            copy(&source, &target);
        } else {
            std::fs::copy(&source, &target).unwrap();
        }
    }
}

/// A Chromium: the one named by `CHROMIUM`, an installed one, else Playwright's, under the target folder.
fn chromium(folder: &Path) -> Option<String> {
    let named = std::env::var("CHROMIUM").ok().filter(|path| Path::new(path).exists());
    let installed = || NAMES.iter().find_map(|name| output(Command::new("which").arg(name)));
    if let Some(found) = named.or_else(installed) {
        return Some(found);
    }
    let browsers = folder.join("browsers");
    let mut install = Command::new("npx");
    install.args(["playwright-core", "install", "chromium"]).current_dir(folder);
    output(install.env("PLAYWRIGHT_BROWSERS_PATH", &browsers))?;
    let path = "console.log(require('playwright-core').chromium.executablePath())";
    output(Command::new("node").args(["-e", path]).current_dir(folder).env("PLAYWRIGHT_BROWSERS_PATH", &browsers))
}

/// A running server, ended with the test.
struct Server {
    process: Child,
    address: String,
}

impl Server {
    fn start() -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vramcast"));
        // Plans are looked for by dozens of simulations, which a busy machine does not end in the usual ten seconds.
        command
            .args(["serve", "--port", "0", "--rate", "0", "--timeout", "120", "--log-format", "off"])
            .stdout(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().rsplit(' ').next().unwrap_or_default().to_owned();
        assert!(address.starts_with("http://127.0.0.1:"), "the first line is {line:?}");
        Self { process, address }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Node's packages, the sources of the page and a browser, once for all tests.
struct Ready {
    folder: PathBuf,
    browser: String,
}

static READY: LazyLock<Ready> = LazyLock::new(|| {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("browser");
    copy(&package.join("tests/browser"), &folder);
    let _ = std::fs::remove_dir_all(folder.join("ui"));
    copy(&package.join("ui"), &folder.join("ui"));
    let install = ["ci", "--ignore-scripts", "--no-audit", "--no-fund"];
    run("npm ci", Command::new("npm").args(install).current_dir(&folder));
    let browser = chromium(&folder).expect("a Chromium: an installed one, the one CHROMIUM names, or Playwright's");
    std::fs::create_dir_all(folder.join("shots")).unwrap();
    Ready { folder, browser }
});

impl Ready {
    /// Runs files of tests on a page at an address.
    fn test(&self, address: &str, files: &[&str]) {
        let mut tests = Command::new("node");
        tests.args(["--test", "--test-concurrency=1", "--test-timeout=1800000"]).args(files);
        tests.current_dir(&self.folder).env("VRAMCAST", env!("CARGO_BIN_EXE_vramcast")).env("BASE", address);
        tests.env("RECORDINGS", Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recording"));
        // Its lines come as they are written: the whole takes minutes.
        let status = tests.env("CHROMIUM", &self.browser).env("SHOTS", self.folder.join("shots")).status().unwrap();
        assert!(status.success(), "node --test: {status}");
    }
}

#[test]
#[ignore = "second ring: a browser"]
fn the_page_works_in_a_browser() {
    run("types", Command::new("npx").args(["tsc", "--project", "."]).current_dir(&READY.folder));
    let server = Server::start();
    READY.test(
        &server.address,
        &["access.test.js", "numbers.test.js", "plans.test.js", "flows.test.js", "serving.test.js"],
    );
}

#[test]
#[ignore = "second ring: a browser"]
fn the_page_works_without_a_server() {
    let folder = tempfile::tempdir().unwrap();
    site::write(folder.path());
    let mut command = Command::new("python3");
    command.args(["-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory"]).arg(folder.path());
    let mut process = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let address = line.split(['(', ')']).nth(1).unwrap_or_else(|| panic!("the first line is {line:?}")).to_owned();
    let host = Server { process, address };
    READY.test(&host.address, &["alone.test.js", "flows.test.js", "serving.test.js"]);
}
