//! What a program without Python writes down of itself, in the words of the hook that Python's programs run.

use std::io::Write;
use std::sync::{LazyLock, Once};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::foreign::at_exit;

/// Whether nobody else writes.
static ALONE: LazyLock<bool> = LazyLock::new(|| std::env::var_os("VRAMCAST_NATIVE").is_some());

/// A device holds more than ever before.
pub(crate) fn grown(device: usize, used: u64) {
    write(&format!(
        r#"{{"event":"phase","phase":"","device":{device},"before":0,"after":{used},"peak":{used},"reserved":{used},"peak_reserved":{used},"driver":{used},"driver_peak":{used},"refused":0}}"#
    ));
}

/// A device was full.
pub(crate) fn full(device: usize, wanted: u64, free: u64, used: u64) {
    write(&format!(
        r#"{{"event":"full","phase":"","device":{device},"wanted":{wanted},"free":{free},"allocated":{used},"reserved":{used}}}"#
    ));
    write(
        r#"{"event":"exception","kind":"cudaErrorMemoryAllocation","message":"out of memory","full":true,"phase":""}"#,
    );
}

fn write(line: &str) {
    static FIRST: Once = Once::new();
    if !*ALONE {
        return;
    }
    FIRST.call_once(|| {
        at_exit(end);
        append(&format!(r#"{{"event":"start","torch":"","rank":0,"world":1,"time":{}}}"#, now()));
    });
    append(line);
}

extern "C" fn end() {
    append(&format!(r#"{{"event":"end","steps":0,"alive":[],"problem":null,"time":{}}}"#, now()));
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

fn append(line: &str) {
    let Some(folder) = std::env::var_os("VRAMCAST_REHEARSAL") else { return };
    let path = std::path::Path::new(&folder).join(format!("journal-{}.jsonl", std::process::id()));
    if let Ok(mut file) = std::fs::OpenOptions::new().create(true).append(true).open(path) {
        let _ = file.write_all(format!("{line}\n").as_bytes());
    }
}
