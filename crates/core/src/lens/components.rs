//! Weights, gradients, optimizer states, activations, embeddings and input, each by one multiplier.
//!
//! Source: README of "GPU Memory Calculator" (gpu_memory_calculator.py), sections "Memory Calculation Formulas" and
//! "Available Optimizers". Embeddings are counted a second time beside the weights, as the document does.

use super::{Estimate, Facts, GIB, Method, Purpose, Question, Silent, silent};
use crate::plan::OptimizerKind;

/// "Reduces activation memory by ~70%".
const CHECKPOINTING: f64 = 0.3;
/// "~10% of training activations".
const INFERENCE_ACTIVATIONS: f64 = 0.1;

/// Cards of its last three lines: name and GB.
pub const CARDS: [(&str, f64); 3] = [("A100 80GB", 80.0), ("H100 80GB", 80.0), ("A100 40GB", 40.0)];

/// States of an optimizer in multiples of the weights.
pub fn optimizer_multiplier(kind: OptimizerKind) -> Option<f64> {
    use OptimizerKind as K;
    Some(match kind {
        K::Sgd => 0.0,
        K::SgdMomentum | K::Nesterov | K::Adagrad | K::Rmsprop | K::Lion => 1.0,
        K::Adam | K::AdamW | K::Lamb | K::Nadam | K::Amsgrad | K::SparseAdam | K::AdaBelief => 2.0,
        K::Adafactor => 0.5,
        // "Shampoo (>2×, varies)", "0× to 3× model size".
        K::Shampoo => 3.0,
        _ => return None,
    })
}

/// Hidden vectors kept per token and layer. The document names "attention activations (Q, K, V, output) and FFN
/// intermediate activations" without the number; 11.25 GB for phi-2 is 9: four of attention, the MLP's width (4 h) and
/// its output.
fn activation_multiplier(facts: &Facts) -> f64 {
    5.0 + facts.intermediate as f64 / facts.hidden.max(1) as f64
}

/// The run in this lens.
pub fn estimate(facts: &Facts, question: &Question) -> Result<Estimate, Silent> {
    if question.adapter.is_some() {
        return silent("knows no adapters");
    }
    let bytes = question.weight_bytes;
    let tokens = question.batch as f64 * question.seq as f64;
    let weights = facts.parameters as f64 * bytes;
    let per_layer = tokens * facts.hidden as f64 * facts.layers as f64 * bytes;
    let mut activations = per_layer * activation_multiplier(facts);
    let embeddings = facts.vocab as f64 * facts.hidden as f64 * bytes;
    let input = tokens * facts.hidden as f64 * bytes;
    let terms = match question.purpose {
        Purpose::Train => {
            let Some(states) = optimizer_multiplier(question.optimizer) else {
                return silent("does not list this optimizer");
            };
            if question.checkpointing {
                activations *= CHECKPOINTING;
            }
            vec![
                ("model weights", weights),
                ("gradients", weights),
                ("optimizer states", weights * states),
                ("activations", activations),
                ("embeddings", embeddings),
                ("input data", input),
            ]
        }
        Purpose::Infer => {
            let cache = if question.kv_cache { per_layer * 2.0 } else { 0.0 };
            vec![
                ("model weights", weights),
                ("KV cache", cache),
                ("embeddings", embeddings),
                ("input data", input),
                ("temp activations", activations * INFERENCE_ACTIVATIONS),
            ]
        }
    };
    Ok(Estimate::new(Method::Components, terms).note("one card; embeddings are counted twice"))
}

/// "Estimated GPUs needed": the total over each card's memory.
pub fn cards_needed(total: f64) -> [(&'static str, f64); 3] {
    CARDS.map(|(name, gb)| (name, total / GIB / gb))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn phi2() -> Facts {
        Facts::of_sizes(2_779_683_840, 32, 2560, 32, 51_200)
    }

    /// README, "Example Output": microsoft/phi-2, bf16, AdamW, batch 4, 2048 tokens.
    #[test]
    fn phi_2_as_printed() {
        let question = Question { batch: 4, seq: 2048, ..Question::default() };
        let estimate = estimate(&phi2(), &question).unwrap();
        let ours: Vec<String> = estimate.terms.iter().map(|term| format!("{:.2}", term.bytes / GIB)).collect();
        assert_eq!(ours, ["5.18", "5.18", "10.36", "11.25", "0.24", "0.04"]);
        assert_eq!(format!("{:.2}", estimate.total() / GIB), "32.24");
        let needed = cards_needed(estimate.total()).map(|(_, cards)| format!("{cards:.1}"));
        assert_eq!(needed, ["0.4", "0.4", "0.8"]);
    }

    /// README, "Notes": checkpointing reduces activations by ~70 %; inference keeps a tenth, and a cache.
    #[test]
    fn checkpointing_and_inference() {
        let question = Question { batch: 4, checkpointing: true, ..Question::default() };
        let kept = estimate(&phi2(), &question).unwrap().terms[3].bytes;
        assert!((kept / GIB - 3.375).abs() < 1e-9);
        let infer = Question { purpose: Purpose::Infer, ..Question::default() };
        let with = estimate(&phi2(), &infer).unwrap().total();
        let without = estimate(&phi2(), &Question { kv_cache: false, ..infer }).unwrap().total();
        assert_eq!(with - without, 2048.0 * 2560.0 * 32.0 * 2.0 * 2.0);
    }

    /// README, "Available Optimizers": all fifteen.
    #[test]
    fn optimizers_as_listed() {
        use OptimizerKind as K;
        let listed = [
            (K::Sgd, 0.0),
            (K::SgdMomentum, 1.0),
            (K::Nesterov, 1.0),
            (K::Adagrad, 1.0),
            (K::Rmsprop, 1.0),
            (K::Adam, 2.0),
            (K::AdamW, 2.0),
            (K::Adafactor, 0.5),
            (K::Lamb, 2.0),
            (K::Lion, 1.0),
            (K::Nadam, 2.0),
            (K::Amsgrad, 2.0),
            (K::SparseAdam, 2.0),
            (K::Shampoo, 3.0),
            (K::AdaBelief, 2.0),
        ];
        assert!(listed.iter().all(|(kind, times)| optimizer_multiplier(*kind) == Some(*times)));
        assert_eq!(optimizer_multiplier(K::AdamW8bit), None);
    }
}
