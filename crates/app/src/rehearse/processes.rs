//! Every process of a rehearsal, to end them all.
//!
//! A process group would not do: torchrun and DeepSpeed start their workers in sessions of their own, which neither Ctrl-C nor
//! a signal to the group reaches. All of them inherit the environment, though, and it names the folder of the rehearsal.

use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

/// How often it is looked whether they are gone.
const GLANCE: Duration = Duration::from_millis(50);
/// How long the program has for its last lines.
const ASKED: Duration = Duration::from_secs(10);
/// How long what it left behind has.
const TOLD: Duration = Duration::from_secs(2);

/// Asks all to stop, as Ctrl-C does, so that they can still write their last lines; then makes them.
pub(super) fn stop(child: &mut Child, folder: &Path) {
    signal("-INT", folder);
    wait(ASKED, || matches!(child.try_wait(), Ok(Some(_))));
    // What a shell started in the background does not listen to Ctrl-C.
    signal("-TERM", folder);
    wait(TOLD, || alive(folder).is_empty());
    signal("-KILL", folder);
    let _ = child.kill();
}

fn wait(limit: Duration, mut done: impl FnMut() -> bool) {
    let since = Instant::now();
    while !done() && since.elapsed() < limit {
        std::thread::sleep(GLANCE);
    }
}

fn signal(name: &str, folder: &Path) {
    let all: Vec<String> = alive(folder).iter().map(u32::to_string).collect();
    if !all.is_empty() {
        // The shell's own: small images have no program of that name. One that ended in between is a complaint, and no harm.
        let line = format!("kill {name} {}", all.join(" "));
        let _ = Command::new("sh").args(["-c", &line]).stderr(std::process::Stdio::null()).status();
    }
}

/// The processes whose environment names this folder. Those of other users cannot be read and are none of them.
fn alive(folder: &Path) -> Vec<u32> {
    let wanted = format!("VRAMCAST_REHEARSAL={}", folder.display());
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .filter(|process| {
            // What has ended but was not waited for has no environment any more.
            let environment = std::fs::read(format!("/proc/{process}/environ")).unwrap_or_default();
            environment.split(|byte| *byte == 0).any(|variable| variable == wanted.as_bytes())
        })
        .collect()
}
