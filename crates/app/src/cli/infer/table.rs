//! `--table`: every cell is an answer.

use serde_json::{Value, json};
use vramcast_core::ask::{Runner, Wanted, tree};
use vramcast_core::memory::simulation;

use super::super::Answer;
use super::super::context::Context;
use crate::ask::question::Prepared;
use crate::exit::Exit;
use crate::failure::Failure;
use crate::render::gib;
use crate::render::inspect::grouped;
use crate::render::page::wrapped;
use crate::render::table::Table;

const PROMPTS: [u64; 5] = [512, 2048, 8192, 32_768, 131_072];
const BATCHES: [u64; 5] = [1, 4, 16, 64, 256];
const CONTEXTS: [u64; 8] = [1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072];

/// The table of one question, or of several engines side by side.
pub(super) fn answer(prepared: &[&Prepared], context: &Context) -> Result<Answer, Failure> {
    let as_json = context.text_or_json("infer --table")?;
    match prepared {
        [one] if one.request.runner == Runner::Transformers => generation(one, as_json),
        all => engines(all, as_json),
    }
}

/// What the process holds, by prompt and batch.
fn generation(prepared: &Prepared, as_json: bool) -> Result<Answer, Failure> {
    let (plan, _) = prepared.generation(false)?;
    let (model, name) = (prepared.model()?, &prepared.found.name);
    // Prompts beyond the model's positions have no cell.
    let most = vramcast_core::ask::positions(model).unwrap_or(u64::MAX).saturating_sub(plan.new_tokens);
    let mut rows: Vec<(u64, Vec<u64>)> = Vec::new();
    for prompt in PROMPTS.into_iter().filter(|prompt| *prompt <= most) {
        let cells = BATCHES.iter().map(|batch| {
            let mut plan = plan.clone();
            (plan.batch.batch_size, plan.batch.seq_len) = (*batch, prompt);
            simulation::infer(model, &plan).map(|simulation| simulation.process_bytes())
        });
        rows.push((prompt, cells.collect::<Result<_, _>>()?));
    }
    if as_json {
        let rows: Vec<_> = rows.iter().map(|(prompt, cells)| json!({"prompt": prompt, "process": cells})).collect();
        let mut document = prepared.answer(Wanted::default())?.document();
        (document["batches"], document["rows"]) = (json!(BATCHES), json!(rows));
        return Ok(Answer::document(document, Exit::Success));
    }
    let heads: Vec<String> = BATCHES.iter().map(|batch| format!("batch {batch}")).collect();
    let mut heads: Vec<&str> = heads.iter().map(String::as_str).collect();
    heads.insert(0, "prompt");
    let mut table = Table::new(&heads);
    for (prompt, cells) in &rows {
        let cell = |bytes: &u64| format!("{}{}", gib(*bytes), if *bytes <= plan.gpu.memory { "" } else { " !" });
        table.row(std::iter::once(grouped(*prompt)).chain(cells.iter().map(cell)).collect());
    }
    let text = format!(
        "{name}\nGiB of the process with {} new tokens on {} (!: over its {} GiB)\n\n{table}",
        plan.new_tokens,
        plan.gpu.name,
        gib(plan.gpu.memory)
    );
    Ok(Answer::success(text))
}

/// Sequences at once by context, or what a card holds where an engine allocates by context.
fn engines(all: &[&Prepared], as_json: bool) -> Result<Answer, Failure> {
    let mut lines: Vec<(u64, Vec<(String, String)>)> = Vec::new();
    for context in CONTEXTS {
        let mut cells = Vec::new();
        for prepared in all {
            let mut request = prepared.request.clone();
            tree::set(&mut request.stated, "context", json!(context));
            let report = prepared.answer_to(&request, Wanted::default())?.report;
            for budget in &report.budgets {
                cells.push((budget.engine.clone(), format!("{:.1}", budget.concurrency_thousandths as f64 / 1000.0)));
            }
            for buffers in &report.buffers {
                let mark = if report.verdicts.iter().all(|verdict| verdict.fits) { "" } else { " !" };
                cells.push((format!("{} GiB", buffers.engine), format!("{}{mark}", gib(report.totals.process))));
            }
        }
        lines.push((context, cells));
    }
    let Some(first) = all.first() else { return Ok(Answer::success(String::new())) };
    let base = first.answer(Wanted::default())?;
    let gpu = base.report.plan.gpu().clone();
    if as_json {
        let row = |(context, cells): &(u64, Vec<(String, String)>)| {
            let cells: serde_json::Map<String, Value> = cells.iter().map(|(k, v)| (k.clone(), json!(v))).collect();
            json!({"context": context, "engines": cells})
        };
        let mut document = base.document();
        document["rows"] = json!(lines.iter().map(row).collect::<Vec<_>>());
        return Ok(Answer::document(document, Exit::Success));
    }
    let names: Vec<&str> =
        lines.first().map_or(Vec::new(), |(_, cells)| cells.iter().map(|(n, _)| n.as_str()).collect());
    let mut table = Table::new(&[&["context"], names.as_slice()].concat());
    for (context, cells) in &lines {
        table.row(std::iter::once(grouped(*context)).chain(cells.iter().map(|(_, cell)| cell.clone())).collect());
    }
    let meaning = "sequences of that length at once; GiB of the fullest card for llama.cpp and Ollama (!: too much)";
    let title = format!("{} on {} ({} GiB): {meaning}", first.found.name, gpu.name, gib(gpu.memory));
    Ok(Answer::success(format!("{}\n\n{table}", wrapped(&title, crate::render::width()))))
}
