//! Roles on shared cards as text: a column for each, a line for each phase.

use super::gib;
use super::table::Table;
use crate::ask::placement::Placed;

/// All groups, their verdicts, notes.
pub(crate) fn text(placed: &Placed) -> String {
    let mut text = format!("{}, GiB on every card; confidence: from sources, not measured\n", placed.title);
    for group in &placed.groups {
        let names: Vec<&str> = group.roles.iter().map(String::as_str).collect();
        text += &format!("\n{} on {} of {}\n", names.join(", "), cards(group.cards), placed.gpu.name);
        let headers: Vec<&str> = ["phase"].into_iter().chain(names).chain(["besides", "all"]).collect();
        let mut table = Table::new(&headers);
        for phase in &group.phases {
            let figures = phase.roles.iter().chain([&phase.outside, &phase.total]).map(|bytes| gib(*bytes));
            table.row(std::iter::once(phase.name.clone()).chain(figures).collect());
        }
        text += &table.fitted(super::width());
        let verdict = if group.fits { "fits" } else { "does not fit" };
        let full = group.peak as f64 / placed.gpu.memory.max(1) as f64 * 100.0;
        text += &format!(
            "\"{}\" decides: {} GiB\n{verdict} {} ({} GiB): {full:.1} % full\n",
            group.decides,
            gib(group.peak),
            placed.gpu.name,
            gib(placed.gpu.memory)
        );
        if let Some(share) = group.largest_share {
            text += &match share > 0.0 {
                true => format!("up to {share:.2} of the card as the engine's share fits while it writes\n"),
                false => "no share of the card is left for the engine\n".to_owned(),
            };
        }
    }
    if !placed.notes.is_empty() {
        text += "\n";
    }
    text + &placed.notes.iter().map(|note| format!("note: {note}\n")).collect::<String>()
}

fn cards(count: u64) -> String {
    if count == 1 { "1 card".into() } else { format!("each of {count} cards") }
}
