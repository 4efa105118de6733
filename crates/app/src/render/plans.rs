//! Plans as text.

use vramcast_core::planner::frontier::{Planned, Plans};
use vramcast_core::planner::moves::Cost;
use vramcast_core::units::times;

use super::{gib, page, width};

/// All of them under each other, each with its changes and its command.
pub fn text(plans: &Plans, notes: &[String]) -> String {
    let cards = if plans.gpus > 1 { format!("{} x ", plans.gpus) } else { String::new() };
    let mut text = format!("{} on {cards}{} ({} GiB)\n", plans.model, plans.gpu, gib(plans.memory));
    if let Some(asked) = &plans.asked {
        let verdict = if asked.fits { "fits" } else { "does not fit" };
        text += &format!("as asked: process {} GiB, {verdict}\n", gib(asked.totals.process));
    }
    for (at, planned) in (1..).zip(&plans.plans) {
        text += &format!("\n{at}. {}\n", headed(planned));
        text += &told(planned);
    }
    if plans.plans.is_empty() {
        text += "\nnothing fits";
        if let Some(nearest) = &plans.nearest {
            text += &format!("; nearest, {} GiB too much:\n", gib(nearest.headroom.unsigned_abs()));
            text += &told(nearest);
        } else {
            text.push('\n');
        }
    }
    text += &format!("\n{} plans were simulated; times are estimates\n", plans.tried);
    notes.iter().for_each(|note| text += &(page::wrapped(&format!("note: {note}"), width()) + "\n"));
    text
}

fn headed(planned: &Planned) -> String {
    let keeps = match planned.keeps {
        Cost::Nothing | Cost::Time | Cost::Mesh => "same result",
        other => other.words(),
    };
    let free = planned.headroom.max(0).unsigned_abs();
    let mut line = format!("{keeps}: process {} GiB, {} free", gib(planned.totals.process), gib(free));
    if let Some(seconds) = planned.cost.and_then(|cost| cost.seconds) {
        line += &format!(", a step in about {}", duration(seconds));
    }
    if let Some(slower) = planned.slower.filter(|slower| *slower >= 1.05) {
        line += &format!(" ({slower:.1} x slower)");
    }
    if planned.retries > 0 {
        line += &format!(", gives cached memory back {} to fit", times(planned.retries));
    }
    if let Some(price) = planned.price {
        line += &format!(", {price:.2} an hour");
    }
    page::wrapped(&line, width().saturating_sub(4)).replace('\n', "\n   ")
}

fn told(planned: &Planned) -> String {
    let mut text = String::new();
    let mut said = "";
    for change in &planned.changes {
        let line = format!("{}: {} to {}", change.setting, plain(&change.from), plain(&change.to));
        // Settings that change together have one reason.
        let why =
            if change.why.is_empty() || change.why == said { String::new() } else { format!(" ({})", change.why) };
        said = change.why;
        text += &format!("   {}\n", page::wrapped(&(line + &why), width().saturating_sub(5)).replace('\n', "\n     "));
    }
    // A command is not broken: it is copied.
    text + &format!("   {}\n", planned.command)
}

fn plain(value: &serde_json::Value) -> String {
    match value {
        serde_json::Value::Null => "none".to_owned(),
        serde_json::Value::Object(object) if object.is_empty() => "on".to_owned(),
        other => other.as_str().map_or_else(|| other.to_string(), str::to_owned),
    }
}

fn duration(seconds: f64) -> String {
    match seconds {
        short if short < 0.95 => format!("{:.0} ms", short * 1e3),
        some if some < 95.0 => format!("{some:.1} s"),
        long => format!("{:.0} s", long),
    }
}
