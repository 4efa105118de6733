//! A rehearsal as text.

use super::page::wrapped;
use super::table::Table;
use super::train::{TORCH, levels, phase_name, verdicts};
use super::{bar, gib, width};
use crate::rehearse::beside::{Beside, PARTS};
use crate::rehearse::journal::Phase;
use crate::rehearse::{Ending, Rehearsal};

const GIB: u64 = 1 << 30;
/// Lines of source that are shown.
const LINES: usize = 12;

/// What the tables of a run are counted in: small programs are tried as well, and in GiB they would be all zeros.
#[derive(Clone, Copy)]
struct Unit {
    name: &'static str,
    bytes: u64,
}

impl Unit {
    fn of(rehearsal: &Rehearsal) -> Self {
        match rehearsal.totals.allocated {
            0..GIB => Self { name: "MiB", bytes: 1 << 20 },
            _ => Self { name: "GiB", bytes: GIB },
        }
    }

    fn show(self, bytes: u64) -> String {
        format!("{:.2}", bytes as f64 / self.bytes as f64)
    }
}

/// How the stand-in marks what it cannot know (`unknown.rs`).
const NOT_COUNTED: &str = "not counted: ";

/// The whole page.
pub fn text(rehearsal: &Rehearsal) -> String {
    let mut page = format!(
        "rehearsed on {}{}, {:.1} s\n{}\n\n",
        rehearsal.device_name,
        if rehearsal.torch.is_empty() { String::new() } else { format!(" with torch {}", rehearsal.torch) },
        rehearsal.seconds,
        wrapped(&ending(&rehearsal.ending), width())
    );
    if rehearsal.processes.is_empty() {
        return page;
    }
    if rehearsal.torch.is_empty() {
        page += &format!(
            "asked from the driver   {} GiB\nprocess                 {} GiB: what nvidia-smi shows\n\n",
            gib(rehearsal.totals.reserved),
            gib(rehearsal.totals.process)
        );
        page += &processes(rehearsal);
    } else {
        page += &levels(&rehearsal.totals, TORCH);
        page += &format!("the most is allocated in: {}\n\n", in_words(&rehearsal.peak_phase));
        page += &processes(rehearsal);
        page += &phases(rehearsal);
        page += &alive(rehearsal);
    }
    page.extend(rehearsal.beside.iter().map(|side| beside(rehearsal, side)));
    page += &shared(rehearsal);
    page += &answer(rehearsal);
    for note in &rehearsal.notes {
        page += &(wrapped(&format!("note: {note}"), width()) + "\n");
    }
    page + &unknown(rehearsal)
}

/// A phase as one says it; those that the program named are said as it names them.
fn in_words(phase: &str) -> String {
    if phase.starts_with(|first: char| first.is_ascii_digit()) { phase_name(phase) } else { phase.to_owned() }
}

fn ending(ending: &Ending) -> String {
    match ending {
        Ending::Finished => "the program ran to its end".into(),
        Ending::OutOfMemory { phase, wanted, allocated, reserved, free, exit_code } => {
            let how = exit_code.map_or(String::new(), |code| format!("\nthe program's exit code is {code}"));
            let held = match reserved {
                0 => String::new(),
                _ => format!(
                    ", while tensors held {} GiB, torch {} GiB in all, and {} GiB of the card were free",
                    gib(*allocated),
                    gib(*reserved),
                    gib(*free)
                ),
            };
            let when = if phase.is_empty() { String::new() } else { format!(" in {}", in_words(phase)) };
            format!("out of memory{when}: {} GiB more were asked for{held}{how}", gib(*wanted))
        }
        Ending::Waited { source } => {
            format!("stopped: {source} waits for a value that only a real GPU computes")
        }
        Ending::Failed { exit_code, exception } => {
            let how = exit_code.map_or("a signal ended it".into(), |code| format!("exit code {code}"));
            let what = exception.as_ref().map(|text| format!(": {text}")).unwrap_or_default();
            format!("the program failed by itself ({how}){what}")
        }
        Ending::StandIn { exit_code, what } => {
            let how = exit_code.map_or("a signal ended it".into(), |code| format!("exit code {code}"));
            format!(
                "the stand-in for CUDA failed, not the program ({how}): {what}; a real GPU would probably do it, so please report this"
            )
        }
        Ending::Interrupted => "interrupted".into(),
        Ending::Cut { used_gpu: false } => {
            "the time limit ended the program before it used the GPU: it was still importing or preparing; a larger --time-limit lets it go on".into()
        }
        Ending::Cut { used_gpu: true } => {
            "the time limit ended the program; does it wait for a value that only a real GPU computes? --steps ends it sooner".into()
        }
        Ending::NoCuda { exit_code: Some(0) } => "the program ended without using the GPU".into(),
        Ending::NoCuda { exit_code } => {
            let how = exit_code.map_or("a signal ended it".into(), |code| format!("exit code {code}"));
            format!("the program failed before it used the GPU ({how})")
        }
    }
}

/// Cards with several processes.
fn shared(rehearsal: &Rehearsal) -> String {
    let line = |card: &crate::rehearse::shared::SharedCard| {
        format!("card {}: {} processes at once, together {} GiB\n", card.card, card.processes, gib(card.bytes))
    };
    rehearsal.shared.iter().map(line).collect()
}

/// The verdicts, and how far they reach.
fn answer(rehearsal: &Rehearsal) -> String {
    if matches!(rehearsal.ending, Ending::OutOfMemory { .. }) {
        let more = "it needs at least that; to see how much, rehearse with more, such as --memory 1TiB";
        return verdicts(&rehearsal.verdicts) + &wrapped(more, width()) + "\n";
    }
    if !rehearsal.so_far {
        return verdicts(&rehearsal.verdicts);
    }
    if rehearsal.verdicts.is_empty() {
        let why = "no verdict: the program ended before a whole step (forward, backward, optimizer) was seen; so far it \
                   took what stands above";
        return wrapped(why, width()) + "\n";
    }
    let verdicts = format!("so far, for the program did not come to its own end: {}", verdicts(&rehearsal.verdicts));
    wrapped(&verdicts, width()) + "\n"
}

/// One line for each, if there are several.
fn processes(rehearsal: &Rehearsal) -> String {
    if rehearsal.processes.len() < 2 {
        return String::new();
    }
    let unit = Unit::of(rehearsal);
    let levels = ["allocated", "reserved", "process"].map(|level| format!("{level} {}", unit.name));
    let mut table = Table::new(&["rank", "device", "steps", &levels[0], &levels[1], &levels[2]]);
    for process in &rehearsal.processes {
        let totals = &process.totals;
        table.row(vec![
            process.rank.to_string(),
            process.device.to_string(),
            process.steps.to_string(),
            unit.show(totals.allocated),
            unit.show(totals.reserved),
            unit.show(totals.process),
        ]);
    }
    table.to_string() + "\n"
}

/// The first phases, and that of the peak wherever it is.
fn shown(phases: &[Phase], most: usize) -> Vec<&Phase> {
    // Of equal ones the first.
    let peak = phases.iter().enumerate().rev().max_by_key(|(_, phase)| phase.peak).map_or(0, |(place, _)| place);
    let first = if peak < most { most } else { most - 1 };
    phases.iter().enumerate().filter(|(place, _)| *place < first || *place == peak).map(|(_, phase)| phase).collect()
}

/// The fullest process, phase by phase; of many steps the first ones and the peak's.
fn phases(rehearsal: &Rehearsal) -> String {
    const MOST: usize = 16;
    let Some(process) = rehearsal.processes.iter().max_by_key(|process| process.totals.process) else {
        return String::new();
    };
    let highest = process.totals.allocated.max(1);
    let room = width().saturating_sub(60).clamp(8, 40);
    let unit = Unit::of(rehearsal);
    let mut table = Table::new(&[&format!("{} in phase", unit.name), "before", "peak", "after", "reserved", ""]);
    for phase in shown(&process.phases, MOST) {
        table.row(vec![
            phase.phase.clone(),
            unit.show(phase.before),
            unit.show(phase.peak),
            unit.show(phase.after),
            unit.show(phase.peak_reserved),
            bar(phase.peak, highest, room),
        ]);
    }
    let left = process.phases.len().saturating_sub(MOST);
    let more = if left > 0 { format!("… and {left} more\n") } else { String::new() };
    format!("{table}{more}\n")
}

/// The same run by other means: levels, parts of the peak, phases.
fn beside(rehearsal: &Rehearsal, side: &Beside) -> String {
    let unit = Unit::of(rehearsal);
    let mut table = Table::new(&[&format!("{} at the peak", unit.name), "rehearsed", side.by, "off"]);
    let mut row = |name: String, ours: u64, theirs: u64| {
        let off = 100.0 * (theirs as f64 / ours.max(1) as f64 - 1.0);
        let off = if ours == theirs { "0 %".to_owned() } else { format!("{off:+.2} %") };
        table.row(vec![name, unit.show(ours), unit.show(theirs), if ours == 0 { String::new() } else { off }]);
    };
    let (ours, theirs) = (&rehearsal.totals, &side.totals);
    row("allocated".into(), ours.allocated, theirs.allocated);
    row("reserved".into(), ours.reserved, theirs.reserved);
    row("process".into(), ours.process, theirs.process);
    if let Some(process) = rehearsal.fullest() {
        let parts = process.parts();
        for name in PARTS.iter().filter(|name| parts.contains_key(**name) || side.parts.contains_key(**name)) {
            let of = |parts: &std::collections::BTreeMap<String, u64>| parts.get(*name).copied().unwrap_or(0);
            row(format!("  {name}"), of(&parts), of(&side.parts));
        }
        for phase in process.phases.iter().filter(|phase| side.phases.contains_key(&phase.phase)).take(12) {
            row(phase.phase.clone(), phase.peak, side.phases[&phase.phase]);
        }
    }
    format!("{table}\n")
}

/// The lines that hold most, as long as they hold a thousandth of it.
fn alive(rehearsal: &Rehearsal) -> String {
    let fullest = rehearsal.processes.iter().max_by_key(|process| process.totals.process);
    let Some(alive) = fullest.and_then(|process| process.alive.as_ref()) else { return String::new() };
    let unit = Unit::of(rehearsal);
    let mut table = Table::new(&[unit.name, "n", "alive at the peak, by line of source"]);
    let shown = alive.lines.iter().take(LINES).take_while(|line| line.bytes >= alive.requested / 1000).count();
    for line in &alive.lines[..shown] {
        table.row(vec![unit.show(line.bytes), line.count.to_string(), line.source.clone()]);
    }
    let (rest, count) =
        alive.lines[shown..].iter().fold((0, 0), |(rest, count), line| (rest + line.bytes, count + line.count));
    if rest > 0 {
        table.row(vec![unit.show(rest), count.to_string(), "other lines".into()]);
    }
    format!("{}\n", table.fitted(width()))
}

fn unknown(rehearsal: &Rehearsal) -> String {
    if rehearsal.unknown_calls.is_empty() {
        return String::new();
    }
    let (known, unknown): (Vec<_>, Vec<_>) =
        rehearsal.unknown_calls.iter().partition(|(name, _)| name.starts_with(NOT_COUNTED));
    let list = |calls: Vec<(&String, &u64)>| {
        let names: Vec<String> =
            calls.iter().map(|(name, times)| format!("{} × {times}", name.trim_start_matches(NOT_COUNTED))).collect();
        names.join(", ")
    };
    let mut notes = Vec::new();
    if !known.is_empty() {
        notes.push(format!("note: not counted, because only NVIDIA's libraries know how much it is: {}", list(known)));
    }
    if !unknown.is_empty() {
        notes.push(format!("note: calls the stand-in does not know, answered with success: {}", list(unknown)));
    }
    notes.iter().map(|note| wrapped(note, width()) + "\n").collect()
}
