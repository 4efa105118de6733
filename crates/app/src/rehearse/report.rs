//! The one value that every interface shows.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;
use vramcast_core::plan::Gpu;
use vramcast_core::report::verdict::{Verdict, judge};
use vramcast_core::report::{SCHEMA, Totals};

use super::Card;
use super::beside::Beside;
use super::journal::{Alive, Full, Line, Phase};

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
    /// The time limit ended it.
    Cut,
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
    /// Which cards hold it.
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
    /// The device.
    pub device: u32,
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
            _ if facts.cut => Ending::Cut,
            _ if waited.is_some() => Ending::Waited { source: waited.unwrap_or_default() },
            (exit_code, _) if !used_cuda => Ending::NoCuda { exit_code },
            (Some(0), _) => Ending::Finished,
            (exit_code, Some((_, true, phase))) => {
                Ending::OutOfMemory { phase: phase.clone(), wanted: full.map_or(0, |full| full.wanted), exit_code }
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
        let mut rehearsal = Self {
            schema: SCHEMA,
            device_name: facts.card.name,
            gpu: facts.card.gpu,
            torch: facts.torch,
            ending,
            seconds: (facts.seconds * 10.0).round() / 10.0,
            totals,
            peak_phase,
            processes,
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
        let Ending::OutOfMemory { wanted, .. } = &self.ending else {
            self.verdicts = cards.map(|card| judge(&card, self.totals.process)).collect();
            return;
        };
        let full = self.processes.iter().flat_map(|process| &process.full).next_back();
        let missing = full.map_or(*wanted, |full| full.wanted.saturating_sub(full.free)).max(1);
        let judged = cards.map(|card| match judge(&card, self.totals.process.saturating_add(*wanted)) {
            own if own.gpu == self.gpu.name => Verdict { fits: false, headroom: -(missing as i64), ..own },
            other => other,
        });
        self.verdicts = judged.collect();
    }
}

impl Process {
    /// The devices that one process used.
    fn all(process: u32, lines: &[Line], real: bool, gpu: &Gpu) -> Vec<Self> {
        let phases_of = |device: u32| -> Vec<Phase> {
            let all = lines.iter().filter_map(|line| if let Line::Phase(phase) = line { Some(phase) } else { None });
            all.filter(|phase| phase.device == device).cloned().collect()
        };
        let rank = lines.iter().find_map(|line| if let Line::Start { rank, .. } = line { Some(*rank) } else { None });
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
