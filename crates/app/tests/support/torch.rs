//! A Python with torch and transformers for tests that run the real thing.
//!
//! The registry's torch for Linux is the CUDA build. By itself it is 0.5 GB; what makes it 3 GB are NVIDIA's packages,
//! which it cannot be imported without. A rehearsal puts the stand-in in their place, so they are left out: with a card
//! that is pretended, or with none for runs on the CPU.
#![allow(dead_code, reason = "not every test that includes this file needs all of it")]

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The versions that most of the recorded truth was measured with.
const TORCH: &str = "torch==2.11.0";
/// What torch imports besides NVIDIA's, and whose models are run.
const BESIDE: [&str; 9] = [
    "transformers==5.17.0",
    "numpy",
    "typing-extensions",
    "sympy",
    "networkx",
    "jinja2",
    "filelock",
    "fsspec",
    "setuptools",
];

/// An interpreter that has torch.
#[derive(Debug, Clone)]
pub(crate) struct PythonWithTorch {
    /// Where it is.
    pub(crate) path: PathBuf,
    /// Whether torch is there without NVIDIA's libraries, so that it runs in a rehearsal only.
    pub(crate) bare: bool,
}

/// What the program is to see.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Card {
    /// No GPU.
    None,
    /// A pretended H200.
    H200,
}

impl PythonWithTorch {
    /// The interpreter that `VRAMCAST_TEST_PYTHON` names, or one that is made under the target folder at the first test.
    pub(crate) fn get() -> &'static Self {
        static FOUND: OnceLock<PythonWithTorch> = OnceLock::new();
        FOUND.get_or_init(|| Self::of(std::env::var_os("VRAMCAST_TEST_PYTHON").map_or_else(made, PathBuf::from)))
    }

    fn of(path: PathBuf) -> Self {
        let imported = Command::new(&path).args(["-c", "import torch"]).output();
        Self { bare: !imported.is_ok_and(|output| output.status.success()), path }
    }

    /// A command line that runs `program` so that its torch sees that card; `vramcast` holds the rehearsal.
    pub(crate) fn command(&self, vramcast: &Path, card: Card, program: &OsStr) -> Command {
        if !self.bare && card == Card::None {
            let mut command = Command::new(program);
            command.env("CUDA_VISIBLE_DEVICES", "");
            return command;
        }
        let ask = ["-c", "from torch import version; raise SystemExit(version.cuda is None)"];
        let has_cuda = self.bare || Command::new(&self.path).args(ask).status().is_ok_and(|status| status.success());
        assert!(cfg!(target_os = "linux") && has_cuda, "a card is pretended only on Linux, for a CUDA build of torch");
        let mut command = Command::new(vramcast);
        command.args(["rehearse", "--quiet", "--no-sources", "--gpu", "H200", "--python"]).arg(&self.path).arg("--");
        if card == Card::None {
            command.args(["env", "CUDA_VISIBLE_DEVICES="]);
        }
        command.arg(program);
        command
    }
}

/// A virtual environment under the target folder, made once: half a gigabyte to fetch, 1.7 on the disk.
fn made() -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("torch-2.11.0");
    let (python, complete) = (folder.join("bin/python"), folder.join("complete"));
    if complete.exists() {
        return python;
    }
    let _ = std::fs::remove_dir_all(&folder);
    let done = |command: &mut Command| command.status().is_ok_and(|status| status.success());
    let pip = |packages: &[&str]| {
        let quiet = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir"];
        done(Command::new(&python).args(quiet).args(packages))
    };
    let ready = done(Command::new("python3").args(["-m", "venv"]).arg(&folder))
        && pip(&BESIDE)
        // Last and alone: whatever is installed after it would bring what it asks for.
        && pip(&["--no-deps", TORCH])
        && std::fs::write(&complete, "").is_ok();
    assert!(ready, "no python3 with venv, or no package registry; VRAMCAST_TEST_PYTHON names a Python with torch");
    python
}
