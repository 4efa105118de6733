//! A serving engine over cards and formats of the weights, and over contexts and sequences at once: what fits where.

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Value, json};
use vramcast_core::ask::{Request, Runner, Wanted, longest_sequence, tree};
use vramcast_core::plan::Gpu;

use super::question::Prepared;
use super::solve::formats;
use super::table::CONTEXTS;
use crate::failure::Failure;

/// Sequences at once.
const AT_ONCE: [u64; 9] = [1, 2, 4, 8, 16, 32, 64, 128, 256];
/// The same where each is an answer of its own.
const FEW_AT_ONCE: [u64; 5] = [1, 2, 4, 8, 16];
/// Formats side by side.
const MOST_FORMATS: usize = 8;

/// What fits where.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Heat {
    /// Formats of the weights, many bits first.
    formats: Vec<String>,
    /// Cards, small ones first; of several with about the same memory one, the plan's own among them.
    cards: Vec<CardRow>,
    /// Sequences at once.
    at_once: Vec<u64>,
    /// Contexts on the plan's card.
    contexts: Vec<ContextRow>,
}

/// A card.
#[derive(Debug, Serialize, JsonSchema)]
struct CardRow {
    gpu: String,
    /// Bytes.
    memory: u64,
    /// A cell for each format; none where the engine cannot run it there.
    cells: Vec<Option<Cell>>,
}

/// A card with a format.
#[derive(Debug, Serialize, JsonSchema)]
struct Cell {
    fits: bool,
    /// Bytes of the process.
    process: u64,
    /// Sequences of full length at once, in thousandths, of engines with a pool.
    sequences: Option<u64>,
}

/// A length of sequences.
#[derive(Debug, Serialize, JsonSchema)]
struct ContextRow {
    context: u64,
    /// Whether so many fit at once.
    fits: Vec<bool>,
    /// How many do, in thousandths, of engines with a pool.
    sequences: Option<u64>,
}

/// Fills both tables.
pub(crate) fn heat(prepared: &Prepared) -> Result<Heat, Failure> {
    let runner = prepared.request.runner;
    if !runner.serves() {
        return Err(Failure::bad_input("only a serving engine has these tables").hint("choose one by engine"));
    }
    let first = prepared.answer(Wanted::default())?;
    let fixed = !prepared.model()?.config()["quantization_config"].is_null() || prepared.found.resolved.gguf.is_some();
    let stated = prepared.request.stated.get("quantization").and_then(Value::as_str).unwrap_or_default();
    let all = formats(runner);
    // One that is not among them leaves nothing to compare.
    let comparable = stated.is_empty() || all.iter().any(|(name, _)| name.eq_ignore_ascii_case(stated));
    let formats = match !fixed && comparable {
        true => usual(all, stated),
        false => vec![("as it is".to_owned(), json!(stated))],
    };
    let mut cards: Vec<Gpu> = prepared.cards().all().collect();
    let own = first.report.plan.gpu().name.clone();
    vramcast_core::order::sort_by_key(&mut cards, |card| (size(card), card.name != own, card.memory));
    cards.dedup_by_key(|card| size(card));
    let cell = |gpu: &Gpu, format: &Value| {
        let mut request = prepared.with("gpu", json!(gpu.name));
        match format {
            Value::Null => drop(tree::take(&mut request.stated, "quantization")),
            Value::String(name) if name == stated => {}
            other => tree::set(&mut request.stated, "quantization", other.clone()),
        }
        let answer = prepared.answer_to(&request, Wanted::default()).ok()?;
        let sequences = answer.report.budgets.first().map(|budget| budget.concurrency_thousandths);
        Some(Cell { fits: answer.fits, process: answer.report.totals.process, sequences })
    };
    let row = |gpu: Gpu| CardRow {
        cells: formats.iter().map(|(_, format)| cell(&gpu, format)).collect(),
        memory: gpu.memory,
        gpu: gpu.name,
    };
    let local = matches!(runner, Runner::LlamaCpp | Runner::Ollama);
    let at_once = if local { FEW_AT_ONCE.to_vec() } else { AT_ONCE.to_vec() };
    // Contexts that the model was not made for have no row.
    let most = longest_sequence(prepared.model()?).unwrap_or(u64::MAX).max(CONTEXTS[0]);
    let lengths = CONTEXTS.into_iter().filter(|context| *context <= most);
    let contexts = lengths.map(|context| match local {
        true => alone(prepared, context),
        false => pooled(prepared, context),
    });
    Ok(Heat {
        cards: cards.into_iter().map(row).collect(),
        at_once,
        contexts: contexts.collect(),
        formats: formats.into_iter().map(|(name, _)| name).collect(),
    })
}

/// Cards of about the same memory: each answer is one of many.
fn size(card: &Gpu) -> u64 {
    (card.memory >> 30).div_ceil(8)
}

/// So many formats that they stand side by side: of each number of bits the middle one, and the one that is asked for.
fn usual(all: Vec<(String, Value)>, asked: &str) -> Vec<(String, Value)> {
    let odd = |name: &str| ["_S", "_L", "_XS", "_XXS", "_1", "_NL"].iter().any(|end| name.ends_with(end));
    let few = all.len() <= MOST_FORMATS;
    let is_asked = |name: &str| name.eq_ignore_ascii_case(asked);
    let mut shown: Vec<_> =
        all.into_iter().filter(|(name, _)| few || is_asked(name) || !odd(name) && !name.starts_with("IQ")).collect();
    if let Some(last) = shown.iter().position(|(name, _)| is_asked(name)).filter(|at| *at >= MOST_FORMATS) {
        shown.swap(last, MOST_FORMATS - 1);
    }
    shown.truncate(MOST_FORMATS);
    shown
}

/// An engine with a pool says how many sequences of full length it holds.
fn pooled(prepared: &Prepared, context: u64) -> ContextRow {
    let answer = prepared.answer_to(&prepared.with("context", json!(context)), Wanted::default()).ok();
    let sequences = answer.and_then(|answer| Some(answer.report.budgets.first()?.concurrency_thousandths));
    let fits = AT_ONCE.iter().map(|count| sequences.is_some_and(|most| most >= count * 1000)).collect();
    ContextRow { context, fits, sequences }
}

/// One that allocates what it is asked for is asked; llama.cpp's context is shared by its sequences.
fn alone(prepared: &Prepared, context: u64) -> ContextRow {
    let fits = |count: &u64| {
        let whole = if prepared.request.runner == Runner::LlamaCpp { context.saturating_mul(*count) } else { context };
        let mut request: Request = prepared.with("parallel", json!(count));
        tree::set(&mut request.stated, "context", json!(whole));
        prepared.answer_to(&request, Wanted::default()).is_ok_and(|answer| answer.fits)
    };
    ContextRow { context, fits: FEW_AT_ONCE.iter().map(fits).collect(), sequences: None }
}
