//! A whole run in words: what it goes through, which part decides, what the allocator has to do.

use vramcast_core::report::Run;

use super::page::wrapped;
use super::table::Table;
use super::{gib, width};

/// A few lines and a table of the parts.
pub fn text(run: &Run) -> String {
    let mut page: String = lines(run).iter().map(|line| wrapped(line, width()) + "\n").collect();
    if let Some(parts) = parts(run) {
        page += &parts.to_string();
    }
    if let Some(roles) = roles(run) {
        page += &format!("\n{roles}");
    }
    if let Some(engine) = engine(run) {
        page += &format!("\n{engine}");
    }
    page + "\n"
}

/// The card while an engine shares it.
fn engine(run: &Run) -> Option<Table> {
    let mut table = Table::new(&["beside vLLM", "trainer GiB", "engine GiB", "all GiB", ""]);
    for one in &run.engine {
        let verdict = if one.fits { "fits" } else { "does not fit" };
        let all = one.trainer.saturating_add(one.engine);
        table.row(vec![one.name.clone(), gib(one.trainer), gib(one.engine), gib(all), verdict.into()]);
    }
    (!run.engine.is_empty()).then_some(table)
}

/// Who is on the card.
fn roles(run: &Run) -> Option<Table> {
    let mut table = Table::new(&["model", "weights GiB", "training state GiB", "its passes GiB"]);
    for role in &run.roles {
        // What has no phases of its own runs within the policy's (DPO's reference in its loss).
        let working =
            if role.working == 0 && role.name != "vLLM" { "with the policy's".into() } else { gib(role.working) };
        table.row(vec![role.name.clone(), gib(role.weights), gib(role.training), working]);
    }
    (!run.roles.is_empty()).then_some(table)
}

/// What each part takes, where there are several.
pub fn parts(run: &Run) -> Option<Table> {
    let mut table = Table::new(&["part", "allocated GiB", "reserved GiB"]);
    for part in &run.parts {
        table.row(vec![part.name.clone(), gib(part.allocated), gib(part.reserved)]);
    }
    (run.parts.len() > 1).then_some(table)
}

/// What there is to say, a line each.
pub fn lines(run: &Run) -> Vec<String> {
    let mut lines = Vec::new();
    if let Some([shortest, median, longest]) = run.lengths {
        lines.push(format!(
            "the run: {} steps, batches of {shortest} to {longest} tokens, half of them up to {median}",
            run.steps
        ));
    } else if run.steps > 0 {
        lines.push(format!("the run: {} steps", run.steps));
    }
    if let Some(peak) = run.peak {
        lines.push(format!("most is allocated in step {}, whose longest sample has {} tokens", peak.step, peak.tokens));
    }
    if let Some(spread) = run.spread {
        let [low, high] = spread.reserved.map(gib);
        lines.push(format!("over {} seeds, reserved goes from {low} to {high} GiB", spread.seeds));
    }
    if let Some(less) = run.expandable {
        lines.push(format!(
            "with expandable segments (--alloc-conf expandable_segments:True) it reserves {} GiB",
            gib(less)
        ));
    }
    lines.extend(decides(run));
    match (&run.fails, run.retries) {
        (Some(failed), _) => lines.push(format!(
            "it fails in {}: {} GiB more are asked for, and giving back what is cached does not make room",
            moment(&failed.phase),
            gib(failed.bytes)
        )),
        (None, 0) => {}
        (None, 1) => {
            lines.push("once the allocator has to give back what is cached and try again, which costs time".into())
        }
        (None, times) => lines.push(format!(
            "{times} times the allocator has to give back what is cached and try again, each of which costs time"
        )),
    }
    lines
}

/// Which part needs most, and by how much.
fn decides(run: &Run) -> Option<String> {
    let most = run.parts.iter().find(|part| part.name == run.decides)?;
    let next = run.parts.iter().filter(|part| part.name != run.decides).max_by_key(|part| part.allocated)?;
    let more = most.allocated - next.allocated;
    let cure = run.cure.as_ref().map(|cure| format!("; {cure}")).unwrap_or_default();
    let cured = run.cured.as_ref().map(|cured| format!(" ({} GiB with {})", gib(cured.allocated), cured.with));
    let cured = cured.unwrap_or_default();
    Some(format!("{} decides: it allocates {} GiB more than {}{cure}{cured}", most.name, gib(more), next.name))
}

/// `3.0.fwd` with its step, counted from 1.
fn moment(phase: &str) -> String {
    let name = super::train::phase_name(phase);
    let step = phase.split('.').next().and_then(|step| step.parse::<u32>().ok());
    match (step, name.split_once(" of ")) {
        (Some(step), Some((what, _))) => format!("the {what} of step {}", step + 1),
        (Some(step), None) => format!("{name} after step {}", step + 1),
        _ => name,
    }
}
