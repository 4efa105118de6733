//! What the driver said a moment ago, so that a question a second later need not wait for it again.
//!
//! Starting NVML takes tens of milliseconds, several times what an estimate takes. The answer is kept in our own cache for
//! a minute, and only for the same boot, the same driver and the same visible devices. `vramcast detect` always asks.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// How long what the driver said is taken for true, in seconds: other programs come and go.
const SECONDS: u64 = 60;

/// What decides whether an answer still holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Key {
    version: String,
    boot: String,
    driver: String,
    visible: Option<String>,
}

impl Key {
    /// Of this machine; absent where the system does not say when it was started or which driver it runs.
    pub(super) fn read(visible: Option<&str>) -> Option<Self> {
        let file = |path: &str| std::fs::read_to_string(path).ok();
        Some(Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            boot: file("/proc/sys/kernel/random/boot_id")?,
            driver: file("/proc/driver/nvidia/version")?,
            visible: visible.map(str::to_owned),
        })
    }
}

/// A GPU as the driver describes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Seen {
    /// As the driver calls it.
    pub(super) name: String,
    /// Compute capability times ten.
    pub(super) capability: Option<u32>,
    /// Memory in all, in bytes.
    pub(super) total: u64,
    /// What is in use.
    pub(super) used: u64,
    /// What is free.
    pub(super) free: u64,
}

#[derive(Serialize, Deserialize)]
struct Memory {
    key: Key,
    asked: u64,
    first: Option<Seen>,
}

/// What the file remembers under that key, or else what `ask` says, which is then remembered. A file that cannot be read or
/// written is a slower program, not an error.
pub(super) fn or_ask(file: &Path, key: Key, now: u64, ask: impl FnOnce() -> Option<Seen>) -> Option<Seen> {
    let known = std::fs::read(file).ok().and_then(|bytes| serde_json::from_slice::<Memory>(&bytes).ok());
    // A clock that was set back makes an answer of the future, which is as good as none.
    let fresh = |known: &Memory| known.key == key && known.asked <= now && now - known.asked < SECONDS;
    if let Some(known) = known.filter(fresh) {
        return known.first;
    }
    let memory = Memory { key, asked: now, first: ask() };
    let write = || -> std::io::Result<()> {
        let folder = file.parent().ok_or(std::io::ErrorKind::NotFound)?;
        std::fs::create_dir_all(folder)?;
        // Written beside and moved over, so that no other process reads half a file.
        let beside = tempfile::NamedTempFile::new_in(folder)?;
        serde_json::to_writer(&beside, &memory)?;
        beside.persist(file)?;
        Ok(())
    };
    let _ = write();
    memory.first
}

/// Seconds since 1970.
pub(super) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(driver: &str, visible: Option<&str>) -> Key {
        let text = str::to_owned;
        Key { version: text("0"), boot: text("b"), driver: text(driver), visible: visible.map(text) }
    }

    fn seen(used: u64) -> Option<Seen> {
        Some(Seen { name: "NVIDIA H200".into(), capability: Some(90), total: 150, used, free: 150 - used })
    }

    #[test]
    fn an_answer_holds_for_a_minute_on_the_same_machine() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("new/gpu.json");
        let never = || panic!("the driver was asked");
        assert_eq!(or_ask(&file, key("1", None), 1000, || seen(1)), seen(1));
        assert_eq!(or_ask(&file, key("1", None), 1059, never), seen(1));
        assert_eq!(or_ask(&file, key("1", None), 1060, || seen(2)), seen(2));
        assert_eq!(or_ask(&file, key("1", None), 900, || seen(3)), seen(3), "the clock was set back");
        assert_eq!(or_ask(&file, key("2", None), 901, || seen(4)), seen(4), "another driver");
        assert_eq!(or_ask(&file, key("2", Some("1")), 902, || None), None, "other devices");
        assert_eq!(or_ask(&file, key("2", Some("1")), 903, never), None, "that there is none is remembered too");
    }

    #[test]
    fn a_file_that_is_no_memory_is_asked_anew() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("gpu.json");
        std::fs::write(&file, "{\"key\": 3}").unwrap();
        assert_eq!(or_ask(&file, key("1", None), 5, || seen(1)), seen(1));
        let nowhere = file.join("below a file");
        assert_eq!(or_ask(&nowhere, key("1", None), 5, || seen(2)), seen(2));
    }
}
