//! 34 + 5as/h bytes per hidden element and layer, over ZeRO's sixteen bytes per parameter.
//!
//! Source: README of LLMGPUMemEstimator; the activations are formula 1 of Korthikanti et al., "Reducing Activation
//! Recomputation in Large Transformer Models" (arXiv 2205.05198) with 4sbv for the logits, the states those of "ZeRO:
//! Memory Optimizations Toward Training Trillion Parameter Models" (arXiv 1910.02054), the buffer 2 bytes per parameter.

use super::{Estimate, Facts, Method, Purpose, Question, Silent, silent};

/// Bytes per hidden element of a layer without its attention scores.
pub const LAYER: f64 = 34.0;
/// Bytes per score.
pub const SCORES: f64 = 5.0;

/// Weights, gradients and Adam's fp32 copies and states (2 + 2 + 12), by ZeRO stage.
pub fn model_states(parameters: f64, zero: u8, cards: f64) -> f64 {
    parameters
        * match zero {
            0 => 16.0,
            1 => 4.0 + 12.0 / cards,
            2 => 2.0 + 14.0 / cards,
            _ => 16.0 / cards,
        }
}

/// sbhL (34 + 5as/h) + 4sbv, divided by tensor parallel.
pub fn activations(facts: &Facts, batch: u64, seq: u64, tensor_parallel: u64) -> f64 {
    let (s, b, h) = (seq as f64, batch as f64, facts.hidden as f64);
    let layer = s * b * h * (LAYER + SCORES * facts.heads as f64 * s / h);
    (layer * facts.layers as f64 + 4.0 * s * b * facts.vocab as f64) / tensor_parallel.max(1) as f64
}

/// The run in this lens.
pub fn estimate(facts: &Facts, question: &Question) -> Result<Estimate, Silent> {
    let parameters = facts.parameters as f64;
    if question.purpose == Purpose::Infer {
        let weights = vec![("weights", parameters * question.weight_bytes)];
        return Ok(Estimate::new(Method::Korthikanti, weights).note("weights only"));
    }
    if question.adapter.is_some() {
        return silent("knows no adapters");
    }
    let estimate = Estimate::new(
        Method::Korthikanti,
        vec![
            ("model states", model_states(parameters, question.zero, question.dp.max(1) as f64)),
            ("activations", activations(facts, question.batch, question.seq, question.tp)),
            ("buffers", 2.0 * parameters),
        ],
    );
    Ok(estimate.note("16-bit weights, fp32 Adam, eager attention with dropout, nothing recomputed"))
}

#[cfg(test)]
mod tests {
    use super::super::GIB;
    use super::*;

    fn figures(facts: &Facts, question: &Question) -> [f64; 4] {
        let estimate = estimate(facts, question).unwrap();
        let parts: Vec<f64> = estimate.terms.iter().map(|term| term.bytes / GIB).collect();
        [estimate.total() / GIB, parts[0], parts[1], parts[2]]
    }

    /// README, "Usage": every figure in its comments, to the last digit.
    #[test]
    fn the_readme_to_the_last_digit() {
        let seven = Facts::of_sizes(7_000_000_000, 32, 4096, 32, 32_000);
        let half = Facts::of_sizes(500_000_000, 24, 1024, 16, 32_000);
        let ask = |zero: u8, dp: u64, seq: u64| Question { zero, dp, seq, ..Question::default() };
        assert_eq!(
            figures(&seven, &ask(0, 1, 512)),
            [120.7826795578003, 104.3081283569336, 3.43603515625, 13.0385160446167]
        );
        assert_eq!(
            figures(&seven, &ask(3, 4, 512)),
            [42.5515832901001, 26.0770320892334, 3.43603515625, 13.0385160446167]
        );
        assert_eq!(
            figures(&seven, &ask(3, 4, 2048)),
            [67.8596887588501, 26.0770320892334, 28.744140625, 13.0385160446167]
        );
        assert_eq!(
            figures(&half, &ask(0, 1, 512)),
            [9.310125827789307, 7.450580596923828, 0.92822265625, 0.9313225746154785]
        );
        assert_eq!(
            figures(&half, &ask(3, 4, 2048)),
            [12.131858348846436, 1.862645149230957, 9.337890625, 0.9313225746154785]
        );
        let infer = Question { purpose: Purpose::Infer, ..Question::default() };
        assert_eq!(estimate(&half, &infer).unwrap().total() / GIB, 0.9313225746154785);
    }
}
