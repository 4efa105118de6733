//! `torch.cuda.memory._dump_snapshot`: what the allocator holds at the end and, when its history was recorded, every
//! block it gave and took back.
//!
//! The history is read backwards from the end, whose blocks are known: so it may begin anywhere. Its sizes are those
//! asked for; the allocator rounds them up to 512 bytes, and so do we.

use std::collections::BTreeMap;

use super::pickle::{Id, Pickle};
use super::place::{Life, Place};
use super::{Ended, Part, Purpose, Recording, RecordingError, Site};

/// Lines of source that are worth showing.
const SITES: usize = 10;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Action {
    Alloc,
    Free,
    Reserve,
    Release,
    /// A request that was not granted; its address is what the driver had free.
    Refused,
}

struct Entry {
    action: Action,
    address: u64,
    bytes: u64,
    frames: Option<Id>,
    place: Place,
}

/// A block that lived at the peak.
struct Alive {
    made: Option<usize>,
    frames: Option<Id>,
    bytes: u64,
    freed: Option<usize>,
}

/// Reads a snapshot; of several devices, the fullest.
pub fn read(bytes: &[u8]) -> Result<Recording, RecordingError> {
    let pickle = Pickle::parse(bytes)?;
    let root = pickle.root();
    let Some(segments) = pickle.key(root, "segments") else {
        return Err(RecordingError::Empty("there are no segments in it: not a memory snapshot of torch"));
    };
    let traces = pickle.key(root, "device_traces").map(|traces| pickle.list(traces)).unwrap_or_default();
    let devices = traces.len().max(1);
    let recordings = (0..devices).map(|device| {
        let of_device = |segment: &&Id| number(&pickle, **segment, "device").unwrap_or(0) == device as u64;
        let segments: Vec<Id> = pickle.list(segments).iter().filter(of_device).copied().collect();
        one_device(&pickle, &segments, traces.get(device).map(|trace| pickle.list(*trace)).unwrap_or_default())
    });
    let fullest = recordings.max_by_key(|recording| recording.peak_allocated);
    let fullest = fullest.filter(|recording| recording.peak_allocated > 0);
    fullest.ok_or(RecordingError::Empty("no device in it holds anything"))
}

fn number(pickle: &Pickle<'_>, id: Id, key: &str) -> Option<u64> {
    pickle.count(pickle.key(id, key)?)
}

fn one_device(pickle: &Pickle<'_>, segments: &[Id], trace: &[Id]) -> Recording {
    let mut places = BTreeMap::new();
    let mut place_of = |frames: Option<Id>| match frames {
        Some(id) => *places.entry(id).or_insert_with(|| Place::of(&frames_of(pickle, id))),
        None => Place::Backward,
    };
    let entries: Vec<Entry> = trace
        .iter()
        .filter_map(|id| {
            let action = match pickle.text(pickle.key(*id, "action")?)? {
                "alloc" => Action::Alloc,
                // `allocated` falls when a block is let go; a stream may hold it a while longer.
                "free_requested" => Action::Free,
                "segment_alloc" | "segment_map" => Action::Reserve,
                "segment_free" | "segment_unmap" => Action::Release,
                "oom" => Action::Refused,
                _ => return None,
            };
            let size = number(pickle, *id, "size")?;
            let bytes = if matches!(action, Action::Alloc | Action::Free) { rounded(size) } else { size };
            let frames = pickle.key(*id, "frames");
            let address = number(pickle, *id, if action == Action::Refused { "device_free" } else { "addr" });
            Some(Entry {
                action,
                address: address.or((action == Action::Refused).then_some(0))?,
                bytes,
                frames,
                place: place_of(frames),
            })
        })
        .collect();
    // What lives at the end, by address.
    let mut at_end: BTreeMap<u64, (u64, Option<Id>)> = BTreeMap::new();
    let mut reserved: u64 = 0;
    for segment in segments {
        reserved = reserved.saturating_add(number(pickle, *segment, "total_size").unwrap_or(0));
        let mut address = number(pickle, *segment, "address").unwrap_or(0);
        for block in pickle.key(*segment, "blocks").map(|blocks| pickle.list(blocks)).unwrap_or_default() {
            let size = number(pickle, *block, "size").unwrap_or(0);
            let state = pickle.key(*block, "state").and_then(|state| pickle.text(state));
            if state == Some("active_allocated") {
                let own = number(pickle, *block, "address").unwrap_or(address);
                at_end.insert(own, (size, pickle.key(*block, "frames")));
            }
            address = address.saturating_add(size);
        }
    }
    let allocated = at_end.values().fold(0_u64, |sum, (size, _)| sum.saturating_add(*size));
    let (peak, at) = peak(&entries, allocated, (Action::Alloc, Action::Free));
    let (peak_reserved, _) = self::peak(&entries, reserved, (Action::Reserve, Action::Release));
    let alive = alive(&entries, at, &at_end);
    let last = entries.iter().rposition(|entry| entry.action == Action::Refused);
    let ended =
        last.map(|at| (&entries[at], before(&entries[at..], allocated, reserved))).map(|(entry, (held, taken))| {
            Ended {
                asked: entry.bytes,
                free: Some(entry.address).filter(|free| *free > 0),
                allocated: held,
                idle: taken.saturating_sub(held),
                place: entry.place.name(),
                line: entry.frames.map(|frames| source(pickle, frames)),
            }
        });
    let mut recording = Recording {
        kind: "memory snapshot of torch",
        peak_allocated: peak,
        peak_reserved: Some(peak_reserved),
        peak_in: at.checked_sub(1).and_then(|last| entries.get(last)).map(|entry| entry.place.name()),
        parts: parts(&entries, &alive, peak, &mut place_of),
        sites: sites(pickle, &alive),
        events: entries.len(),
        ended,
        floors: floors(&entries, allocated),
        notes: Vec::new(),
    };
    let told = recording.parts.iter().fold(0_u64, |sum, part| sum.saturating_add(part.bytes));
    if told != peak {
        recording.parts.clear();
        recording
            .notes
            .push("its history contradicts the blocks at its end, so what lived at the peak is not shown".into());
    }
    if entries.is_empty() {
        let note = "no history in it: this is what lived when it was written, not the peak; call \
                    torch.cuda.memory._record_memory_history() before the run";
        recording.notes.push(note.into());
    }
    recording
}

/// The allocator's unit.
fn rounded(bytes: u64) -> u64 {
    bytes.max(1).checked_next_multiple_of(512).unwrap_or(u64::MAX)
}

/// The most of what one action adds and another takes, and after how many entries; `end` is what there is at the end.
fn peak(entries: &[Entry], end: u64, (adds, takes): (Action, Action)) -> (u64, usize) {
    let (mut now, mut most) = (end, (end, entries.len()));
    for (at, entry) in entries.iter().enumerate().rev() {
        if entry.action == adds {
            now = now.saturating_sub(entry.bytes);
        } else if entry.action == takes {
            now = now.saturating_add(entry.bytes);
        }
        if now >= most.0 {
            most = (now, at);
        }
    }
    most
}

/// What was allocated and reserved before some entries, behind which there is so much.
fn before(entries: &[Entry], mut allocated: u64, mut reserved: u64) -> (u64, u64) {
    for entry in entries.iter().rev() {
        match entry.action {
            Action::Alloc => allocated = allocated.saturating_sub(entry.bytes),
            Action::Free => allocated = allocated.saturating_add(entry.bytes),
            Action::Reserve => reserved = reserved.saturating_sub(entry.bytes),
            Action::Release => reserved = reserved.saturating_add(entry.bytes),
            Action::Refused => {}
        }
    }
    (allocated, reserved)
}

/// What is allocated whenever forward begins after a step of the optimizer; `end` is what there is at the end.
fn floors(entries: &[Entry], end: u64) -> Vec<u64> {
    let (mut now, mut found, mut forward) = (end, Vec::new(), false);
    for entry in entries.iter().rev() {
        match entry.place {
            Place::Forward => forward = true,
            Place::Optimizer | Place::OptimizerState | Place::ZeroGrad if forward => {
                found.push(now);
                forward = false;
            }
            _ => {}
        }
        match entry.action {
            Action::Alloc => now = now.saturating_sub(entry.bytes),
            Action::Free => now = now.saturating_add(entry.bytes),
            _ => {}
        }
    }
    found.reverse();
    found
}

/// The blocks that live after so many entries.
fn alive(entries: &[Entry], at: usize, at_end: &BTreeMap<u64, (u64, Option<Id>)>) -> Vec<Alive> {
    let mut blocks: BTreeMap<u64, Alive> = BTreeMap::new();
    for (made, entry) in entries.iter().enumerate().take(at) {
        match entry.action {
            Action::Alloc => {
                let block = Alive { made: Some(made), frames: entry.frames, bytes: entry.bytes, freed: None };
                blocks.insert(entry.address, block);
            }
            Action::Free => drop(blocks.remove(&entry.address)),
            _ => {}
        }
    }
    // Who goes later without having come is from before the history, as is who is there at the end.
    let mut gone: BTreeMap<u64, ()> = BTreeMap::new();
    for (freed, entry) in entries.iter().enumerate().skip(at) {
        match entry.action {
            Action::Free if gone.insert(entry.address, ()).is_none() => {
                let unknown = Alive { made: None, frames: None, bytes: entry.bytes, freed: None };
                blocks.entry(entry.address).or_insert(unknown).freed = Some(freed);
            }
            Action::Alloc => drop(gone.insert(entry.address, ())),
            _ => {}
        }
    }
    for (address, (bytes, frames)) in at_end {
        if !gone.contains_key(address) {
            let block = Alive { made: None, frames: *frames, bytes: *bytes, freed: None };
            // The block's own size, with what was not worth splitting off.
            blocks.entry(*address).or_insert(block).bytes = *bytes;
        }
    }
    blocks.into_values().collect()
}

fn parts(entries: &[Entry], alive: &[Alive], peak: u64, place_of: &mut impl FnMut(Option<Id>) -> Place) -> Vec<Part> {
    let next = |test: fn(Place) -> bool| {
        // For every entry, the first from it on that is of a kind.
        let mut known = vec![usize::MAX; entries.len() + 1];
        for (at, entry) in entries.iter().enumerate().rev() {
            known[at] = if test(entry.place) { at } else { known[at + 1] };
        }
        known
    };
    let backward = next(|place| place == Place::Backward);
    let optimizer = next(|place| matches!(place, Place::Optimizer | Place::OptimizerState | Place::ZeroGrad));
    let forward = next(|place| place == Place::Forward);
    let mut sums: BTreeMap<Option<Purpose>, u64> = BTreeMap::new();
    for block in alive {
        // Before the history, what has no stack may be anything.
        let known = block.made.is_some() || block.frames.is_some();
        let freed = block.freed.unwrap_or(usize::MAX - 1);
        let from = block.made.map_or(0, |made| made + 1);
        let life = Life {
            made: place_of(block.frames),
            freed: block.freed.and_then(|at| entries.get(at)).map(|entry| entry.place),
            bytes: block.bytes,
            met_backward: backward[from.min(entries.len())] < freed,
            met_optimizer: optimizer[from.min(entries.len())] <= freed,
            met_forward: forward[from.min(entries.len())] < freed,
        };
        let sum = sums.entry(known.then(|| life.purpose())).or_default();
        *sum = sum.saturating_add(block.bytes);
    }
    // What the allocator did not split off from blocks that are gone is seen in no entry.
    let seen = sums.values().fold(0_u64, |sum, bytes| sum.saturating_add(*bytes));
    if let Some(rest) = peak.checked_sub(seen).filter(|rest| *rest > 0) {
        *sums.entry(None).or_default() += rest;
    }
    let mut parts: Vec<Part> = sums.into_iter().map(|(purpose, bytes)| Part { purpose, bytes }).collect();
    crate::order::sort_by_key(&mut parts, |part| std::cmp::Reverse(part.bytes));
    parts
}

/// A stack, innermost first; deep ones are cut, their ends say nothing of memory.
fn frames_of<'a>(pickle: &Pickle<'a>, frames: Id) -> Vec<(&'a str, &'a str)> {
    let text = |frame: Id, key: &str| pickle.key(frame, key).and_then(|id| pickle.text(id)).unwrap_or_default();
    pickle.list(frames).iter().take(256).map(|frame| (text(*frame, "filename"), text(*frame, "name"))).collect()
}

/// The line of source of a stack: torch's own frames say which kernel; the first other one says whose code it was.
fn source(pickle: &Pickle<'_>, frames: Id) -> String {
    let list = pickle.list(frames);
    let text = |frame: Id, key: &str| pickle.key(frame, key).and_then(|id| pickle.text(id)).unwrap_or_default();
    // Frames of C++ may stand among those of Python.
    let python = |frame: &&Id| text(**frame, "filename").ends_with(".py");
    let theirs = |frame: &&Id| !text(**frame, "filename").contains("/torch/");
    let own = list.iter().find(|frame| python(frame) && theirs(frame)).or_else(|| list.iter().find(python));
    let own = own.or_else(|| list.iter().find(theirs)).or(list.first());
    let Some(frame) = own else { return "the backward pass (no stack)".to_owned() };
    let file = text(*frame, "filename");
    let file = file.rsplit_once("site-packages/").map_or(file, |(_, short)| short);
    format!("{file}:{} {}", number(pickle, *frame, "line").unwrap_or(0), text(*frame, "name"))
}

fn sites(pickle: &Pickle<'_>, alive: &[Alive]) -> Vec<Site> {
    let mut sums: BTreeMap<String, (u64, u64)> = BTreeMap::new();
    for block in alive {
        let Some(frames) = block.frames else { continue };
        let sum = sums.entry(source(pickle, frames)).or_default();
        *sum = (sum.0.saturating_add(block.bytes), sum.1 + 1);
    }
    let mut sites: Vec<Site> =
        sums.into_iter().map(|(source, (bytes, blocks))| Site { source, bytes, blocks }).collect();
    crate::order::sort_by_key(&mut sites, |site| std::cmp::Reverse(site.bytes));
    sites.truncate(SITES);
    sites
}
