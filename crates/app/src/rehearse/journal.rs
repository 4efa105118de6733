//! What the program's processes wrote down while they ran: one file each, one JSON object a line (`hook.py`).

use std::collections::BTreeMap;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// One line.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub enum Line {
    /// CUDA was initialised.
    Start {
        /// torch's version.
        torch: String,
        /// The process's rank in its world.
        rank: u32,
        /// The world's size.
        world: u32,
        /// Seconds since 1970.
        #[serde(default)]
        time: f64,
        /// Which of the machine's cards the process sees (`CUDA_VISIBLE_DEVICES`), where it does not see all.
        #[serde(default)]
        visible: Option<String>,
    },
    /// A phase ended on one device.
    Phase(Phase),
    /// An optimizer step is over.
    Step {
        /// How many are.
        step: u64,
    },
    /// torch could not allocate.
    Full(Full),
    /// An exception ended the program.
    Exception {
        /// Its class.
        kind: String,
        /// What it says.
        message: String,
        /// Whether it is torch's OutOfMemoryError.
        full: bool,
        /// When it was.
        phase: String,
    },
    /// A line of the program waits for what only a real GPU computes, and was stopped.
    Waits {
        /// The line of source.
        source: String,
    },
    /// A size that depends on data, which a pretended card has not: it was taken as a share of the largest possible.
    Guess(Guess),
    /// The model was called with other shapes than before.
    Varied {
        /// The smallest input, such as `4×128`.
        smallest: String,
        /// The largest.
        largest: String,
    },
    /// What kind of run it was (`recognise.py`).
    Run {
        /// In the words of the ledger, if it was recognised.
        row: Option<Value>,
        /// Why it was not.
        problem: Option<String>,
    },
    /// The process ended.
    End {
        /// Optimizer steps.
        steps: u64,
        /// What was alive at the peak of each device.
        alive: Vec<Alive>,
        /// Why part of the report is missing.
        problem: Option<String>,
        /// Seconds since 1970.
        #[serde(default)]
        time: f64,
    },
}

/// A size that only data decides.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Guess {
    /// The line of source.
    pub source: String,
    /// What asked, such as `nonzero`.
    pub call: String,
    /// How many elements were taken as chosen.
    pub counted: u64,
    /// Of how many.
    pub of: u64,
}

/// One phase on one device; sizes in bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Phase {
    /// Such as `0.0.fwd`: step, micro-batch, what.
    pub phase: String,
    /// The device's number.
    pub device: u32,
    /// Allocated when it began.
    pub before: u64,
    /// Allocated when it ended.
    pub after: u64,
    /// The most allocated.
    pub peak: u64,
    /// Reserved when it ended.
    pub reserved: u64,
    /// The most reserved.
    pub peak_reserved: u64,
    /// Asked from the driver when it ended, torch's segments included.
    pub driver: u64,
    /// The most asked from the driver since the start.
    pub driver_peak: u64,
    /// How often the driver was full since the start.
    pub refused: u64,
}

/// torch gave up: an allocation did not fit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Full {
    /// When it was.
    pub phase: String,
    /// The device's number.
    pub device: u32,
    /// What was asked for.
    pub wanted: u64,
    /// What was free.
    pub free: u64,
    /// What tensors held.
    #[serde(default)]
    pub allocated: u64,
    /// What torch held, after it had given back what it could.
    #[serde(default)]
    pub reserved: u64,
}

/// What was alive at a device's peak.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Alive {
    /// The device's number.
    pub device: u32,
    /// Bytes asked for at that moment.
    pub requested: u64,
    /// Whether the recording was too long to be kept whole.
    pub truncated: bool,
    /// By line of source, largest first.
    pub lines: Vec<SourceLine>,
    /// By what it is for, where the run was recognised.
    #[serde(default)]
    pub parts: BTreeMap<String, u64>,
}

/// What a line of source holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceLine {
    /// File, line and function, and the one that called it.
    pub source: String,
    /// Bytes.
    pub bytes: u64,
    /// Tensors.
    pub count: u64,
}

/// Reads the journals of a folder as they grow.
#[derive(Debug, Default)]
pub struct Journals {
    files: BTreeMap<u32, (u64, Vec<Line>)>,
}

impl Journals {
    /// Takes in what was written since the last time; gives the new lines with their process.
    pub fn read(&mut self, folder: &Path) -> Vec<(u32, Line)> {
        let mut new = Vec::new();
        for (process, path) in journals(folder) {
            let (offset, lines) = self.files.entry(process).or_default();
            let text = rest_of(&path, *offset);
            // A last line without its end is still being written.
            let whole = text.rfind('\n').map_or(0, |end| end + 1);
            *offset += whole as u64;
            for line in text[..whole].lines().filter_map(|line| serde_json::from_str::<Line>(line).ok()) {
                new.push((process, line.clone()));
                lines.push(line);
            }
        }
        new
    }

    /// All lines, process by process.
    pub fn processes(self) -> Vec<(u32, Vec<Line>)> {
        self.files.into_iter().map(|(process, (_, lines))| (process, lines)).collect()
    }
}

fn journals(folder: &Path) -> Vec<(u32, PathBuf)> {
    let mut found = files(folder, "journal-", ".jsonl");
    found.sort();
    found
}

/// Files of a folder that carry the number of a process.
fn files(folder: &Path, start: &str, end: &str) -> Vec<(u32, PathBuf)> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            Some((name.strip_prefix(start)?.strip_suffix(end)?.parse().ok()?, entry.path()))
        })
        .collect()
}

fn rest_of(path: &Path, offset: u64) -> String {
    let read = || {
        let mut file = std::fs::File::open(path)?;
        file.seek(SeekFrom::Start(offset))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        Ok::<_, std::io::Error>(String::from_utf8_lossy(&bytes).into_owned())
    };
    read().unwrap_or_default()
}

/// Calls that nobody wrote, and how often they were made, over all processes (the stand-in's files).
pub fn unknown_calls(folder: &Path) -> BTreeMap<String, u64> {
    let mut calls: BTreeMap<String, u64> = BTreeMap::new();
    for (_, path) in files(folder, "unknown-", ".txt") {
        let mut own: BTreeMap<String, u64> = BTreeMap::new();
        for line in rest_of(&path, 0).lines() {
            if let Some((name, times)) = line.rsplit_once(' ') {
                // The first call is written at once, the count at the end.
                let times = times.parse().unwrap_or(1);
                own.entry(name.to_owned()).and_modify(|known| *known = times.max(*known)).or_insert(times);
            }
        }
        for (name, times) in own {
            *calls.entry(name).or_default() += times;
        }
    }
    calls
}

/// Where Python was when a fatal signal came (`faulthandler`'s files): the line of source and what stands there.
pub fn fault(folder: &Path) -> Option<String> {
    let (_, text) = files(folder, "fault-", ".txt")
        .into_iter()
        .map(|(process, path)| (process, rest_of(&path, 0)))
        .find(|(_, text)| text.contains("Fatal Python error"))?;
    // `  File "train.py", line 3 in main`, the innermost first, below the thread that was running.
    let thread = text.find("Current thread").map_or(text.as_str(), |start| &text[start..]);
    let place = |line: &str| {
        let (path, rest) = line.trim().strip_prefix("File \"")?.split_once("\", line ")?;
        if Path::new(path).starts_with(folder.join("hook")) {
            return None; // ours, between the program and torch
        }
        let (number, _) = rest.split_once(' ')?;
        let number: usize = number.parse().ok()?;
        let source = rest_of(Path::new(path), 0).lines().nth(number.checked_sub(1)?).map(|line| line.trim().to_owned());
        let name = Path::new(path).file_name()?.to_string_lossy().into_owned();
        Some(format!("`{}` ({name}:{number})", source.unwrap_or_default()))
    };
    Some(thread.lines().find_map(place).unwrap_or_else(|| "a thread without Python".into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn journals_are_read_as_they_grow() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal-7.jsonl");
        let start = r#"{"event": "start", "time": 1.5, "torch": "2.11", "arguments": [], "rank": 0, "world": 1, "device": "x"}"#;
        std::fs::write(&path, format!("{start}\n{{\"event\": \"step\", \"st")).unwrap();
        let mut journals = Journals::default();
        assert_eq!(journals.read(folder.path()).len(), 1);
        std::fs::write(&path, format!("{start}\n{{\"event\": \"step\", \"step\": 3}}\nnonsense\n")).unwrap();
        assert_eq!(journals.read(folder.path()), [(7, Line::Step { step: 3 })]);
        assert_eq!(journals.processes()[0].1.len(), 2);
    }

    #[test]
    fn a_fault_is_named_by_its_line() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(fault(folder.path()), None);
        let program = folder.path().join("train.py");
        std::fs::write(&program, "import torch\ntorch.linalg.svd(x)\n").unwrap();
        let trace = format!(
            "Fatal Python error: Segmentation fault\n\nThread 0x1 (most recent call first):\n  File \"other.py\", line 1 in wait\n\n\
             Current thread 0x2 (most recent call first):\n  File \"{}\", line 2 in <module>\n",
            program.display()
        );
        std::fs::write(folder.path().join("fault-3.txt"), trace).unwrap();
        assert_eq!(fault(folder.path()).unwrap(), "`torch.linalg.svd(x)` (train.py:2)");
    }

    #[test]
    fn unknown_calls_are_summed() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("unknown-1.txt"), "cuOdd 1\ncuOdd 5\n").unwrap();
        std::fs::write(folder.path().join("unknown-2.txt"), "cuOdd 1\ncuEven (asked for by name) 1\n").unwrap();
        let calls = unknown_calls(folder.path());
        assert_eq!((calls["cuOdd"], calls["cuEven (asked for by name)"]), (6, 1));
    }
}
