//! Many answers side by side: prompts and batches of transformers, contexts of serving engines.

use serde_json::{Map, Value, json};
use vramcast_core::ask::{Runner, Wanted, longest_sequence, positions, tree};
use vramcast_core::memory::simulation;

use super::question::Prepared;
use super::work;
use crate::failure::Failure;

const PROMPTS: [u64; 5] = [512, 2048, 8192, 32_768, 131_072];
const BATCHES: [u64; 5] = [1, 4, 16, 64, 256];
pub(crate) const CONTEXTS: [u64; 8] = [1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072];

/// A table: what its rows are, its columns, and a cell for each.
pub(crate) struct Tabled {
    /// What stands before every row.
    pub(crate) rows: &'static str,
    /// What stands above every column.
    pub(crate) columns: Vec<String>,
    /// Rows: their number, and their cells.
    pub(crate) cells: Vec<(u64, Vec<Cell>)>,
    /// The report of the question itself, with the rows in it.
    pub(crate) document: Value,
    /// What a cell means, with the card.
    pub(crate) title: String,
}

/// One cell.
pub(crate) enum Cell {
    /// Bytes of the process, and whether the card holds them.
    Process(u64, bool),
    /// Sequences of full length at once, in thousandths.
    Sequences(u64),
}

/// The table of one question, or of several engines side by side.
pub(crate) fn table(prepared: &[&Prepared]) -> Result<Tabled, Failure> {
    match prepared {
        [one] if one.request.runner == Runner::Transformers => generation(one),
        all => engines(all),
    }
}

/// What the process holds, by prompt and batch.
fn generation(prepared: &Prepared) -> Result<Tabled, Failure> {
    let (plan, _) = prepared.generation(false)?;
    let (model, memory) = (prepared.model()?, plan.gpu.memory);
    // Prompts beyond the model's positions, and those that it was not made for, have no cell.
    let made_for = longest_sequence(model).unwrap_or(u64::MAX).max(PROMPTS[0]);
    let most = positions(model).unwrap_or(u64::MAX).saturating_sub(plan.new_tokens).min(made_for);
    let most = most.min(work::most_tokens(model, &prepared.request).unwrap_or(u64::MAX) / BATCHES.len() as u64);
    let mut cells: Vec<(u64, Vec<u64>)> = Vec::new();
    for prompt in PROMPTS.into_iter().filter(|prompt| *prompt <= most) {
        let row = BATCHES.iter().map(|batch| {
            let mut plan = plan.clone();
            (plan.batch.batch_size, plan.batch.seq_len) = (*batch, prompt);
            simulation::infer(model, &plan).map(|simulation| simulation.process_bytes())
        });
        cells.push((prompt, row.collect::<Result<_, _>>()?));
    }
    let mut document = prepared.answer(Wanted::default())?.document();
    let rows: Vec<Value> = cells.iter().map(|(prompt, row)| json!({"prompt": prompt, "process": row})).collect();
    (document["batches"], document["rows"]) = (json!(BATCHES), json!(rows));
    let cell = |bytes: u64| Cell::Process(bytes, bytes <= memory);
    Ok(Tabled {
        rows: "prompt",
        columns: BATCHES.iter().map(|batch| format!("batch {batch}")).collect(),
        cells: cells.into_iter().map(|(prompt, row)| (prompt, row.into_iter().map(cell).collect())).collect(),
        document,
        title: format!("GiB of the process with {} new tokens on {}", plan.new_tokens, plan.gpu.name),
    })
}

/// Sequences at once by context, or what a card holds where an engine allocates by context.
fn engines(all: &[&Prepared]) -> Result<Tabled, Failure> {
    let Some(first) = all.first() else { return Err(Failure::bad_input("no engine is asked")) };
    let mut columns = Vec::new();
    let mut cells = Vec::new();
    let mut rows = Vec::new();
    // Contexts that the model was not made for have no row.
    let most = longest_sequence(first.model()?).unwrap_or(u64::MAX).max(CONTEXTS[0]);
    for context in CONTEXTS.into_iter().filter(|context| *context <= most) {
        let (mut row, mut named) = (Vec::new(), Map::new());
        columns.clear();
        for prepared in all {
            let mut request = prepared.request.clone();
            tree::set(&mut request.stated, "context", json!(context));
            let report = prepared.answer_to(&request, Wanted::default())?.report;
            for budget in &report.budgets {
                let sequences = budget.concurrency_thousandths;
                columns.push(budget.engine.clone());
                named.insert(budget.engine.clone(), json!(format!("{:.1}", sequences as f64 / 1000.0)));
                row.push(Cell::Sequences(sequences));
            }
            for buffers in &report.buffers {
                let (process, fits) = (report.totals.process, report.verdicts.iter().all(|verdict| verdict.fits));
                columns.push(format!("{} GiB", buffers.engine));
                named.insert(format!("{} bytes", buffers.engine), json!(process));
                row.push(Cell::Process(process, fits));
            }
        }
        rows.push(json!({"context": context, "engines": named}));
        cells.push((context, row));
    }
    let base = first.answer(Wanted::default())?;
    let mut document = base.document();
    document["rows"] = json!(rows);
    let meaning = "sequences of that length at once; GiB of the fullest card for llama.cpp and Ollama";
    let title = format!("{meaning}, on {}", base.report.plan.gpu().name);
    Ok(Tabled { rows: "context", columns, cells, document, title })
}
