//! A serving engine's own account as text.

use vramcast_core::report::{Buffered, Report};
use vramcast_core::serving::Budget;
use vramcast_core::serving::llama_cpp::Buffers;
use vramcast_core::units::grouped;

use super::gib;
use super::table::Table;

/// What the cache holds, or buffers by device.
pub(super) fn account(report: &Report) -> String {
    report.budgets.iter().map(pool).chain(report.buffers.iter().map(buffers)).collect()
}

fn pool(budget: &Budget) -> String {
    let mut text = format!("granted to {}: {} GiB\n", budget.engine, gib(budget.granted));
    if budget.missing > 0 {
        let what = match budget.cache {
            0 => "any cache".to_owned(),
            asked => format!("the cache of {} GiB", gib(asked)),
        };
        return text + &format!("{} GiB are missing before {what} fits\n\n", gib(budget.missing));
    }
    let concurrency = budget.concurrency_thousandths as f64 / 1000.0;
    text += &match budget.fits {
        // What the pool could hold beyond that, the model was not made for.
        true => format!("a sequence of full length ({} tokens) fits\n", grouped(budget.full_length)),
        false => {
            format!(
                "no sequence of full length fits: {} tokens take {} GiB, {} are there;\nthe longest that does: {} tokens\n",
                grouped(budget.full_length),
                gib(budget.full_bytes),
                gib(budget.cache),
                grouped(budget.largest_sequence)
            )
        }
    };
    let blocks = format!("{} blocks of {}", grouped(budget.blocks), budget.block_size);
    text +=
        &format!("{} tokens in {blocks}; {concurrency:.2} full sequences at once\n\n", grouped(budget.cache_tokens));
    text
}

/// What a pool lacks that holds no sequence of full length: an engine takes the share it is granted, not the whole card.
pub(super) fn short(report: &Report) -> Option<String> {
    let given = |budget: &&Budget| budget.missing > 0 && budget.cache > 0;
    let budget = report.budgets.first().filter(|budget| !budget.fits && !given(budget))?;
    let verdict = report.verdicts.first()?;
    let (memory, left) = (gib(verdict.memory), gib(verdict.headroom.unsigned_abs()));
    let said = format!(
        "does not fit {} ({memory} GiB): of the {} GiB granted, {left} GiB are missing for one sequence of {} tokens",
        verdict.gpu,
        gib(budget.granted),
        grouped(budget.full_length)
    );
    Some(super::page::wrapped(&said, super::width()) + "\n")
}

fn buffers(buffered: &Buffered) -> String {
    let mut table = Table::new(&[buffered.engine.as_str(), "model GiB", "cache", "compute", "output"]);
    let row = |name: String, b: &Buffers| vec![name, gib(b.model), gib(b.cache), gib(b.compute), gib(b.output)];
    for (index, buffers) in buffered.estimate.devices.iter().enumerate() {
        table.row(row(format!("card {index}"), buffers));
    }
    table.row(row("host".into(), &buffered.estimate.host));
    let (context, sequence) = (buffered.estimate.context, buffered.estimate.sequence);
    let each = if sequence < context { format!(", {} for each sequence", grouped(sequence)) } else { String::new() };
    format!("context: {} tokens{each}\n\n{table}\n", grouped(context))
}

/// Several engines' reports, and a line for each.
pub fn side_by_side(reports: &[&Report]) -> String {
    let mut text: String = reports.iter().map(|report| super::train::text(report, false, false) + "\n").collect();
    let mut table = Table::new(&["engine", "weights GiB", "cache GiB", "tokens", "sequences", "fits"]);
    for report in reports {
        let part = |name: &str| report.breakdown.iter().find(|part| part.name == name).map_or(0, |part| part.bytes);
        let fits = if report.verdicts.iter().all(|verdict| verdict.fits) { "yes" } else { "no" };
        let (engine, tokens, sequences) = match (report.budgets.first(), report.buffers.first()) {
            (Some(budget), _) => (
                budget.engine.clone(),
                grouped(budget.cache_tokens),
                format!("{:.2}", budget.concurrency_thousandths as f64 / 1000.0),
            ),
            (None, Some(buffers)) => (buffers.engine.clone(), "-".into(), "-".into()),
            (None, None) => continue,
        };
        table.row(vec![engine, gib(part("weights")), gib(part("keys and values")), tokens, sequences, fits.into()]);
    }
    text += &table.to_string();
    text
}
