//! The wheel, built and installed into a fresh virtual environment, and everything Python says about it; then beside real
//! torch, transformers and peft.
#![allow(clippy::disallowed_methods, reason = "tests run programs")]

#[path = "../../app/tests/support/torch.rs"]
mod torch;

use std::path::{Path, PathBuf};
use std::process::Command;

use torch::{Card, PythonWithTorch};

fn run(what: &str, command: &mut Command) {
    let output = command.output().unwrap_or_else(|e| panic!("{what}: {e}"));
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(output.status.success(), "{what}: {}\n{text}", output.status);
    println!("{text}");
}

fn pip(python: &Path, packages: &[&str]) -> Command {
    let mut command = Command::new(python);
    command.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]).args(packages);
    command
}

#[test]
#[ignore = "second ring: the wheel, torch"]
fn the_wheel_works() {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("python");
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    let environment = folder.join("environment");
    let python = environment.join("bin/python");
    let tools = ["maturin>=1.9,<2", "pytest", "mypy", "pandas", "pandas-stubs", "nbclient", "ipykernel"];
    run("python3 with venv", Command::new("python3").args(["-m", "venv"]).arg(&environment));
    run("pip install", &mut pip(&python, &tools));
    let wheels = folder.join("wheels");
    let mut build = Command::new(environment.join("bin/maturin"));
    build.args(["build", "--profile", "dev", "--out"]).arg(&wheels).current_dir(package);
    // What cargo tells a test of its package would make it build crates anew that look at it (ring), here and next time.
    for (name, _) in std::env::vars_os() {
        if ["CARGO_PKG_", "CARGO_MANIFEST_"].iter().any(|start| name.to_string_lossy().starts_with(start)) {
            build.env_remove(name);
        }
    }
    run("maturin build", &mut build);
    let wheel = std::fs::read_dir(&wheels).unwrap().next().unwrap().unwrap().path();
    run("pip install", &mut pip(&python, &[wheel.to_str().unwrap()]));
    let tests = package.join("tests/python");
    let found = std::env::join_paths(
        std::iter::once(environment.join("bin"))
            .chain(std::env::var_os("PATH").iter().flat_map(std::env::split_paths).collect::<Vec<_>>()),
    );
    let quiet = ["-m", "pytest", "-q", "-p", "no:cacheprovider"];
    run("pytest", Command::new(&python).args(quiet).arg(&tests).env("PATH", found.unwrap()));
    let types = ["-m", "mypy", "--strict", "--cache-dir"];
    let sources = [package.join("python/vramcast"), tests.join("typed.py")];
    run("mypy", Command::new(&python).args(types).arg(folder.join("mypy")).args(sources));
    let vramcast = environment.join("bin/vramcast");
    run("the command", Command::new(&vramcast).args(["train", "gpt2"]));
    beside_torch(&folder, &wheel, &vramcast, &tests.join("test_libraries.py"));
}

/// Objects of the real libraries: the wheel, pytest and peft in a folder of their own before an interpreter with torch.
fn beside_torch(folder: &Path, wheel: &Path, vramcast: &Path, test: &Path) {
    let python = PythonWithTorch::get();
    let target = folder.join("beside-torch");
    let into = ["--target", target.to_str().unwrap()];
    run("pip install pytest", &mut pip(&python.path, &[&into[..], &["pytest", "psutil"]].concat()));
    // Alone: they would bring torch's own dependencies.
    let alone = ["--no-deps", "peft==0.21.0", "accelerate==1.15.0", wheel.to_str().unwrap()];
    run("pip install peft", &mut pip(&python.path, &[&into[..], &alone].concat()));
    let mut command = python.command(vramcast, Card::None, python.path.as_os_str());
    command.args(["-m", "pytest", "-q", "-p", "no:cacheprovider"]).arg(test).env("PYTHONPATH", &target);
    run("pytest beside torch", &mut command);
}
