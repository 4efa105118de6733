//! vLLM's second model runner (vllm/v1/worker/gpu): which models it runs, what it keeps, and its logits, which it neither
//! sorts nor copies while profiling.

use super::draft::{Apart, Draft};
use super::profile::{Batch, two};
use super::rules::{Rules, SecondRunner};
use crate::model::op::{CacheKind, CacheUpdate};
use crate::serving::model::ServedModel;
use crate::serving::tensors::ServedTensor;

/// Architectures with experts that had it first (`DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES` of v0.25.0 to v0.28.0).
const LISTED: [&str; 4] =
    ["DeepseekV2ForCausalLM", "GraniteMoeForCausalLM", "LongcatFlashNgramForCausalLM", "Qwen2MoeForCausalLM"];
/// And those without, before all of them had it (v0.24.0).
const EARLY: [&str; 3] = ["LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM"];

/// Whether a version runs a model with it, and with who guesses ahead.
pub(super) fn runs(model: &ServedModel, rules: &Rules, draft: Option<&Draft>) -> bool {
    let guesses = match draft.and_then(|draft| draft.apart) {
        None => true,
        Some(Apart::Model) => rules.second_drafts,
        Some(Apart::NGram) => rules.second_repeats,
    };
    guesses && takes(model, rules)
}

fn takes(model: &ServedModel, rules: &Rules) -> bool {
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

/// Elements of a token in the widest part of a layer run without compiling.
///
/// `padded` is the residual stream as its experts have it: where that is wider, what goes in, what comes out and its two sums are.
pub(super) fn layer(model: &ServedModel, ranks: u64, padded: u64) -> u64 {
    let ranks = ranks.max(1);
    let sums = if ranks > 1 { 4 } else { 2 };
    let experts = if padded > model.hidden { model.hidden.saturating_mul(2) + padded.saturating_mul(sums) } else { 0 };
    // What a layer adds is scaled before it is added.
    let scaled = if model.architecture == "GraniteMoeHybridForCausalLM" { model.hidden } else { 0 };
    // Gemma's norms in fp32: three of that, and five in 16 bits around them (`fused_add_rms_norm` of vllm/ir/ops/layernorm.py).
    let norms = if model.scaled_embedding && model.post_norms { model.hidden.saturating_mul(11) } else { 0 };
    let states = first_mamba(model, ranks).max(second_mamba(model, ranks));
    feed_forward(model, ranks).max(attention(model, ranks)).max(states).max(norms).max(experts).saturating_add(scaled)
}

/// The residual, what the layer was given and what attention made of it; the two halves and their product; what comes out, and
/// its sum over cards.
fn feed_forward(model: &ServedModel, ranks: u64) -> u64 {
    let width = model.width / ranks;
    let around = model.hidden.saturating_mul(3);
    let out = model.hidden.saturating_mul(4 + u64::from(ranks > 1));
    let named = |part: &str| model.tensors.iter().any(|tensor| tensor.name.contains(part));
    let gated = ["gate_proj", "gate_up_proj", ".w3.", "shared_mlp.input_linear"].into_iter().any(named);
    match model.architecture.as_str() {
        // Two polynomials side by side, their parts, and which of them holds in a byte (`_xielu_python` of activation.py).
        "ApertusForCausalLM" => around.saturating_add(width.saturating_mul(11) / 2),
        // Both halves, what an adapter adds to them, and the sum (`Zamba2MLP`).
        "Zamba2ForCausalLM" => around.saturating_add(width.saturating_mul(6)),
        // Run by transformers' own class: x, its half, its cube and that scaled (`NewGELUActivation`), attention beside it.
        "PhiForCausalLM" => model.hidden.saturating_mul(4).saturating_add(width.saturating_mul(4)),
        _ if !gated => around.saturating_add(width.saturating_mul(2)).max(out.saturating_add(width)),
        name if LETS_GO.contains(&name) => {
            around.saturating_add(width.saturating_mul(3)).max(out.saturating_add(width))
        }
        _ => out.saturating_add(width.saturating_mul(3)),
    }
}

/// The residual, what the layer was given, queries with keys and values, their norms where there are some, what attention makes
/// of them and its projection (`OlmoeAttention` of vllm's olmoe.py).
fn attention(model: &ServedModel, ranks: u64) -> u64 {
    let latent = |cache: &CacheUpdate| matches!(cache.kind, CacheKind::Latent { .. });
    if model.layers.iter().flat_map(|layer| &layer.caches).any(latent) {
        return 0;
    }
    let queries = (model.heads / ranks).max(1).saturating_mul(model.head_dim);
    let keys = (model.kv_heads / ranks).max(1).saturating_mul(model.head_dim);
    let normed = model.tensors.iter().any(|tensor| tensor.name.contains(".q_norm."));
    let norms = if normed { queries.saturating_add(keys) } else { 0 };
    let projected = model.hidden.saturating_mul(3 + u64::from(ranks > 1));
    let joined = queries.saturating_add(keys.saturating_mul(2));
    projected.saturating_add(joined).saturating_add(norms).saturating_add(queries)
}

/// Mamba 1: the residual, its norm, the output that was made before and what is copied there; both halves of the projection in,
/// and one of them convolved (`MambaMixer.forward_impl` of mamba_mixer.py).
fn first_mamba(model: &ServedModel, ranks: u64) -> u64 {
    let of = |tensor: &&ServedTensor| tensor.layer.is_some() && tensor.name.contains(".x_proj.");
    let inner = model.tensors.iter().find(of).and_then(|tensor| tensor.shape.get(1)).copied().unwrap_or(0);
    if inner == 0 { 0 } else { model.hidden.saturating_mul(4).saturating_add(inner.saturating_mul(3) / ranks) }
}

/// Mamba 2: the residual and its norm, the projection in, what the states give, and its gated norm, which is made in fp32 unless
/// one card holds one group (`Mixer2RMSNormGated` of mamba_mixer2.py).
fn second_mamba(model: &ServedModel, ranks: u64) -> u64 {
    if !model.has_second_mamba() {
        return 0;
    }
    let rows = |module: &str, side: usize| {
        let own = model.tensors.iter().find(|tensor| tensor.layer.is_some() && tensor.module() == module);
        own.and_then(|tensor| tensor.shape.get(side)).copied().unwrap_or(0) / ranks
    };
    let (projected, inner) = (rows("in_proj", 0), rows("out_proj", 1));
    let norm = if model.state_groups == 1 && ranks == 1 { inner } else { inner.saturating_mul(4) };
    model.hidden.saturating_mul(2).saturating_add(projected).saturating_add(inner).saturating_add(norm)
}
