//! `vramcast infer --engine …`: what a serving engine would do with a model on a card.

use clap::ValueEnum;
use serde_json::json;
use vramcast_core::model::Model;
use vramcast_core::plan::Gpu;
use vramcast_core::serving::llama_cpp::{CONTEXT, LlamaCppEstimate, LlamaCppPlan, ollama};
use vramcast_core::serving::sglang::SglangPlan;
use vramcast_core::serving::tensorrt_llm::TensorRtLlmPlan;
use vramcast_core::serving::tgi::TgiPlan;
use vramcast_core::serving::vllm::VllmPlan;
use vramcast_core::serving::{Budget, ServedModel, WeightFormat};

use super::{Answer, Failure};
use crate::exit::Exit;
use crate::render::gib;
use crate::render::inspect::grouped;
use crate::render::table::Table;

/// Who serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum EngineName {
    /// transformers' `generate`, simulated.
    Hf,
    Vllm,
    Sglang,
    Tgi,
    TensorrtLlm,
    #[value(name = "llama.cpp", alias = "llama-cpp")]
    LlamaCpp,
    Ollama,
    /// All of them but `hf`, side by side.
    All,
}

/// The answer of one engine or of all.
pub(super) fn run(
    engine: EngineName,
    name: &str,
    model: &Model,
    gpu: &Gpu,
    context: Option<u64>,
    as_json: bool,
) -> Result<Answer, Failure> {
    let format = WeightFormat::of(model).map_err(|e| Failure::bad_input(e.to_string()))?;
    let served = ServedModel::of(model, &format)?;
    let wanted = |one: EngineName| engine == one || engine == EngineName::All;
    let mut budgets: Vec<Budget> = Vec::new();
    let memory = gpu.memory;
    if wanted(EngineName::Vllm) {
        let plan = VllmPlan { memory, card: gpu.name.clone(), max_model_len: context, ..VllmPlan::default() };
        budgets.push(plan.budget(&served));
    }
    if wanted(EngineName::Sglang) {
        budgets.push(SglangPlan { memory, context, ..SglangPlan::default() }.budget(&served));
    }
    if wanted(EngineName::Tgi) {
        budgets.push(TgiPlan { memory, max_total_tokens: context, ..TgiPlan::default() }.budget(&served));
    }
    if wanted(EngineName::TensorrtLlm) {
        budgets.push(TensorRtLlmPlan { memory, max_seq_len: context, ..TensorRtLlmPlan::default() }.budget(&served));
    }
    let mut estimates: Vec<(&str, LlamaCppEstimate)> = Vec::new();
    let refuse = |e: vramcast_core::serving::llama_cpp::LlamaCppError| Failure::bad_input(e.to_string());
    if wanted(EngineName::LlamaCpp) {
        let mut plan = LlamaCppPlan::default();
        plan.context = context.unwrap_or(plan.context);
        estimates.push(("llama.cpp", plan.estimate(&served).map_err(refuse)?));
    }
    if wanted(EngineName::Ollama) {
        estimates.push(("Ollama", ollama(&served, memory, context, None).estimate(&served).map_err(refuse)?));
    }
    let device =
        |estimate: &LlamaCppEstimate| estimate.devices.iter().map(|buffers| buffers.total()).sum::<u64>() + CONTEXT;
    let fits = budgets.iter().all(|budget| budget.fits) && estimates.iter().all(|(_, e)| device(e) <= memory);
    let exit = if fits { Exit::Success } else { Exit::No };
    if as_json {
        let buffers: Vec<_> = estimates.iter().map(|(engine, e)| json!({"engine": engine, "estimate": e})).collect();
        let document = json!({"schema": 1, "model": name, "gpu": gpu.name, "memory": memory, "budgets": budgets, "buffers": buffers});
        return Ok(Answer { text: format!("{document:#}\n"), exit });
    }
    let mut text = format!("{name} served on {} ({} GiB)\n\n", gpu.name, gib(memory));
    text += &budgets.iter().map(budget_text).collect::<String>();
    for (engine, estimate) in &estimates {
        text += &buffers_text(engine, estimate, device(estimate), memory);
    }
    Ok(Answer { text, exit })
}

fn budget_text(budget: &Budget) -> String {
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
        text += &format!(
            "{} tokens in {} blocks of {}; {concurrency:.2} sequences of full length at once; the longest that fits: {}\n",
            grouped(budget.cache_tokens),
            grouped(budget.blocks),
            budget.block_size,
            grouped(budget.largest_sequence),
        );
    }
    for note in &budget.notes {
        text += &format!("note: {note}\n");
    }
    text + "\n"
}

fn buffers_text(engine: &str, estimate: &LlamaCppEstimate, device: u64, memory: u64) -> String {
    let mut table = Table::new(&[engine, "model GiB", "cache", "compute", "output"]);
    let row = |name: String, b: &vramcast_core::serving::llama_cpp::Buffers| {
        vec![name, gib(b.model), gib(b.cache), gib(b.compute), gib(b.output)]
    };
    for (index, buffers) in estimate.devices.iter().enumerate() {
        table.row(row(format!("card {index}"), buffers));
    }
    table.row(row("host".into(), &estimate.host));
    let verdict = if device <= memory { "fits" } else { "does not fit" };
    let mut text = format!("{table}{} GiB on the card with its context: {verdict}\n", gib(device));
    for note in &estimate.notes {
        text += &format!("note: {note}\n");
    }
    text + "\n"
}
