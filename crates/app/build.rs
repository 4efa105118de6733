//! Compiles the stand-in (crates/standin) to the shared library that `vramcast rehearse` carries inside itself.
//!
//! One call of rustc does it: the crate has no dependencies. So `cargo run`, `cargo test` and `cargo install` all give a
//! binary that needs no file beside it. For targets other than Linux nothing is carried, and the command says so.

use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join("standin.so");
    let source = Path::new("../standin/src");
    println!("cargo::rerun-if-changed={}", source.display());
    // Where the driver puts segments is one definition with the core's.
    println!("cargo::rerun-if-changed=../core/src/memory/allocator/driver.rs");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-env=VRAMCAST_STANDIN={}", out.display());
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() != Ok("linux") {
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
