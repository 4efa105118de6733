//! A report as a page, for Markdown, CSV, HTML and SVG.

use vramcast_core::plan::Gpus;
use vramcast_core::planner::smallest::Suggestion;
use vramcast_core::report::Report;

use super::page::{Block, Level, Page, wrapped};
use super::table::Table;
use super::{asked, gib, run, train, width};

/// The page of a report.
pub fn page(report: &Report, suggestions: &[Suggestion]) -> Page {
    super::showing(report, || whole(report, suggestions))
}

fn whole(report: &Report, suggestions: &[Suggestion]) -> Page {
    let mut page = Page::new(asked::title(report));
    page.add(Block::Text(asked::plan(report)));
    let mut totals = Table::new(&["peak", "GiB", "bytes"]);
    let levels = [
        ("allocated", report.totals.allocated),
        ("reserved", report.totals.reserved),
        ("process", report.totals.process),
    ];
    for (level, bytes) in levels {
        totals.row(vec![level.into(), gib(bytes), bytes.to_string()]);
    }
    page.table("Totals", totals);
    page.add(Block::Text(format!("confidence: {}", report.confidence.words)));
    page.add(Block::Heading(format!("At the peak ({})", train::phase_name(&report.peak_phase))));
    page.add(Block::Bars(report.breakdown.iter().map(|part| (part.name.to_string(), part.bytes)).collect()));
    if let Some(whole) = &report.run {
        page.add(Block::Heading("The whole run".into()));
        run::lines(whole).into_iter().for_each(|line| page.add(Block::Text(line)));
        run::parts(whole).into_iter().for_each(|parts| page.table("Parts of the run", parts));
    }
    let mut cards = Table::new(&["card", "GiB", "fits", "full %", "left GiB", "cards needed"]);
    for verdict in &report.verdicts {
        let left = verdict.headroom as f64 / f64::from(1 << 30);
        cards.row(vec![
            verdict.gpu.clone(),
            gib(verdict.memory),
            if super::guessing() {
                "?"
            } else if verdict.fits {
                "✓"
            } else {
                "✗"
            }
            .into(),
            if super::guessing() {
                format!("{:.0}", verdict.utilization)
            } else {
                format!("{:.1}", verdict.utilization)
            },
            if super::guessing() { format!("{left:.0}") } else { format!("{left:.2}") },
            filled(report.totals.process, verdict.memory),
        ]);
    }
    page.table("Cards", cards);
    if let [verdict] = report.verdicts.as_slice() {
        let level = if super::guessing() { Level::Tight } else { Level::of(verdict.utilization) };
        page.add(Block::Verdict(level, format!("{} {}", super::fits(verdict.fits), verdict.gpu)));
    }
    if !suggestions.is_empty() {
        page.table("What would fit", suggested(suggestions));
    }
    report.notes.iter().for_each(|note| page.add(Block::Note(note.clone())));
    page
}

/// Suggestions as a table.
pub fn suggested(suggestions: &[Suggestion]) -> Table {
    let mut table = Table::new(&["change", "GiB", "saves", "at what cost"]);
    for suggestion in suggestions {
        table.row(vec![suggestion.change.clone(), gib(suggestion.process), gib(suggestion.saved), suggestion.words()]);
    }
    table
}

/// How many cards of usual kinds the memory alone would fill; an engine's pool fills any.
pub fn cards_needed(report: &Report, cards: &Gpus) -> String {
    if !report.budgets.is_empty() {
        return String::new();
    }
    let process = report.totals.process;
    let share = |name: &&str| {
        let card = cards.find(name).ok()?;
        Some(format!("{} {}", filled(process, card.memory), card.name))
    };
    let all: Vec<String> = ["A100-80GB", "H100-80GB", "A100-40GB"].iter().filter_map(share).collect();
    wrapped(&format!("cards filled by this much memory: {}", all.join(", ")), width()) + "\n"
}

/// How many cards of so many bytes are filled, in tenths; rounded up, as no part of a card is left where none is.
fn filled(process: u64, memory: u64) -> String {
    let tenths = u128::from(process).saturating_mul(10).div_ceil(u128::from(memory.max(1)));
    format!("{}.{}", tenths / 10, tenths % 10)
}

/// Suggestions as text under a report.
pub fn suggestions_text(suggestions: &[Suggestion]) -> String {
    let Some(first) = suggestions.first() else { return String::new() };
    let heading = if first.fits {
        "\nchanges that would make it fit, cheapest first\n"
    } else {
        "\nno three changes make it fit; these save most\n"
    };
    heading.to_owned() + &suggested(suggestions).fitted(super::width())
}
