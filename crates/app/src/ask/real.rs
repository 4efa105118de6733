//! What a real run left behind: a snapshot, a profile, a rehearsal, a measured row, or a message. Beside the prediction, where
//! there is one.

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;
use vramcast_core::ask::{Answer, Kept, Wanted};
use vramcast_core::doctor::{self, Cause, Finding, Message, locate};
use vramcast_core::planner::smallest::Suggestion;
use vramcast_core::recording::{self, Recording, Site, profiler, snapshot};
use vramcast_core::report::Totals;
use vramcast_core::verify::ledger::{self, LedgerRow, Measure, Scored};

use super::question::Prepared;
use crate::failure::Failure;

/// How pickles of protocol 2 and later begin, which is what torch writes.
const PICKLE: u8 = 0x80;

const RECORDINGS: &str = "give what torch.cuda.memory._dump_snapshot or torch.profiler wrote";

/// What is known of a run. All sizes are bytes.
#[derive(Debug, Serialize)]
pub(crate) struct Real {
    /// What was read.
    pub(crate) what: String,
    /// Part by part, the totals last.
    pub(crate) lines: Vec<Line>,
    /// Phase by phase, where both are known: the most that was allocated.
    pub(crate) phases: Vec<Line>,
    /// Lines of source that made most of it.
    pub(crate) sites: Vec<Site>,
    /// What broke it.
    pub(crate) findings: Vec<Broke>,
    /// Who asks for as many bytes in the predicted run.
    pub(crate) requests: Vec<locate::Request>,
    /// The card that a message speaks of, where the plan names another.
    pub(crate) card: Option<String>,
    /// What leaves free the bytes that a run took beyond a prediction that fits.
    pub(crate) suggestions: Vec<Change>,
    /// What a reader should know.
    pub(crate) notes: Vec<String>,
}

/// One number of a run beside its prediction.
#[derive(Debug, Serialize)]
pub(crate) struct Line {
    /// What it is.
    name: String,
    /// The run's.
    recorded: Option<u64>,
    /// Ours.
    predicted: Option<u64>,
}

/// What broke a run, with its cause in words.
#[derive(Debug, Serialize)]
pub(crate) struct Broke {
    title: &'static str,
    #[serde(flatten)]
    finding: Finding,
}

/// One change.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Change {
    /// The flags that make it.
    pub(crate) text: String,
    /// What it costs, in words.
    pub(crate) cost: String,
    /// Bytes of the process that it saves.
    saves: u64,
    /// The peaks it then has.
    pub(crate) totals: Totals,
    /// Whether it then fits.
    fits: bool,
    /// What it changes: a part of a plan, to be laid over it.
    changes: Value,
}

impl From<Suggestion> for Change {
    fn from(suggestion: Suggestion) -> Self {
        Self {
            cost: suggestion.words(),
            text: suggestion.change,
            saves: suggestion.saved,
            totals: suggestion.totals,
            fits: suggestion.fits,
            changes: suggestion.changes,
        }
    }
}

impl Line {
    fn new(name: impl Into<String>, recorded: Option<u64>, predicted: Option<u64>) -> Self {
        Self { name: name.into(), recorded, predicted }
    }

    fn of(name: &str, measure: Measure) -> Self {
        Self::new(name, measure.measured, measure.predicted)
    }
}

/// Whether bytes are torch's memory snapshot.
pub(crate) fn is_snapshot(bytes: &[u8]) -> bool {
    bytes.first() == Some(&PICKLE)
}

/// A recording of torch.
pub(crate) fn recording(bytes: &[u8], name: &str) -> Result<Recording, Failure> {
    let first = bytes.iter().find(|byte| !byte.is_ascii_whitespace());
    let read = match (first, bytes.starts_with(&[0x1f, 0x8b])) {
        (_, true) => return Err(Failure::bad_input(format!("{name}: packed by gzip")).hint("unpack it with gunzip")),
        (Some(b'{' | b'['), _) => profiler::read(bytes),
        _ if is_snapshot(bytes) => snapshot::read(bytes),
        _ => {
            return Err(Failure::bad_input(format!("{name}: neither a pickle nor JSON, so no recording of a run"))
                .hint(RECORDINGS));
        }
    };
    read.map_err(|error| Failure::bad_input(format!("{name}: {error}")).hint(RECORDINGS))
}

/// What bytes say of a run, beside the plan that is asked about.
pub(crate) fn read(bytes: &[u8], name: &str, beside: Option<&Prepared>) -> Result<Real, Failure> {
    let answer = beside.map(|prepared| prepared.answer(Wanted::default())).transpose()?;
    let lacks = answer.as_ref().is_some_and(|answer| !answer.fits);
    let report = answer.as_ref().map(|answer| &answer.report);
    let totals = report.as_ref().map(|report| report.totals);
    let mut real = Real {
        what: String::new(),
        lines: Vec::new(),
        phases: Vec::new(),
        sites: Vec::new(),
        findings: Vec::new(),
        requests: Vec::new(),
        card: None,
        suggestions: Vec::new(),
        notes: Vec::new(),
    };
    let document = serde_json::from_slice::<Value>(bytes).ok();
    if let Some(row) = document.as_ref().filter(|row| row["measured"].is_object() && row["run"].is_object()) {
        measured(&mut real, ledger::score(row));
    } else if let Some(run) =
        document.as_ref().filter(|run| run["device_name"].is_string() && run["ending"].is_object())
    {
        rehearsed(&mut real, run, totals.map(|totals| [totals.allocated, totals.reserved, totals.process]));
    } else if is_snapshot(bytes) || document.is_some() {
        let recording = recording(bytes, name)?;
        real.what = format!("{}, {} events", recording.kind, recording.events);
        real.lines = match report {
            Some(report) => recording::reconcile(&recording, report)
                .into_iter()
                .map(|line| Line::new(line.name, line.recorded, Some(line.predicted)))
                .collect(),
            None => vec![Line::new("allocated", Some(recording.peak_allocated), None)],
        };
        real.lines.push(Line::new("reserved", recording.peak_reserved, totals.map(|totals| totals.reserved)));
        real.findings = broke(doctor::of_recording(&recording).into_iter().collect());
        real.sites = recording.sites;
        real.notes = recording.notes;
    } else {
        real.findings = broke(doctor::diagnose(&String::from_utf8_lossy(bytes)));
        real.what = "a message".into();
        let Some(Broke { finding, .. }) = real.findings.first() else {
            return Err(Failure::bad_input(format!("{name}: nothing in it speaks of memory"))
                .hint("give a snapshot, a profile, a rehearsal's --json, a ledger's row, or the part of the log with the error"));
        };
        if let Some(message) = &finding.message {
            real.lines.push(Line::new("allocated, when it ended", message.allocated, totals.map(|it| it.allocated)));
            real.lines.push(Line::new("process, when it ended", message.process, totals.map(|it| it.process)));
            real.lines.push(Line::new("asked for then", message.asked, None));
            real.lines.push(Line::new("free then", message.free, None));
            real.lines.retain(|line| line.recorded.is_some());
        }
    }
    let broke = real.findings.first().map(|it| &it.finding);
    if let (Some(prepared), Some(answer), Some(finding)) = (beside, &answer, broke) {
        let now = answer.report.plan.gpu().memory;
        let total = finding.message.as_ref().and_then(|message| message.total);
        // Drivers and versions of torch differ by less.
        real.card = total.filter(|total| total.abs_diff(now) > now / 20).and_then(|total| prepared.card_of(total));
        if real.card.is_none() {
            real.suggestions = beyond(prepared, finding, answer)?.into_iter().map(Change::from).collect();
        }
    }
    // What is simulated to fit goes before what helps in general, which the plan may have already.
    let helped = lacks || !real.suggestions.is_empty();
    for Broke { finding, .. } in real.findings.iter_mut().filter(|it| helped && it.finding.cause == Cause::TooMuch) {
        finding.cures.clear();
    }
    let asked = real.findings.first().and_then(|it| it.finding.message.as_ref()?.asked);
    if let (Some(prepared), Some(asked)) = (beside, asked) {
        real.requests = prepared.requests(asked)?;
        real.requests.truncate(6);
    }
    Ok(real)
}

/// Changes under which a run fits that took more than a prediction that fits: they leave free what it took beyond that.
pub(crate) fn beyond(prepared: &Prepared, finding: &Finding, answer: &Answer) -> Result<Vec<Suggestion>, Failure> {
    let needed = finding.message.as_ref().and_then(Message::needed);
    let more = needed.map_or(0, |needed| needed.saturating_sub(answer.report.totals.process));
    if finding.cause != Cause::TooMuch || more == 0 || !answer.fits {
        return Ok(Vec::new());
    }
    let wanted = Wanted { suggestions: true, kept: Kept::Size(more), ..Wanted::default() };
    let found = prepared.answer(wanted)?.suggestions.into_iter();
    Ok(found.filter(|suggestion| suggestion.fits).collect())
}

fn broke(findings: Vec<Finding>) -> Vec<Broke> {
    findings.into_iter().map(|finding| Broke { title: finding.cause.title(), finding }).collect()
}

/// A row of a ledger brings its own model and plan.
fn measured(real: &mut Real, row: LedgerRow) {
    let Scored { id, model, group, allocated, reserved, process, phases, out_of_memory, .. } = match row {
        LedgerRow::Scored(scored) => *scored,
        LedgerRow::Skipped { id, skipped } => {
            real.what = format!("a measured run, {id}");
            real.notes.push(format!("not predicted: {skipped}"));
            return;
        }
    };
    real.what = format!("a measured run, {id}: {model} ({group}), beside the prediction of its own plan");
    let totals = [("allocated", allocated), ("reserved", reserved), ("process", process)];
    real.lines = totals.into_iter().map(|(name, measure)| Line::of(name, measure)).collect();
    real.phases = phases.iter().map(|phase| Line::of(&phase.phase, phase.peak)).collect();
    if let Some(predicted) = out_of_memory {
        let said = if predicted { "as predicted" } else { "which was not predicted" };
        real.notes.push(format!("the run did not fit its card, {said}"));
    }
}

/// The document of `vramcast rehearse --json`.
fn rehearsed(real: &mut Real, run: &Value, predicted: Option<[u64; 3]>) {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    real.what = format!("a rehearsal on {}, torch {}", text(&run["device_name"]), text(&run["torch"]));
    for (at, name) in ["allocated", "reserved", "process"].into_iter().enumerate() {
        real.lines.push(Line::new(name, run["totals"][name].as_u64(), predicted.map(|totals| totals[at])));
    }
    real.notes.push(format!("it ended: {}; its peak was in {}", text(&run["ending"]["how"]), text(&run["peak_phase"])));
    real.notes.extend(run["notes"].as_array().into_iter().flatten().map(text));
}
