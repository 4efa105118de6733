//! vLLM's second model runner (vllm/v1/worker/gpu): which models it runs, what it keeps, and its logits, which it neither
//! sorts nor copies while profiling.

use super::profile::{Batch, two};
use super::rules::{Rules, SecondRunner};
use crate::serving::model::ServedModel;

/// Architectures with experts that had it first (`DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES` of v0.25.0 to v0.28.0).
const LISTED: [&str; 4] =
    ["DeepseekV2ForCausalLM", "GraniteMoeForCausalLM", "LongcatFlashNgramForCausalLM", "Qwen2MoeForCausalLM"];
/// And those without, before all of them had it (v0.24.0).
const EARLY: [&str; 3] = ["LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM"];

/// Whether a version runs a model with it.
pub(super) fn runs(model: &ServedModel, rules: &Rules) -> bool {
    let name = model.architecture.as_str();
    let experts = model.chosen_experts > 0;
    match rules.second_runner {
        SecondRunner::None => false,
        SecondRunner::Qwen3 => name == EARLY[2] && !model.tensors.iter().any(|tensor| tensor.quantised),
        SecondRunner::Listed => LISTED.contains(&name) || EARLY.contains(&name),
        SecondRunner::Plain => {
            let states = model.layers.iter().any(|layer| model.states(layer) != (0, 0));
            LISTED.contains(&name) || !(experts || states)
        }
        SecondRunner::All => true,
    }
}

/// Tensors that hold a place for every sequence (vllm/v1/worker/gpu/sample, v0.32.0): counts of every word, masks of words in
/// the prompt and of a grammar, allowed, biased, stop and bad words, words whose probability is wanted.
pub(super) fn states(model: &ServedModel, sequences: u64) -> Vec<u64> {
    if sequences == 0 {
        return Vec::new();
    }
    let mask = model.vocabulary.div_ceil(32);
    let rows = [model.vocabulary, mask, mask, 1024, 1024, 1024, 128, 1024, 129, 128];
    rows.iter().map(|row| sequences.saturating_mul(row.saturating_mul(4))).collect()
}

/// The logits of all sequences beside the batch's last states.
pub(super) fn logits(model: &ServedModel, batch: Batch, ranks: u64) -> u64 {
    let rows = batch.sequences.min(batch.tokens);
    let whole = two(rows, model.vocabulary);
    // Parts of all cards are gathered, then put side by side.
    let gathered = if ranks > 1 { whole.saturating_add(whole / ranks) } else { 0 };
    let capped = if model.capped_logits { whole } else { 0 };
    let states = two(batch.tokens.saturating_add(rows), model.hidden);
    states.saturating_add(whole).saturating_add(gathered.max(capped))
}

/// Architectures whose feed-forward lets go of its two halves before the second product (`LlamaMLP` of vllm, and those who
/// share it); the others hold them by name until it is done.
const LETS_GO: [&str; 7] = [
    "GlmForCausalLM",
    "Glm4ForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Phi3ForCausalLM",
    "SmolLM3ForCausalLM",
    "FalconH1ForCausalLM",
];

/// Elements of a token in a layer run without compiling: the residual, what the layer was given and what attention made of it;
/// the two halves and their product; what comes out, and its sum over cards.
pub(super) fn layer(model: &ServedModel, ranks: u64) -> u64 {
    let width = model.width / ranks.max(1);
    let out = model.hidden.saturating_mul(4 + u64::from(ranks > 1));
    let held = width.saturating_mul(3);
    if LETS_GO.contains(&model.architecture.as_str()) {
        return model.hidden.saturating_mul(3).saturating_add(held).max(out.saturating_add(width));
    }
    out.saturating_add(held)
}
