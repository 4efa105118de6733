//! The `vramcast` command.

/// A simulation makes and drops tens of thousands of small values; this allocator saves a quarter of its time.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> std::process::ExitCode {
    vramcast::run()
}
