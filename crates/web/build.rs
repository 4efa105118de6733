//! Room for deep simulations (WebAssembly's stack is a mebibyte unless somebody says otherwise), and as few bytes as can be.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_FAMILY").is_ok_and(|family| family == "wasm") {
        println!("cargo::rustc-link-arg-cdylib=-zstack-size={}", 16 << 20);
        // Numbers that the linker fills in take five bytes each unless it may shorten them, which it does where it strips.
        if std::env::var("PROFILE").is_ok_and(|profile| profile == "release") {
            println!("cargo::rustc-link-arg-cdylib=--compress-relocations");
        }
    }
}
