//! Bytes per parameter by training engine: DDP, ZeRO 1 to 3, Megatron-LM, both together, FSDP.
//!
//! Source: README of "GPU Memory Calculator for LLM Training" (gpu-mem-calc), "Memory Formulas", and the DeepSpeed memory
//! page it refers to. The document gives the base components and ZeRO-3 in full; how each engine splits the components
//! is said in words ("Shard optimizer states", …), and activations "depend on batch size, sequence length, and model
//! architecture" without a formula: here they are those of Korthikanti et al. (arXiv 2205.05198), table 2.

use super::{EngineKind, Estimate, Facts, Method, Purpose, Question, Silent, korthikanti, silent};
use crate::plan::OptimizerKind;

/// "Optimizer States: num_params × 8 (for Adam/AdamW)"; others by their number of fp32 states.
fn optimizer_bytes(kind: OptimizerKind) -> Option<f64> {
    use OptimizerKind as K;
    Some(match kind {
        K::Adam | K::AdamW | K::Nadam | K::Lamb => 8.0,
        K::Sgd => 0.0,
        K::SgdMomentum | K::Nesterov | K::Lion | K::Adagrad | K::Rmsprop => 4.0,
        K::AdamW8bit | K::Adam8bit => 2.0,
        _ => return None,
    })
}

/// "Example - DeepSpeed ZeRO-3": 4 × largest layer + 18 × parameters / cards.
pub fn zero3(parameters: f64, largest_layer: f64, cards: f64) -> (f64, f64) {
    (4.0 * largest_layer, 18.0 * parameters / cards)
}

/// The run in this lens.
pub fn estimate(facts: &Facts, question: &Question) -> Result<Estimate, Silent> {
    if question.purpose == Purpose::Infer {
        return silent("is about training");
    }
    if question.adapter.is_some() {
        return silent("knows no adapters");
    }
    let Some(states) = optimizer_bytes(question.optimizer) else { return silent("does not list this optimizer") };
    let model_parallel = match question.engine {
        EngineKind::Megatron | EngineKind::MegatronDeepspeed => (question.tp * question.pp).max(1) as f64,
        _ => 1.0,
    };
    let parameters = facts.parameters as f64 / model_parallel;
    let cards = question.dp.max(1) as f64;
    let (weights, gradients) = (parameters * question.weight_bytes, parameters * question.weight_bytes);
    let states = parameters * states;
    let kept = |offloaded: bool, bytes: f64| if offloaded { 0.0 } else { bytes };
    let sharded_states = |bytes: f64| kept(question.offload_optimizer, bytes);
    let mut terms = match (question.engine, question.zero) {
        (EngineKind::Deepspeed | EngineKind::Fsdp, 3) => {
            let (gathered, shard) = zero3(parameters, facts.largest_module as f64, cards);
            // 18 = 2 (weights) + 16 (gradients, masters, states); offload takes its part to the host.
            let shard = match (question.offload_parameters, question.offload_optimizer) {
                (true, true) => 0.0,
                (false, true) => shard * 2.0 / 18.0,
                _ => shard,
            };
            vec![("largest layer, gathered", gathered), ("shard of weights, gradients and states", shard)]
        }
        (EngineKind::Deepspeed | EngineKind::Fsdp | EngineKind::MegatronDeepspeed, 2 | 3) => vec![
            ("parameters", weights),
            ("gradients", gradients / cards),
            ("optimizer states", sharded_states(states / cards)),
        ],
        (EngineKind::Deepspeed | EngineKind::MegatronDeepspeed, 1) => vec![
            ("parameters", weights),
            ("gradients", gradients),
            ("optimizer states", sharded_states(states / cards)),
        ],
        _ => vec![("parameters", weights), ("gradients", gradients), ("optimizer states", sharded_states(states))],
    };
    terms.push(("activations", activations(facts, question)));
    Ok(Estimate::new(Method::Engines, terms))
}

/// Table 2 of Korthikanti et al.: everything, split by tensor (and sequence) parallel; or the layers' inputs and one
/// layer at work where layers are recomputed.
fn activations(facts: &Facts, question: &Question) -> f64 {
    let size = question.seq as f64 * question.batch as f64 * facts.hidden as f64;
    let tp = question.tp.max(1) as f64;
    let scores = if question.flash {
        0.0
    } else {
        korthikanti::SCORES * facts.heads as f64 * question.seq as f64 / facts.hidden.max(1) as f64
    };
    let layer = match (question.sequence_parallel, question.tp) {
        (true, _) => size * (korthikanti::LAYER + scores) / tp,
        (false, _) => size * (10.0 + (korthikanti::LAYER - 10.0 + scores) / tp),
    };
    if question.checkpointing {
        let input = if question.sequence_parallel { 2.0 * size / tp } else { 2.0 * size };
        return input * facts.layers as f64 + layer;
    }
    // The first of pp stages holds pp micro-batches of its L / pp layers: L layers' worth.
    layer * facts.layers as f64
}

#[cfg(test)]
mod tests {
    use super::super::GIB;
    use super::*;

    fn llama2_7b() -> Facts {
        Facts { largest_module: 131_072_000, ..Facts::of_sizes(7_000_000_000, 32, 4096, 32, 32_000) }
    }

    /// README, "Example - DeepSpeed ZeRO-3", on its 7B example over 8 cards.
    #[test]
    fn zero_3_is_the_documents_formula() {
        let question = Question { engine: EngineKind::Deepspeed, zero: 3, dp: 8, ..Question::default() };
        let estimate = estimate(&llama2_7b(), &question).unwrap();
        assert_eq!(estimate.terms[0].bytes, 4.0 * 131_072_000.0);
        assert_eq!(estimate.terms[1].bytes, 18.0 * 7e9 / 8.0);
        let without_activations = (estimate.terms[0].bytes + estimate.terms[1].bytes) / GIB;
        assert_eq!(format!("{without_activations:.2}"), "15.16");
    }

    /// README, "Base Components": 2 + 2 + 8 bytes per parameter in bf16 with Adam.
    #[test]
    fn ddp_is_the_sum_of_base_components() {
        let estimate = estimate(&llama2_7b(), &Question::default()).unwrap();
        let states: f64 = estimate.terms.iter().take(3).map(|term| term.bytes).sum();
        assert_eq!(states, 12.0 * 7e9);
    }

    /// README, "Supported Training Engines": every stage shards one component more.
    #[test]
    fn stages_shard_more_and_more() {
        let total = |zero: u8, offload_optimizer: bool| {
            let question =
                Question { engine: EngineKind::Deepspeed, zero, dp: 8, offload_optimizer, ..Question::default() };
            estimate(&llama2_7b(), &question).unwrap().total()
        };
        assert_eq!(total(0, false) - total(1, false), 8.0 * 7e9 * 7.0 / 8.0);
        assert_eq!(total(1, false) - total(2, false), 2.0 * 7e9 * 7.0 / 8.0);
        assert!(total(2, true) < total(2, false));
    }
}
