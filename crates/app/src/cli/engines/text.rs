//! Budgets, buffers and tables as text.

use serde_json::json;
use vramcast_core::plan::Gpu;
use vramcast_core::serving::Budget;
use vramcast_core::serving::llama_cpp::{Buffers, LlamaCppEstimate};

use super::{EngineArguments, Request, Served};
use crate::cli::{Answer, Failure};
use crate::exit::Exit;
use crate::render::gib;
use crate::render::inspect::grouped;
use crate::render::page::wrapped;
use crate::render::table::Table;

/// Columns of a terminal that everything fits.
const WIDTH: usize = 80;

/// Contexts of a table.
const CONTEXTS: [u64; 8] = [1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072];

/// Every engine's own account, and a line for each side by side where there are several.
pub(super) fn all(name: &str, gpu: &Gpu, served: &Served) -> String {
    let mut text = format!("{name} served on {} ({} GiB)\n\n", gpu.name, gib(gpu.memory));
    text += &served.budgets.iter().map(budget).collect::<String>();
    for (engine, estimate) in &served.estimates {
        text += &buffers(engine, estimate, served);
    }
    if served.budgets.len() + served.estimates.len() > 1 {
        text += &side_by_side(served);
    }
    text
}

fn side_by_side(served: &Served) -> String {
    let mut table = Table::new(&["engine", "weights GiB", "cache GiB", "tokens", "sequences", "fits"]);
    let yes = |fits: bool| if fits { "yes" } else { "no" }.to_owned();
    for budget in &served.budgets {
        let weights = budget.parts.iter().find(|part| part.name == "weights").map_or(0, |part| part.bytes);
        let sequences = format!("{:.2}", budget.concurrency_thousandths as f64 / 1000.0);
        let tokens = grouped(budget.cache_tokens);
        table.row(vec![budget.engine.clone(), gib(weights), gib(budget.cache), tokens, sequences, yes(budget.fits)]);
    }
    for (engine, estimate) in &served.estimates {
        let sum = |of: fn(&Buffers) -> u64| gib(estimate.devices.iter().map(of).sum());
        let fits = yes(served.fullest(estimate) <= served.memory);
        table.row(vec![(*engine).into(), sum(|b| b.model), sum(|b| b.cache), "-".into(), "-".into(), fits]);
    }
    table.to_string()
}

fn budget(budget: &Budget) -> String {
    let mut table = Table::new(&[budget.engine.as_str(), "GiB"]);
    for part in &budget.parts {
        table.row(vec![part.name.clone(), gib(part.bytes)]);
    }
    table.row(vec!["keys and values".into(), gib(budget.cache)]);
    table.row(vec!["= granted".into(), gib(budget.granted)]);
    let mut text = table.to_string();
    if budget.missing > 0 {
        text += &format!("{} GiB are missing before any cache fits\n", gib(budget.missing));
    } else {
        let concurrency = budget.concurrency_thousandths as f64 / 1000.0;
        let fits = if budget.fits { "a sequence of full length fits" } else { "no sequence of full length fits" };
        text += &format!("{fits}; the longest that does: {} tokens\n", grouped(budget.largest_sequence));
        let blocks = format!("{} blocks of {}", grouped(budget.blocks), budget.block_size);
        text += &format!("{} tokens in {blocks}; ", grouped(budget.cache_tokens));
        text += &format!("{concurrency:.2} full sequences at once\n");
    }
    for note in &budget.notes {
        text += &format!("{}\n", wrapped(&format!("note: {note}"), WIDTH));
    }
    text + "\n"
}

fn buffers(engine: &str, estimate: &LlamaCppEstimate, served: &Served) -> String {
    let mut table = Table::new(&[engine, "model GiB", "cache", "compute", "output"]);
    let row = |name: String, b: &Buffers| vec![name, gib(b.model), gib(b.cache), gib(b.compute), gib(b.output)];
    for (index, buffers) in estimate.devices.iter().enumerate() {
        table.row(row(format!("card {index}"), buffers));
    }
    table.row(row("host".into(), &estimate.host));
    let device = served.fullest(estimate);
    let verdict = if device <= served.memory { "fits" } else { "does not fit" };
    let mut text = format!("{table}{} GiB on the fullest card with its context: {verdict}\n", gib(device));
    for note in &estimate.notes {
        text += &format!("{}\n", wrapped(&format!("note: {note}"), WIDTH));
    }
    text + "\n"
}

/// Sequences at once by context, or what a card holds where an engine allocates by context.
pub(super) fn table(request: &Request<'_>, gpu: &Gpu, as_json: bool) -> Result<Answer, Failure> {
    let mut lines: Vec<(u64, Vec<(String, String)>)> = Vec::new();
    for context in CONTEXTS {
        let arguments = EngineArguments { context: Some(context), ..request.arguments.clone() };
        let served = Request { arguments: &arguments, ..*request }.serve(gpu)?;
        let sequences = |budget: &Budget| format!("{:.1}", budget.concurrency_thousandths as f64 / 1000.0);
        let mut cells: Vec<(String, String)> =
            served.budgets.iter().map(|budget| (budget.engine.clone(), sequences(budget))).collect();
        for (engine, estimate) in &served.estimates {
            let held = served.fullest(estimate);
            let mark = if held <= served.memory { "" } else { " !" };
            cells.push((format!("{engine} GiB"), format!("{}{mark}", gib(held))));
        }
        lines.push((context, cells));
    }
    if as_json {
        let rows: Vec<_> = lines
            .iter()
            .map(|(context, cells)| {
                let cells: serde_json::Map<_, _> = cells.iter().map(|(k, v)| (k.clone(), json!(v))).collect();
                json!({"context": context, "engines": cells})
            })
            .collect();
        let document = json!({"schema": 1, "model": request.name, "gpu": gpu.name, "rows": rows});
        return Ok(Answer::document(document, Exit::Success));
    }
    let names: Vec<&str> =
        lines.first().map_or(Vec::new(), |(_, cells)| cells.iter().map(|(n, _)| n.as_str()).collect());
    let mut table = Table::new(&[&["context"], names.as_slice()].concat());
    for (context, cells) in &lines {
        let mut row = vec![grouped(*context)];
        row.extend(cells.iter().map(|(_, cell)| cell.clone()));
        table.row(row);
    }
    let meaning = "sequences of that length at once; GiB of the fullest card for llama.cpp and Ollama (!: too much)";
    let title = format!("{} on {} ({} GiB): {meaning}", request.name, gpu.name, gib(gpu.memory));
    let text = format!("{}\n\n{table}", wrapped(&title, WIDTH));
    Ok(Answer::success(text))
}
