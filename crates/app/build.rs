//! Compiles the stand-in (crates/standin) to the shared library that `vramcast rehearse` carries inside itself.
//!
//! One call of rustc does it: the crate has no dependencies. So `cargo run`, `cargo test` and `cargo install` all give a
//! binary that needs no file beside it. `standin` is a link to that crate's sources, so a package of this crate holds them too.
//! For targets other than Linux with glibc, the only one that torch with CUDA is built for, nothing is carried, and the
//! command says so.

use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join("standin.so");
    let source = Path::new("standin");
    println!("cargo::rerun-if-changed={}", source.display());
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-env=VRAMCAST_STANDIN={}", out.display());
    let target = |part: &str| std::env::var(format!("CARGO_CFG_TARGET_{part}")).unwrap_or_default();
    if target("OS") != "linux" || target("ENV") != "gnu" {
        std::fs::write(&out, []).expect("OUT_DIR is writable");
        return;
    }
    let mut rustc = Command::new(std::env::var_os("RUSTC").expect("cargo sets RUSTC"));
    rustc.arg(source.join("lib.rs")).arg("-o").arg(&out);
    rustc.args([
        "--crate-name",
        "vramcast_standin",
        "--crate-type",
        "cdylib",
        "--edition",
        "2024",
        "--cap-lints",
        "allow",
    ]);
    rustc.args(["-C", "opt-level=2", "-C", "strip=symbols", "-C", "panic=abort"]);
    rustc.args(["-C", "link-arg=-Wl,-soname,libvramcast_standin.so"]);
    rustc.args(["--target", &std::env::var("TARGET").expect("cargo sets TARGET")]);
    if let Some(linker) = std::env::var_os("RUSTC_LINKER") {
        rustc.arg("-C").arg(format!("linker={}", linker.display()));
    }
    let status = rustc.status().expect("rustc runs");
    assert!(status.success(), "the stand-in of crates/standin does not compile");
}
