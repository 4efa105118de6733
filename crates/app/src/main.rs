//! The `vramcast` command.

fn main() -> std::process::ExitCode {
    vramcast::run()
}
