//! Calls nobody wrote: they succeed, and are counted, and the parent process lists them at the end.

use std::collections::BTreeMap;
use std::ffi::{c_char, c_void};
use std::io::Write;
use std::sync::{LazyLock, Mutex, Once, PoisonError};

use crate::foreign::{at_exit, text};

static CALLS: LazyLock<Mutex<BTreeMap<String, u64>>> = LazyLock::new(Mutex::default);

/// Counts one call. The first of a name is written down at once, because a process may end without notice.
fn count(name: &str) {
    static LEAVING: Once = Once::new();
    LEAVING.call_once(|| at_exit(write_counts));
    let mut calls = CALLS.lock().unwrap_or_else(PoisonError::into_inner);
    let times = calls.entry(name.to_owned()).or_default();
    *times += 1;
    if *times == 1 {
        write(&format!("{name} 1\n"));
    }
}

/// Appends to the file of this process in the folder of the rehearsal; without one, nothing is kept.
fn write(lines: &str) {
    let Some(folder) = std::env::var_os("VRAMCAST_REHEARSAL") else { return };
    let path = std::path::Path::new(&folder).join(format!("unknown-{}.txt", std::process::id()));
    if let Ok(mut file) = std::fs::OpenOptions::new().create(true).append(true).open(path) {
        let _ = file.write_all(lines.as_bytes());
    }
}

extern "C" fn write_counts() {
    let calls = CALLS.lock().unwrap_or_else(PoisonError::into_inner);
    let lines: String = calls.iter().map(|(name, times)| format!("{name} {times}\n")).collect();
    write(&lines);
}

/// Counts an answer that only NVIDIA's library knows: what is needed for it is taken to be nothing.
pub(crate) fn not_counted(what: &str) {
    count(&format!("not counted: {what}"));
}

/// What a search by name gives for a function that is nowhere.
pub(crate) fn entry(name: &str) -> *mut c_void {
    count(&format!("{name} (asked for by name)"));
    vramcast_nothing as *mut c_void
}

exports! {
    // The generated entries jump here with their own name.
    fn vramcast_unknown(name: *const c_char) -> usize {
        count(text(name));
        0
    }

    fn vramcast_nothing() -> usize { 0 }
}
