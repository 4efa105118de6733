//! A report as text.

use vramcast_core::memory::log::OFFLOADED;
use vramcast_core::plan::{RunPlan, ServingEngine};
use vramcast_core::report::{Level, Report, Totals, Verdict};

use super::asked::head;
use super::page::wrapped;
use super::table::Table;
use super::{bar, gib, width};

/// The whole page.
pub fn text(report: &Report, explain: bool, timeline: bool) -> String {
    super::showing(report, || whole(report, explain, timeline))
}

fn whole(report: &Report, explain: bool, timeline: bool) -> String {
    let mut page = head(report);
    page += &totals(report);
    page += &super::serving::account(report);
    page += &breakdown(report);
    page += &report.run.as_ref().map(super::run::text).unwrap_or_default();
    if explain {
        page += &explained(report);
    }
    if timeline {
        page += &plot(report);
    }
    page += &report.job.as_ref().map(super::job::text).unwrap_or_default();
    page += &super::serving::short(report).unwrap_or_else(|| verdicts(&report.verdicts));
    page += &elsewhere(report);
    page += &defaults(report);
    for note in &report.notes {
        page += &(wrapped(&format!("note: {note}"), width()) + "\n");
    }
    page
}

/// What fits because a part of it is not there.
fn elsewhere(report: &Report) -> String {
    let parts = report.job.iter().flat_map(|job| &job.host);
    let bytes = parts.filter(|part| part.name == OFFLOADED).map(|part| part.bytes).sum();
    let said = format!("{} GiB of its weights are on the host and come to a card for each token", gib(bytes));
    if bytes > 0 { wrapped(&said, width()) + "\n" } else { String::new() }
}

/// Which values a framework's defaults decided; where from is told with everything else that is explained.
fn defaults(report: &Report) -> String {
    let chosen = || report.provenance.iter().filter_map(|origin| Some((origin, origin.framework.as_deref()?)));
    let Some((_, framework)) = chosen().next() else { return String::new() };
    let list: Vec<String> = chosen().map(|(origin, _)| format!("{} {}", origin.key, origin.value)).collect();
    wrapped(&format!("defaults of {framework}: {}", list.join(", ")), width()) + "\n"
}

fn totals(report: &Report) -> String {
    let sure = wrapped(&format!("confidence: {}", report.confidence.words), width());
    match report.confidence.level {
        Level::Guess => {
            let Totals { allocated, reserved, process, .. } = &report.totals;
            let [allocated, reserved, process] = [*allocated, *reserved, *process].map(gib);
            format!(
                "peak, a guess: about {process} GiB process, {reserved} reserved, {allocated} allocated\n{sure}\n\n"
            )
        }
        _ => {
            let ggml = [ServingEngine::LlamaCpp, ServingEngine::Ollama];
            let words = match &report.plan {
                RunPlan::Serve(plan) if ggml.contains(&plan.engine) => GGML,
                _ => TORCH,
            };
            format!("{}{sure}\n\n", levels(&report.totals, words).trim_end_matches('\n').to_owned() + "\n")
        }
    }
}

/// What allocated and reserved are called where torch runs.
pub(super) const TORCH: [&str; 2] =
    ["tensors: torch.cuda.max_memory_allocated()", "torch from the driver: max_memory_reserved()"];
/// And where ggml does, which has no cache of its own.
const GGML: [&str; 2] = ["buffers, as its log names them", "the same: nothing else is kept"];

/// The answer at its three levels.
pub(super) fn levels(totals: &Totals, [allocated, reserved]: [&str; 2]) -> String {
    let mut table = Table::new(&["peak", "GiB", "which number"]);
    table.row(vec!["allocated".into(), gib(totals.allocated), allocated.into()]);
    table.row(vec!["reserved".into(), gib(totals.reserved), reserved.into()]);
    table.row(vec!["process".into(), gib(totals.process), "everything: what nvidia-smi shows".into()]);
    table.to_string() + "\n"
}

fn breakdown(report: &Report) -> String {
    let whole = report.totals.process;
    let room = width().saturating_sub(40).clamp(10, 40);
    let mut page = format!("at the peak ({})\n", phase_name(&report.peak_phase));
    let names = report.breakdown.iter().map(|part| part.name.chars().count()).max().unwrap_or(0).max(23) + 1;
    for part in &report.breakdown {
        page += &format!("  {:<names$}{:>7}  {}\n", part.name, gib(part.bytes), bar(part.bytes, whole, room));
    }
    page += &format!("  {:<names$}{:>7}\n\n", "= process", gib(whole));
    page
}

/// `1.0.bwd` as people say it.
pub fn phase_name(phase: &str) -> String {
    let parts: Vec<&str> = phase.split('.').collect();
    let what = match parts.last().copied().unwrap_or_default() {
        "fwd" => "forward",
        "bwd" => "backward",
        "opt" => "optimizer step",
        "clip" => "gradient clipping",
        "zero" => "zero_grad",
        "eval" => return "evaluation".to_owned(),
        "load" => return "loading".to_owned(),
        "merge" => return "merging".to_owned(),
        "resume" => return "reading a checkpoint back".to_owned(),
        other => return other.to_owned(),
    };
    match parts.first().and_then(|step| step.parse::<u32>().ok()) {
        Some(0) => format!("{what} of the first step"),
        _ => format!("{what} of a later step"),
    }
}

fn explained(report: &Report) -> String {
    let mut page = String::from("each term and its tensors\n");
    let mut table = Table::new(&["GiB", "n", "what", "module", "operation", "shape"]);
    for term in &report.terms {
        let blank = String::new;
        table.row(vec![gib(term.bytes), blank(), term.component.clone(), blank(), blank(), blank()]);
        for tensor in &term.tensors {
            let shape = tensor.shape.iter().map(u64::to_string).collect::<Vec<_>>().join("×");
            table.row(vec![
                gib(tensor.bytes * tensor.count),
                tensor.count.to_string(),
                "·".into(),
                tensor.module.clone(),
                tensor.operation.clone(),
                format!("{shape} {}", tensor.dtype),
            ]);
        }
        if term.others > 0 {
            table.row(vec![gib(term.others), blank(), "·".into(), "smaller ones".into(), blank(), blank()]);
        }
    }
    page += &table.to_string();
    page += "\nby module\n";
    let mut table = Table::new(&["module", "GiB"]);
    for module in report.modules.iter().take(16) {
        table.row(vec![module.path.clone(), gib(module.bytes)]);
    }
    page += &table.to_string();
    page += "\nby phase: GiB allocated before it, at its peak and after it, and reserved\n";
    page += "(0.1.fwd is the forward pass of micro-batch 1 of step 0)\n";
    let mut table = Table::new(&["phase", "before", "peak", "after", "reserved"]);
    for phase in &report.phases {
        table.row(vec![
            phase.name.clone(),
            gib(phase.before),
            gib(phase.peak),
            gib(phase.after),
            gib(phase.peak_reserved),
        ]);
    }
    page += &table.to_string();
    let told = || report.provenance.iter().filter(|origin| origin.from != "off unless asked for");
    if told().next().is_some() {
        page += "\nsettings and where they come from\n";
        let mut table = Table::new(&["setting", "value", "from"]);
        for origin in told() {
            table.row(vec![origin.key.clone(), origin.value.clone(), origin.from.clone()]);
        }
        page += &table.to_string();
    }
    page + "\n"
}

/// Memory over the run, a column a stretch.
fn plot(report: &Report) -> String {
    const ROWS: u64 = 12;
    let columns = width().saturating_sub(12);
    let highest = report.timeline.iter().map(|sample| sample.bytes).max().unwrap_or(0).max(1);
    let step = report.timeline.len().div_ceil(columns).max(1);
    let heights: Vec<u64> = report
        .timeline
        .chunks(step)
        .map(|chunk| {
            chunk.iter().map(|sample| sample.bytes).max().unwrap_or(0) as u128 * u128::from(ROWS * 8)
                / u128::from(highest)
        })
        .map(|height| height as u64)
        .collect();
    let mut page = String::from("allocated over the run (GiB in tensors, before blocks are rounded up)\n");
    for row in (0..ROWS).rev() {
        let label = if (row + 1).is_multiple_of(4) { gib(highest / ROWS * (row + 1)) } else { String::new() };
        let cells: String = heights
            .iter()
            .map(|height| [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'][height.saturating_sub(row * 8).min(8) as usize])
            .collect();
        page += &format!("{label:>8} │{}\n", cells.trim_end());
    }
    page += &format!("{:>8} └{}\n", "", "─".repeat(heights.len()));
    let phases: Vec<&str> = report.timeline.chunks(step).map(|chunk| word_of_phase(&chunk[0].phase)).collect();
    page += &format!("{:>8}  {}\n\n", "", beneath(&phases).trim_end());
    page
}

fn word_of_phase(name: &str) -> &str {
    match name.rsplit('.').next().unwrap_or(name) {
        "fwd" => "forward",
        "bwd" => "backward",
        "opt" => "step",
        other => other,
    }
}

/// The names of columns, each where its run begins, as far as there is room.
fn beneath(names: &[&str]) -> String {
    let mut line = String::new();
    for run in names.chunk_by(|a, b| a == b) {
        let name: String = run[0].chars().take(run.len().saturating_sub(1)).collect();
        line += &format!("{name:<width$}", width = run.len());
    }
    line
}

pub(super) fn verdicts(verdicts: &[Verdict]) -> String {
    if let [verdict] = verdicts {
        let (memory, left) = (gib(verdict.memory), gib(verdict.headroom.unsigned_abs()));
        let card = format!("{} {} ({memory} GiB)", super::fits(verdict.fits), verdict.gpu);
        return match (verdict.fits, super::guessing()) {
            (true, false) => format!("{card}: {} % full, {left} GiB left\n", verdict.utilization),
            (true, true) => format!("{card}, {left} GiB left\n"),
            // A limit of its own stops the run before the card is full.
            (false, _) if verdict.headroom >= 0 => {
                let said = format!("{card} under the run's own limit of memory; {left} GiB of the card would be left");
                wrapped(&said, width()) + "\n"
            }
            (false, false) => format!("{card}: {left} GiB too much\n"),
            (false, true) => format!("{card}, {left} GiB too much\n"),
        };
    }
    let mut table = Table::new(&["card", "GiB", "fits", "full %", "left GiB"]);
    for verdict in verdicts {
        let sign = if verdict.headroom < 0 { "-" } else { "" };
        table.row(vec![
            verdict.gpu.clone(),
            gib(verdict.memory),
            if verdict.fits { "yes" } else { "no" }.to_owned() + if super::guessing() { "?" } else { "" },
            if super::guessing() {
                format!("{:.0}", verdict.utilization)
            } else {
                format!("{:.1}", verdict.utilization)
            },
            format!("{sign}{}", gib(verdict.headroom.unsigned_abs())),
        ]);
    }
    table.to_string()
}
