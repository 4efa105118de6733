//! Factors on the weights: × 1.2 to infer, × 4 × 1.3 to train with Adam.
//!
//! Source: README of "Model VRAM Calculator" (vram_calculator.py). It counts parameters itself, as a GPT of 12 h² per
//! layer with two embeddings and one vector per norm, so its counts differ from the models' own.

use super::{Estimate, Facts, Method, Purpose, Question, Silent, silent};

/// Inference: "Model Weights × 1.2".
pub const INFERENCE: f64 = 1.2;
/// Training: weights, gradients and Adam's two states, "× 4 × 1.3".
pub const TRAINING: f64 = 4.0 * 1.3;
/// "Based on typical configurations (25% target modules)".
const TARGETED: f64 = 0.25;

/// Its count of parameters: 12 L h² + 2 V h + (2 L + 1) h.
pub fn parameters(layers: u64, hidden: u64, vocab: u64) -> f64 {
    let (layers, hidden, vocab) = (layers as f64, hidden as f64, vocab as f64);
    12.0 * layers * hidden * hidden + 2.0 * vocab * hidden + (2.0 * layers + 1.0) * hidden
}

/// The four columns of its table, in bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Row {
    /// The weights.
    pub total: f64,
    /// Inference.
    pub inference: f64,
    /// Training with Adam.
    pub training: f64,
    /// LoRA.
    pub lora: f64,
}

/// One row of its table, for weights of so many bytes.
pub fn row(facts: &Facts, bytes_per_parameter: f64, rank: u64) -> Row {
    let total = parameters(facts.layers, facts.hidden, facts.vocab) * bytes_per_parameter;
    Row {
        total,
        inference: total * INFERENCE,
        training: total * TRAINING,
        lora: (total + lora_overhead(facts, rank)) * INFERENCE,
    }
}

/// "LoRA parameter overhead calculated based on rank and target module ratio". The document prints no formula; its five
/// LoRA figures leave between 26.7 and 29.0 MB of it, the same for every dtype. Adapters in fp32 on a quarter of all
/// linears of a layer (attention 8 h, MLP 10 h) are 28.3 MB and give all five.
fn lora_overhead(facts: &Facts, rank: u64) -> f64 {
    18.0 * facts.hidden as f64 * rank as f64 * facts.layers as f64 * TARGETED * 4.0
}

/// The run in this lens; a model split over cards is divided evenly, a data-parallel copy is whole.
pub fn estimate(facts: &Facts, question: &Question) -> Result<Estimate, Silent> {
    let rank = question.adapter.as_ref().map_or(0, |adapter| adapter.rank);
    if question.adapter.as_ref().is_some_and(|adapter| adapter.four_bit) {
        return silent("has no figure for QLoRA");
    }
    let row = row(facts, question.weight_bytes, rank);
    let split = (question.tp as f64 * question.pp as f64).max(1.0);
    let terms = match question.purpose {
        Purpose::Infer => vec![("weights", row.total), ("KV cache and the rest (20 %)", row.inference - row.total)],
        Purpose::Train if question.adapter.is_some() => {
            let adapters = lora_overhead(facts, rank);
            vec![("weights", row.total), ("adapters", adapters), ("overhead (20 %)", row.lora - row.total - adapters)]
        }
        Purpose::Train => vec![
            ("weights", row.total),
            ("gradients", row.total),
            ("Adam's states", row.total * 2.0),
            ("activations and the rest (30 %)", row.training - row.total * 4.0),
        ],
    };
    let terms = terms.into_iter().map(|(name, bytes)| (name, bytes / split)).collect();
    Ok(Estimate::new(Method::RuleOfThumb, terms).note("batch, sequence and optimizer do not enter"))
}

#[cfg(test)]
mod tests {
    use super::super::GIB;
    use super::*;

    /// README, "Example Output": microsoft/DialoGPT-medium, LoRA rank 64.
    #[test]
    fn dialogpt_medium_as_printed() {
        assert_eq!(parameters(24, 1024, 50_257), 404_966_400.0);
        let facts = Facts::of_sizes(354_823_168, 24, 1024, 16, 50_257);
        let printed = [
            (4.0, ["1.51", "1.81", "7.84", "1.84"]),
            (2.0, ["0.75", "0.91", "3.92", "0.94"]),
            (1.0, ["0.38", "0.45", "1.96", "0.48"]),
            (0.5, ["0.19", "0.23", "0.98", "0.26"]),
        ];
        for (bytes, figures) in printed {
            let row = row(&facts, bytes, 64);
            let ours = [row.total, row.inference, row.training, row.lora].map(|bytes| format!("{:.2}", bytes / GIB));
            assert_eq!(ours, figures, "{bytes} bytes");
        }
    }

    /// README, "Parallelization Strategies (BF16 Inference)".
    #[test]
    fn splits_as_printed() {
        let facts = Facts::of_sizes(354_823_168, 24, 1024, 16, 50_257);
        let printed = [(1, 1, "0.91"), (2, 1, "0.45"), (4, 1, "0.23"), (8, 1, "0.11"), (2, 2, "0.23"), (4, 4, "0.06")];
        for (tp, pp, figure) in printed {
            let question = Question { purpose: Purpose::Infer, tp, pp, ..Question::default() };
            assert_eq!(format!("{:.2}", estimate(&facts, &question).unwrap().total() / GIB), figure, "{tp} x {pp}");
        }
    }
}
