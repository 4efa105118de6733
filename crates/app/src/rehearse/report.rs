//! The one value that every interface shows.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;
use vramcast_core::plan::Gpu;
use vramcast_core::report::verdict::{Verdict, judge};
use vramcast_core::report::{SCHEMA, Totals};

use super::Card;
use super::beside::Beside;
use super::journal::{Alive, Full, Guess, Line, Phase};
use super::shared::{Life, SharedCard, card_of, shared};

/// What is known when the program has ended.
#[derive(Debug, Clone)]
pub struct Facts {
    /// The card.
    pub card: Card,
    /// torch's version.
    pub torch: String,
    /// The program's exit code; none when a signal ended it.
    pub exit_code: Option<i32>,
    /// Whether the time limit ended it.
    pub cut: bool,
    /// Whether whoever started it did.
    pub interrupted: bool,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// Where Python was when a signal came that no Python program causes by itself (`hook.py`).
    pub fault: Option<String>,
    /// The share of data-dependent sizes that was counted.
    pub mask_fraction: f64,
    /// How long it ran.
    pub seconds: f64,
    /// Calls nobody wrote.
    pub unknown: BTreeMap<String, u64>,
    /// Whether it ran on a real card: then the driver's figures hold everything.
    pub real: bool,
}

/// How the program ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "how", rename_all = "kebab-case")]
pub enum Ending {
    /// It ran to its end.
    Finished,
    /// The card was too small.
    OutOfMemory {
        /// When it was.
        phase: String,
        /// What was asked for last.
        wanted: u64,
        /// What tensors held then.
        allocated: u64,
        /// What torch held then.
        reserved: u64,
        /// What was free then.
        free: u64,
        /// The program's exit code; none when a signal ended it.
        exit_code: Option<i32>,
    },
    /// It failed by itself.
    Failed {
        /// Its exit code; none when a signal ended it.
        exit_code: Option<i32>,
        /// The exception, if there was one.
        exception: Option<String>,
    },
    /// It failed, but not by itself: the stand-in did, or cannot do what was asked of it.
    StandIn {
        /// Its exit code; none when a signal ended it.
        exit_code: Option<i32>,
        /// What happened, with the name of the call.
        what: String,
    },
    /// The time limit ended it.
    Cut {
        /// Whether a process had used the card by then.
        used_gpu: bool,
    },
    /// Whoever started it ended it, as with Ctrl-C.
    Interrupted,
    /// It waited for what only a real GPU computes, and was stopped.
    Waited {
        /// The line of source that waited.
        source: String,
    },
    /// It never used the card.
    NoCuda {
        /// Its exit code.
        exit_code: Option<i32>,
    },
}

/// What a rehearsal has to say. All sizes are bytes.
#[derive(Debug, Clone, Serialize)]
pub struct Rehearsal {
    /// The version of this document.
    pub schema: u32,
    /// The card.
    pub gpu: Gpu,
    /// As CUDA names it.
    pub device_name: String,
    /// torch's version.
    pub torch: String,
    /// How it ended.
    pub ending: Ending,
    /// How long it ran.
    pub seconds: f64,
    /// The fullest device over all processes.
    pub totals: Totals,
    /// When the peak was.
    pub peak_phase: String,
    /// Every process that used the card.
    pub processes: Vec<Process>,
    /// Cards that several processes share.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub shared: Vec<SharedCard>,
    /// Sizes that depend on data, by line of source, and how they were counted.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub guesses: Vec<Guess>,
    /// Whether the program did not come to its own end, so that all of this is only what was seen so far.
    pub so_far: bool,
    /// Which cards hold it; none where the program was ended before its first whole step.
    pub verdicts: Vec<Verdict>,
    /// The same run by other means, if asked for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub beside: Vec<Beside>,
    /// Calls that the stand-in does not know and answered with success, and how often.
    pub unknown_calls: BTreeMap<String, u64>,
    /// Limits.
    pub notes: Vec<String>,
}

/// One process and one device of it.
#[derive(Debug, Clone, Serialize)]
pub struct Process {
    /// Its number.
    pub process: u32,
    /// Its rank.
    pub rank: u32,
    /// The device, as the process counts them.
    pub device: u32,
    /// The same card as the machine counts them.
    pub card: u32,
    /// When it was there.
    #[serde(skip)]
    pub life: Life,
    /// The peak at three levels.
    pub totals: Totals,
    /// When it was.
    pub peak_phase: String,
    /// Optimizer steps.
    pub steps: u64,
    /// Phase by phase.
    pub phases: Vec<Phase>,
    /// What was alive at the peak.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alive: Option<Alive>,
    /// Allocations that torch gave up.
    pub full: Vec<Full>,
    /// What kind of run it is, in the words of the ledger; none where it was not recognised.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run: Option<Value>,
    /// Why it was not recognised.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub not_recognised: Option<String>,
}

impl Rehearsal {
    /// Sums up what the processes wrote.
    pub fn new(facts: Facts, journals: Vec<(u32, Vec<Line>)>) -> Self {
        let used_cuda = journals.iter().any(|(_, lines)| lines.iter().any(|line| matches!(line, Line::Start { .. })));
        let processes: Vec<Process> =
            journals.iter().flat_map(|(id, lines)| Process::all(*id, lines, facts.real, &facts.card.gpu)).collect();
        let lines = || journals.iter().flat_map(|(_, lines)| lines);
        let exception = lines().rev().find_map(|line| match line {
            Line::Exception { kind, message, full, phase } => {
                Some((format!("{kind}: {message}"), *full, phase.clone()))
            }
            _ => None,
        });
        let full = lines().rev().find_map(|line| if let Line::Full(full) = line { Some(full.clone()) } else { None });
        let waited =
            lines().find_map(|line| if let Line::Waits { source } = line { Some(source.clone()) } else { None });
        let ending = match (facts.exit_code, &exception) {
            _ if facts.cut => Ending::Cut { used_gpu: used_cuda },
            _ if facts.interrupted => Ending::Interrupted,
            _ if waited.is_some() => Ending::Waited { source: waited.unwrap_or_default() },
            (exit_code, _) if !used_cuda => Ending::NoCuda { exit_code },
            (Some(0), _) => Ending::Finished,
            (exit_code, Some((_, true, phase))) => {
                let of = |part: fn(&Full) -> u64| full.as_ref().map_or(0, part);
                Ending::OutOfMemory {
                    phase: phase.clone(),
                    wanted: of(|full| full.wanted),
                    allocated: of(|full| full.allocated),
                    reserved: of(|full| full.reserved),
                    free: of(|full| full.free),
                    exit_code,
                }
            }
            (exit_code, exception) if !facts.real && standin_fault(&facts, exception.as_ref()).is_some() => {
                Ending::StandIn { exit_code, what: standin_fault(&facts, exception.as_ref()).unwrap_or_default() }
            }
            (exit_code, exception) => {
                Ending::Failed { exit_code, exception: exception.as_ref().map(|(text, _, _)| text.clone()) }
            }
        };
        let fullest = processes.iter().max_by_key(|process| process.totals.process);
        let totals = fullest.map_or(Totals { allocated: 0, reserved: 0, process: 0 }, |process| process.totals);
        let peak_phase = fullest.map(|process| process.peak_phase.clone()).unwrap_or_default();
        let mut notes = Vec::new();
        for problem in
            lines().filter_map(|line| if let Line::End { problem, .. } = line { problem.as_ref() } else { None })
        {
            notes.push(format!("what is alive at the peak could not be read: {problem}"));
        }
        if processes.iter().any(|process| process.alive.as_ref().is_some_and(|alive| alive.truncated)) {
            notes.push("the run was too long to keep every allocation: what is alive at the peak is incomplete".into());
        }
        let guesses = guesses(lines());
        if let Some(Line::Varied { smallest, largest }) = lines().rev().find(|line| matches!(line, Line::Varied { .. }))
        {
            notes.push(format!(
                "shapes vary between steps ({smallest} to {largest}): the peak is that of the steps that were run; a larger batch later takes more"
            ));
        }
        if !guesses.is_empty() {
            notes.push(guessed(&guesses, facts.mask_fraction));
        }
        let so_far = !matches!(ending, Ending::Finished | Ending::NoCuda { exit_code: Some(0) });
        let mut rehearsal = Self {
            schema: SCHEMA,
            device_name: facts.card.name,
            gpu: facts.card.gpu,
            torch: facts.torch,
            ending,
            seconds: (facts.seconds * 10.0).round() / 10.0,
            totals,
            peak_phase,
            // A real card says what all its processes hold together.
            shared: if facts.real { Vec::new() } else { shared(&processes) },
            processes,
            guesses,
            so_far,
            verdicts: Vec::new(),
            beside: Vec::new(),
            unknown_calls: facts.unknown,
            notes,
        };
        rehearsal.judge_all(std::iter::once(rehearsal.gpu.clone()));
        rehearsal
    }

    /// The process and device that needs most.
    pub fn fullest(&self) -> Option<&Process> {
        self.processes.iter().max_by_key(|process| process.totals.process)
    }

    /// Judges cards. Where the program ran out of memory it needs at least what it asked for last beside what it held.
    pub fn judge_all(&mut self, cards: impl Iterator<Item = Gpu>) {
        let Ending::OutOfMemory { wanted, reserved, free, .. } = &self.ending else {
            // Before a whole step was seen nothing can be said: the peak may still come.
            // A server without torch has taken what it takes when it waits for requests.
            let shown = !self.so_far || self.saw_a_step() || (self.torch.is_empty() && !self.processes.is_empty());
            let needed = self.needed();
            self.verdicts = cards.filter(|_| shown).map(|card| judge(&card, needed)).collect();
            return;
        };
        // Before it gives up, torch gives back what it holds in vain: then and not at the peak the request is added.
        let held = self.totals.process.saturating_sub(self.totals.reserved.saturating_sub(*reserved));
        let needed = self.needed().max(held.saturating_add(*wanted));
        let missing = needed.saturating_sub(self.gpu.memory).max(wanted.saturating_sub(*free)).max(1);
        let judged = cards.map(|card| match judge(&card, needed) {
            own if own.gpu == self.gpu.name => Verdict { fits: false, headroom: -(missing as i64), ..own },
            other => other,
        });
        self.verdicts = judged.collect();
    }

    /// What the fullest card must hold: its processes together.
    fn needed(&self) -> u64 {
        self.shared.iter().map(|card| card.bytes).fold(self.totals.process, u64::max)
    }

    /// Whether forward, backward and an optimizer's step were seen.
    fn saw_a_step(&self) -> bool {
        // The phase after an optimizer's; its own ends as well where the optimizer fails.
        let stepped = |phase: &Phase| phase.phase.ends_with(".zero");
        self.processes.iter().any(|process| process.steps > 0 || process.phases.iter().any(stepped))
    }
}

/// How a fault of the stand-in shows itself, and what it was; none where the program itself failed.
fn standin_fault(facts: &Facts, exception: Option<&(String, bool, String)>) -> Option<String> {
    // What libraries of NVIDIA's say when they refuse. A device that is not there is the program's own affair.
    const REFUSALS: [&str; 7] = [
        "vramcast's stand-in",
        "CUDA error",
        "CUDNN_STATUS",
        "CUBLAS_STATUS",
        "cusolver error",
        "cufft error",
        "NCCL error",
    ];
    if let Some(place) = &facts.fault {
        let signal = signal_name(facts.signal);
        return Some(format!("{signal} in {place}, which a Python program seldom causes by itself"));
    }
    let (text, ..) = exception?;
    let refused = REFUSALS.iter().any(|refusal| text.to_lowercase().contains(&refusal.to_lowercase()));
    (refused && !text.contains("invalid device ordinal")).then(|| text.clone())
}

/// A signal by its name; a launcher tells only of its own end.
fn signal_name(signal: Option<i32>) -> String {
    match signal {
        Some(4) => "illegal instruction".into(),
        Some(6) => "abort".into(),
        Some(7) => "bus error".into(),
        Some(8) => "arithmetic fault".into(),
        Some(11) => "segmentation fault".into(),
        Some(other) => format!("signal {other}"),
        None => "a fatal signal".into(),
    }
}

/// Each line of source once, at its largest.
fn guesses<'a>(lines: impl Iterator<Item = &'a Line>) -> Vec<Guess> {
    let mut largest: BTreeMap<(String, String), Guess> = BTreeMap::new();
    for guess in lines.filter_map(|line| if let Line::Guess(guess) = line { Some(guess) } else { None }) {
        let known = largest.entry((guess.source.clone(), guess.call.clone())).or_insert_with(|| guess.clone());
        if guess.counted > known.counted {
            *known = guess.clone();
        }
    }
    largest.into_values().collect()
}

fn guessed(guesses: &[Guess], fraction: f64) -> String {
    const SHOWN: usize = 8;
    let shown: Vec<String> = guesses
        .iter()
        .take(SHOWN)
        .map(|guess| format!("{} ({}: {} of {})", guess.source, guess.call, guess.counted, guess.of))
        .collect();
    let more = guesses.len().saturating_sub(SHOWN);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let bound = if fraction >= 1.0 { ", the most there can be; --mask-fraction sets another share" } else { "" };
    format!("what data would choose was counted at a share of {fraction}{bound}: {}{more}", shown.join(", "))
}

impl Process {
    /// The devices that one process used.
    fn all(process: u32, lines: &[Line], real: bool, gpu: &Gpu) -> Vec<Self> {
        let phases_of = |device: u32| -> Vec<Phase> {
            let all = lines.iter().filter_map(|line| if let Line::Phase(phase) = line { Some(phase) } else { None });
            all.filter(|phase| phase.device == device).cloned().collect()
        };
        let rank = lines.iter().find_map(|line| if let Line::Start { rank, .. } = line { Some(*rank) } else { None });
        let visible = lines.iter().find_map(|line| match line {
            Line::Start { visible, .. } => visible.as_deref(),
            _ => None,
        });
        let from = lines.iter().find_map(|line| if let Line::Start { time, .. } = line { Some(*time) } else { None });
        let to = lines.iter().rev().find_map(|line| if let Line::End { time, .. } = line { Some(*time) } else { None });
        let life = Life { from: from.unwrap_or(0.0), to: to.filter(|to| *to > 0.0).unwrap_or(f64::INFINITY) };
        let devices: std::collections::BTreeSet<u32> = lines
            .iter()
            .filter_map(|line| if let Line::Phase(phase) = line { Some(phase.device) } else { None })
            .collect();
        devices
            .into_iter()
            .map(|device| {
                let phases = phases_of(device);
                let largest = phases.iter().max_by_key(|phase| phase.peak);
                let training = phases.iter().any(|phase| phase.phase.ends_with(".bwd"));
                let driver = phases.iter().map(|phase| phase.driver_peak).max().unwrap_or(0);
                let unasked = if real { 0 } else { gpu.unasked(training) };
                Self {
                    process,
                    rank: rank.unwrap_or(0),
                    device,
                    card: card_of(device, visible),
                    life,
                    totals: Totals {
                        allocated: largest.map_or(0, |phase| phase.peak),
                        reserved: phases.iter().map(|phase| phase.peak_reserved).max().unwrap_or(0),
                        process: driver + unasked,
                    },
                    peak_phase: largest.map(|phase| phase.phase.clone()).unwrap_or_default(),
                    steps: lines.iter().fold(0, |steps, line| match line {
                        Line::Step { step } => steps.max(*step),
                        Line::End { steps: last, .. } => steps.max(*last),
                        _ => steps,
                    }),
                    alive: lines.iter().find_map(|line| match line {
                        Line::End { alive, .. } => alive.iter().find(|alive| alive.device == device).cloned(),
                        _ => None,
                    }),
                    full: lines
                        .iter()
                        .filter_map(|line| if let Line::Full(full) = line { Some(full.clone()) } else { None })
                        .filter(|full| full.device == device)
                        .collect(),
                    phases,
                    run: lines
                        .iter()
                        .find_map(|line| if let Line::Run { row, .. } = line { row.clone() } else { None }),
                    not_recognised: lines.iter().find_map(|line| match line {
                        Line::Run { problem, .. } => problem.clone(),
                        _ => None,
                    }),
                }
            })
            .collect()
    }

    /// What is alive at the peak, by what it is for.
    pub fn parts(&self) -> BTreeMap<String, u64> {
        self.alive.as_ref().map(|alive| alive.parts.clone()).unwrap_or_default()
    }

    /// The most allocated in every phase.
    pub fn peaks(&self) -> BTreeMap<String, u64> {
        self.phases.iter().map(|phase| (phase.phase.clone(), phase.peak)).collect()
    }
}
