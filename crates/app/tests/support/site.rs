//! The static site as `vramcast page` writes it, around a core that is built for it quickly, or the one that `VRAMCAST_CORE` names:
//! what is shipped takes minutes to build and answers many times faster.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Writes the site into a folder.
pub(crate) fn write(folder: &Path) {
    let core = std::env::var_os("VRAMCAST_CORE").map_or_else(built, PathBuf::from);
    let mut page = Command::new(env!("CARGO_BIN_EXE_vramcast"));
    let written = page.arg("page").arg("--out").arg(folder).arg("--core").arg(core).output().unwrap();
    assert!(written.status.success(), "{}", String::from_utf8_lossy(&written.stderr));
}

fn built() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let target = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("..");
    let mut cargo = Command::new("cargo");
    cargo.args(["build", "--quiet", "--target", "wasm32-unknown-unknown", "-p", "vramcast-web"]);
    let built = cargo.current_dir(root).env("CARGO_TARGET_DIR", &target).status().unwrap();
    assert!(
        built.success(),
        "the core as WebAssembly: rustup target add wasm32-unknown-unknown, if that is what it lacks"
    );
    target.join("wasm32-unknown-unknown/debug/vramcast_web.wasm")
}
