//! All cards of a run: a column each kind, then the host's memory.

use vramcast_core::report::Job;

use super::gib;
use super::table::Table;

/// Most kinds of cards that are shown side by side.
const COLUMNS: usize = 6;

/// The part of the page.
pub fn text(job: &Job) -> String {
    let mut page = String::new();
    if job.cards > 1 {
        let shown = &job.ranks[..job.ranks.len().min(COLUMNS)];
        let names: Vec<String> = shown.iter().map(|rank| format!("{} × {}", rank.cards, rank.name)).collect();
        let mut head = vec!["GiB of each"];
        head.extend(names.iter().map(String::as_str));
        let mut table = Table::new(&head);
        for (name, value) in [
            ("allocated", (|rank| rank.allocated) as fn(&vramcast_core::memory::simulation::Rank) -> u64),
            ("reserved", |rank| rank.reserved),
            ("process", |rank| rank.process),
        ] {
            let mut row = vec![name.to_owned()];
            row.extend(shown.iter().map(|rank| gib(value(rank))));
            table.row(row);
        }
        page += &table.to_string();
        if job.ranks.len() > COLUMNS {
            page += &format!("and {} more kinds of cards that need less (--json has all)\n", job.ranks.len() - COLUMNS);
        }
        page += &format!("all {} cards together: {} GiB\n\n", job.cards, gib(job.process));
    }
    if !job.host.is_empty() {
        let mut table = Table::new(&["in the host's memory, each process", "GiB", ""]);
        for part in &job.host {
            let pinned = if part.pinned { "pinned" } else { "" };
            table.row(vec![part.name.to_owned(), gib(part.bytes), pinned.to_owned()]);
        }
        page += &table.to_string();
        page += &format!("all processes together: {} GiB\n\n", gib(job.host_total));
    }
    page
}
