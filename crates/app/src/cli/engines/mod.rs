//! `vramcast infer --engine …`: what a serving engine would do with a model on a card.

mod options;
mod solve;
mod text;

pub(crate) use options::EngineArguments;
pub(super) use options::known_by_letters;
pub(super) use solve::{Need, Wanted, engine as solve_engine, generate as solve_generate};

use clap::ValueEnum;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};
use vramcast_core::model::Model;
use vramcast_core::plan::{Gpu, ModelSizes};
use vramcast_core::serving::llama_cpp::{self, LlamaCppEstimate, LlamaCppPlan, ollama};
use vramcast_core::serving::sglang::SglangPlan;
use vramcast_core::serving::tensorrt_llm::TensorRtLlmPlan;
use vramcast_core::serving::tgi::TgiPlan;
use vramcast_core::serving::vllm::{Draft, Speculation, VllmPlan};
use vramcast_core::serving::{Budget, ServedModel};

use super::{Answer, Failure};
use crate::estimate::source::Reach;
use crate::exit::Exit;

/// Who serves.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum EngineName {
    /// Simulated: transformers' `generate`.
    #[default]
    Hf,
    /// By its budget rules: a profile run, the rest is blocks.
    Vllm,
    /// By its budget rules: a static share for weights and cache.
    Sglang,
    /// By its budget rules: a warm-up, nearly all that is free becomes blocks.
    Tgi,
    /// By its budget rules: a share of what is free becomes blocks.
    TensorrtLlm,
    /// By its buffers, device by device.
    #[value(name = "llama.cpp", alias = "llama-cpp")]
    #[serde(rename = "llama.cpp", alias = "llama-cpp")]
    LlamaCpp,
    /// By llama.cpp's buffers, with Ollama's context and cache.
    Ollama,
    /// All of them but `hf`, side by side.
    All,
}

impl EngineName {
    /// What people call it.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Hf => "transformers (hf)",
            Self::Vllm => "vLLM",
            Self::Sglang => "SGLang",
            Self::Tgi => "TGI",
            Self::TensorrtLlm => "TensorRT-LLM",
            Self::LlamaCpp => "llama.cpp",
            Self::Ollama => "Ollama",
            Self::All => "all engines",
        }
    }
}

/// What was asked, for which model.
#[derive(Clone, Copy)]
pub(crate) struct Request<'a> {
    pub(crate) engine: EngineName,
    pub(crate) name: &'a str,
    pub(crate) model: &'a Model,
    pub(crate) arguments: &'a EngineArguments,
    /// How far the name of a draft model may reach.
    pub(crate) reach: Reach,
}

/// What the engines said about one card.
pub(crate) struct Served {
    budgets: Vec<Budget>,
    estimates: Vec<(&'static str, LlamaCppEstimate)>,
    memory: u64,
    /// What a process of llama.cpp holds beside its buffers.
    context: u64,
}

impl Served {
    /// The fullest card of an estimate, with its context.
    fn fullest(&self, estimate: &LlamaCppEstimate) -> u64 {
        estimate.devices.iter().map(|buffers| buffers.total()).max().unwrap_or(0).saturating_add(self.context)
    }

    /// Whether one sequence of full length fits everywhere.
    pub(crate) fn fits(&self) -> bool {
        self.budgets.iter().all(|budget| budget.fits)
            && self.estimates.iter().all(|(_, estimate)| self.fullest(estimate) <= self.memory)
    }
}

impl Served {
    /// The document of `--json`.
    pub(crate) fn document(&self, name: &str, gpu: &Gpu) -> Value {
        let buffer = |(engine, estimate): &(&str, LlamaCppEstimate)| json!({"engine": engine, "estimate": estimate});
        let buffers: Vec<Value> = self.estimates.iter().map(buffer).collect();
        let budgets = &self.budgets;
        json!({
            "schema": 1, "model": name, "gpu": gpu.name, "memory": gpu.memory, "budgets": budgets, "buffers": buffers,
        })
    }
}

impl Request<'_> {
    /// Refuses what no engine would start with.
    fn check(&self) -> Result<(), Failure> {
        let arguments = self.arguments;
        let counts = [
            ("--context", arguments.context),
            ("--max-num-seqs", arguments.max_num_seqs),
            ("--max-num-batched-tokens", arguments.max_num_batched_tokens),
        ];
        if let Some((flag, _)) = counts.iter().find(|(_, count)| *count == Some(0)) {
            return Err(Failure::bad_input(format!("{flag}: 0 is not at least 1")));
        }
        let heads = ModelSizes::of(self.model.config(), 0).heads;
        match (arguments.tensor_parallel_size, heads) {
            (Some(ranks), Some(heads)) if ranks > 0 && !heads.is_multiple_of(ranks) => {
                let divides = |count: &u64| heads.is_multiple_of(*count);
                let near: Vec<String> = [(1..=heads.min(ranks - 1)).rev().find(divides), (ranks..=heads).find(divides)]
                    .into_iter()
                    .flatten()
                    .map(|count| count.to_string())
                    .collect();
                Err(Failure::bad_input(format!(
                    "--tensor-parallel-size: {ranks} does not divide the {heads} attention heads"
                ))
                .hint(format!("the nearest that do: {}", near.join(", "))))
            }
            _ => Ok(()),
        }
    }

    /// Asks the engines about a card.
    pub(crate) fn serve(&self, gpu: &Gpu) -> Result<Served, Failure> {
        let arguments = self.arguments;
        let wanted = |one: EngineName| self.engine == one || self.engine == EngineName::All;
        let (memory, process, context) = (gpu.memory, gpu.context(), arguments.context);
        let mut budgets: Vec<Budget> = Vec::new();
        let pooled = [EngineName::Vllm, EngineName::Sglang, EngineName::Tgi, EngineName::TensorrtLlm];
        if pooled.into_iter().any(wanted) {
            let format = arguments.format(EngineName::Vllm, self.model)?;
            let served = ServedModel::of(self.model, &format)?;
            let cache_dtype = arguments.cache_dtype(&format)?;
            let ranks = arguments.tensor_parallel_size.unwrap_or(1).max(1);
            if wanted(EngineName::Vllm) {
                let plan = arguments.vllm(gpu, cache_dtype)?;
                let draft = self.draft(&served, &plan)?;
                let mut budget = plan.budget_with(&served, draft.as_ref());
                budget.notes.extend(arguments.without_effect_on_vllm(&plan, &served)?);
                budgets.push(budget);
            }
            if wanted(EngineName::Sglang) {
                let static_thousandths = arguments.static_share()?.filter(|_| self.engine == EngineName::Sglang);
                let default = SglangPlan::default();
                let plan = SglangPlan {
                    memory,
                    process,
                    context,
                    cache_dtype,
                    tensor_parallel: ranks,
                    static_thousandths,
                    ..default
                };
                budgets.push(plan.budget(&served));
            }
            if wanted(EngineName::Tgi) {
                let default = TgiPlan::default();
                let plan =
                    TgiPlan { memory, process, max_total_tokens: context, cache_dtype, shards: ranks, ..default };
                budgets.push(plan.budget(&served));
            }
            if wanted(EngineName::TensorrtLlm) {
                let default = TensorRtLlmPlan::default();
                let plan = TensorRtLlmPlan {
                    memory,
                    process,
                    max_seq_len: context,
                    cache_dtype,
                    tensor_parallel: ranks,
                    ..default
                };
                budgets.push(plan.budget(&served));
            }
        }
        let mut estimates: Vec<(&'static str, LlamaCppEstimate)> = Vec::new();
        let refuse = |e: vramcast_core::serving::llama_cpp::LlamaCppError| Failure::bad_input(e.to_string());
        if wanted(EngineName::LlamaCpp) || wanted(EngineName::Ollama) {
            let one = if self.engine == EngineName::All { EngineName::Vllm } else { EngineName::LlamaCpp };
            let served = ServedModel::of(self.model, &arguments.format(one, self.model)?)?;
            if wanted(EngineName::LlamaCpp) {
                let mut plan = arguments.llama_cpp(LlamaCppPlan::default())?;
                plan.parallel = arguments.parallel.unwrap_or(plan.parallel);
                plan.context = context.unwrap_or(plan.context);
                estimates.push(("llama.cpp", plan.estimate(&served).map_err(refuse)?));
            }
            if wanted(EngineName::Ollama) {
                let plan = arguments.llama_cpp(ollama(&served, memory, context, arguments.parallel))?;
                estimates.push(("Ollama", plan.estimate(&served).map_err(refuse)?));
            }
        }
        Ok(Served { budgets, estimates, memory, context: llama_cpp::context(gpu) })
    }

    /// What guessing ahead takes.
    fn draft(&self, served: &ServedModel, plan: &VllmPlan) -> Result<Option<Draft>, Failure> {
        let Some(text) = &self.arguments.speculative_model else { return Ok(None) };
        let of = |speculation| Ok(Some(Draft::of(speculation, served, plan)));
        match (text.as_str(), text.parse::<u64>()) {
            (_, Ok(layers)) => return of(Speculation::Layers(layers)),
            ("mtp", _) => return of(Speculation::MultiToken),
            ("eagle", _) => return of(Speculation::Eagle),
            ("ngram", _) => return of(Speculation::NGram),
            _ => {}
        }
        let found = self.reach.find(text, None, false)?;
        let model = found.require_model()?;
        let format = vramcast_core::serving::WeightFormat::of(model).map_err(|e| Failure::bad_input(e.to_string()))?;
        let draft = ServedModel::of(model, &format)?;
        of(Speculation::Model(&draft))
    }
}

/// The answer of one engine or of all.
pub(super) fn run(request: &Request<'_>, gpu: &Gpu, table: bool, as_json: bool) -> Result<Answer, Failure> {
    if table {
        return text::table(request, gpu, as_json);
    }
    request.check()?;
    let served = request.serve(gpu)?;
    let exit = if served.fits() { Exit::Success } else { Exit::No };
    Ok(if as_json {
        Answer::document(served.document(request.name, gpu), exit)
    } else {
        Answer::text(text::all(request.name, gpu, &served), exit)
    })
}
