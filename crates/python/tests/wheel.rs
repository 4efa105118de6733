//! The wheel, built and installed into a fresh virtual environment, and everything Python says about it.
#![allow(clippy::disallowed_methods, reason = "tests run programs")]

use std::path::{Path, PathBuf};
use std::process::Command;

fn run(what: &str, command: &mut Command) {
    let output = command.output().unwrap_or_else(|e| panic!("{what}: {e}"));
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(output.status.success(), "{what}: {}\n{text}", output.status);
    println!("{text}");
}

#[test]
fn the_wheel_works() {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("python");
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    let environment = folder.join("environment");
    let python = environment.join("bin/python");
    let pip = |packages: &[&str]| {
        let mut command = Command::new(&python);
        command.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]).args(packages);
        command
    };
    // Without Python or its package registry there is nothing to test with; what fails after that is our fault.
    let tools = ["maturin>=1.9,<2", "pytest", "mypy", "pandas", "pandas-stubs", "nbclient", "ipykernel"];
    let made = Command::new("python3").args(["-m", "venv"]).arg(&environment).output();
    let ready = made.is_ok_and(|made| made.status.success()) && pip(&tools).status().is_ok_and(|s| s.success());
    if !ready {
        eprintln!("SKIPPED: no python3 with venv, or no package registry");
        return;
    }
    let wheels = folder.join("wheels");
    let mut build = Command::new(environment.join("bin/maturin"));
    build.args(["build", "--profile", "dev", "--out"]).arg(&wheels).current_dir(package);
    run("maturin build", &mut build);
    let wheel = std::fs::read_dir(&wheels).unwrap().next().unwrap().unwrap().path();
    run("pip install", &mut pip(&[wheel.to_str().unwrap()]));
    let tests = package.join("tests/python");
    run("pytest", Command::new(&python).args(["-m", "pytest", "-q", "-p", "no:cacheprovider"]).arg(&tests));
    let types = ["-m", "mypy", "--strict", "--cache-dir"];
    let sources = [package.join("python/vramcast"), tests.join("typed.py")];
    run("mypy", Command::new(&python).args(types).arg(folder.join("mypy")).args(sources));
    run("the command", Command::new(environment.join("bin/vramcast")).args(["train", "gpt2"]));
}
