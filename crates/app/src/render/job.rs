//! All cards of a run: a column each kind, then the host's memory.

use vramcast_core::memory::simulation::Rank;
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
        page += &ranks(shown);
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

/// What each kind of card needs: a column each, or a row each where columns do not fit a terminal.
fn ranks(shown: &[Rank]) -> String {
    const WIDTH: usize = 80;
    let names: Vec<String> = shown.iter().map(|rank| format!("{} × {}", rank.cards, rank.name)).collect();
    let levels = ["allocated", "reserved", "process"];
    let values = |rank: &Rank| [rank.allocated, rank.reserved, rank.process].map(gib);
    let mut head = vec!["GiB of each"];
    head.extend(names.iter().map(String::as_str));
    let mut columns = Table::new(&head);
    for (index, level) in levels.into_iter().enumerate() {
        let cells = shown.iter().map(|rank| values(rank)[index].clone());
        columns.row(std::iter::once(level.to_owned()).chain(cells).collect());
    }
    let columns = columns.to_string();
    if columns.lines().all(|line| line.chars().count() <= WIDTH) {
        return columns;
    }
    let mut rows = Table::new(&["GiB of each", levels[0], levels[1], levels[2]]);
    for (name, rank) in names.iter().zip(shown) {
        rows.row(std::iter::once(name.clone()).chain(values(rank)).collect());
    }
    rows.to_string()
}
