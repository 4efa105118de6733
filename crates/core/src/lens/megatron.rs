//! Megatron-LM's theoretical memory report.
//!
//! Source: Megatron-LM at d98e8a64, megatron/training/theoretical_memory_usage.py. It assumes bf16 training with fp32
//! gradients, masters and Adam states: 18 bytes per parameter, or 6 + 12/dp with the distributed optimizer. Multi-latent
//! attention, multi-token prediction and hybrid models are not read.

use super::{Estimate, Facts, Method, Purpose, Question, Silent, silent};

/// Parameters of the most loaded shard: what tensor parallel divides, what every rank has, and routed experts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shard {
    /// Attention, dense MLPs and embeddings.
    pub dense: f64,
    /// Norms and routers.
    pub replicated: f64,
    /// Routed experts.
    pub experts: f64,
}

/// The most loaded pipeline stage: its share of the layers and an embedding (both, where there is one stage).
pub fn most_loaded_shard(facts: &Facts, question: &Question) -> Shard {
    let (tp, pp) = (question.tp.max(1) as f64, question.pp.max(1) as f64);
    let (hidden, layers) = (facts.hidden as f64, facts.layers as f64);
    let norm = if facts.biased_norms { 2.0 } else { 1.0 };
    let gate = if facts.gated { 1.5 } else { 1.0 };
    let queries = facts.head_dim as f64 * facts.heads as f64 / hidden;
    let attention = 2.0 * hidden * hidden * (1.0 + facts.kv_heads as f64 / facts.heads.max(1) as f64) * queries;
    let mlp = |width: u64| 2.0 * hidden * width as f64 * gate;
    let (dense_mlp, router, experts) = match facts.experts {
        None => (mlp(facts.intermediate), 0.0, 0.0),
        Some(experts) => (0.0, hidden * experts.count as f64, mlp(experts.width) * experts.count as f64),
    };
    let embedding = hidden * facts.vocab as f64;
    let copies = if !facts.tied && question.pp <= 1 { 2.0 } else { 1.0 };
    Shard {
        dense: ((attention + dense_mlp) * layers / pp + embedding * copies) / tp,
        replicated: ((2.0 * hidden * norm + router) * layers + norm * hidden) / pp,
        experts: experts * layers / pp / question.ep.max(1) as f64,
    }
}

/// Weights, gradients, masters and states.
pub fn weights_and_optimizer(facts: &Facts, question: &Question) -> f64 {
    let per_parameter = |copies: f64| if question.distributed_optimizer { 6.0 + 12.0 / copies } else { 18.0 };
    let shard = most_loaded_shard(facts, question);
    let world = question.cards().max(1) as f64;
    let expert_copies = (world / (question.ep.max(1) * question.pp.max(1)) as f64).floor().max(1.0);
    (shard.dense + shard.replicated) * per_parameter(question.dp.max(1) as f64)
        + shard.experts * per_parameter(expert_copies)
}

/// Activations of the first stage: with sequence parallel and selective recomputation 18 + 4 f/h per hidden element and
/// layer, without them 10 + 24/t and five percent on top.
pub fn activations(facts: &Facts, question: &Question, selective: bool) -> f64 {
    let (tp, pp) = (question.tp.max(1) as f64, question.pp.max(1) as f64);
    let tokens = question.seq as f64 * question.batch as f64;
    let (hidden, vocab) = (facts.hidden as f64, facts.vocab as f64);
    let split = question.sequence_parallel && selective;
    let per_element = if split { 18.0 + 4.0 * facts.intermediate as f64 / hidden } else { 10.0 + 24.0 / tp };
    let mut bytes = tokens * hidden * per_element * facts.layers as f64;
    bytes += 8.0 * tokens * pp + tokens * hidden * pp;
    if question.pp <= 1 {
        bytes += if split {
            tokens * hidden * 4.0 * (1.0 + vocab / hidden)
        } else {
            (tokens * vocab / tp + tokens * hidden) * 2.0
        };
    }
    if split { bytes / tp } else { bytes * 1.05 }
}

/// The run in this lens.
pub fn estimate(facts: &Facts, question: &Question) -> Result<Estimate, Silent> {
    if question.purpose == Purpose::Infer {
        return silent("is about training");
    }
    if question.adapter.is_some() {
        return silent("knows no adapters");
    }
    let terms = vec![
        ("weights and optimizer", weights_and_optimizer(facts, question)),
        ("activations", activations(facts, question, question.checkpointing)),
    ];
    Ok(Estimate::new(Method::Megatron, terms)
        .note("bf16 with fp32 gradients, masters and Adam states, whatever the plan says"))
}

#[cfg(test)]
mod tests {
    use super::super::Experts;
    use super::*;

    const MIB: f64 = (1u64 << 20) as f64;

    fn llama(hidden: u64, layers: u64, heads: u64, kv_heads: u64, intermediate: u64, vocab: u64) -> Facts {
        Facts {
            kv_heads,
            intermediate,
            gated: true,
            biased_norms: false,
            ..Facts::of_sizes(0, layers, hidden, heads, vocab)
        }
    }

    fn report(facts: &Facts, question: &Question, selective: bool) -> [String; 2] {
        [weights_and_optimizer(facts, question), activations(facts, question, selective)]
            .map(|bytes| format!("{:.2}", bytes / MIB))
    }

    /// theoretical_memory_usage.py run as it stands on these arguments.
    #[test]
    fn reports_as_megatron_prints_them() {
        let llama3_8b = llama(4096, 32, 32, 8, 14_336, 128_256);
        let distributed = Question { seq: 8192, dp: 8, distributed_optimizer: true, ..Question::default() };
        assert_eq!(report(&llama3_8b, &distributed, false), ["57436.90", "38761.87"]);
        let llama2_7b = llama(4096, 32, 32, 32, 11_008, 32_000);
        let one = Question { seq: 4096, sequence_parallel: true, ..Question::default() };
        assert_eq!(report(&llama2_7b, &one, true), ["115672.57", "15300.03"]);
        let gpt3 = Facts { tied: true, ..Facts::of_sizes(0, 96, 12_288, 96, 51_200) };
        let split =
            Question { tp: 8, pp: 8, sequence_parallel: true, distributed_optimizer: true, ..Question::default() };
        assert_eq!(report(&gpt3, &split, true), ["48016.18", "9816.02"]);
        let deep = Facts { tied: true, ..llama(8192, 80, 64, 8, 26_624, 32_256) };
        let staged = Question { seq: 8192, tp: 4, pp: 8, ..Question::default() };
        assert_eq!(report(&deep, &staged, false), ["35696.83", "86554.12"]);
        let mixtral =
            Facts { experts: Some(Experts { count: 8, width: 14_336 }), ..llama(4096, 32, 32, 8, 14_336, 32_000) };
        let experts = Question { seq: 4096, dp: 8, ep: 8, distributed_optimizer: true, ..Question::default() };
        assert_eq!(report(&mixtral, &experts, false), ["108252.40", "18591.33"]);
    }
}
