//! Activation factors, overheads and a fragmentation cushion, all tunable.
//!
//! Source: README of "LLM/VLM GPU Memory Estimator" (estimate_memory_budget.py), "Memory Breakdown" and "Advanced Tuning".
//! Only the first of its printed figures follows from these formulas, and only in decimal GB: see docs/lenses.md.

use super::{Estimate, Facts, GIB, Method, Purpose, Question, Silent, silent};
use crate::plan::OptimizerKind;

/// What a user may tune ("Advanced Tuning").
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Coefficients {
    /// `--grad-ckpt-reduction`: activations retained under checkpointing.
    pub checkpoint_retention: f64,
    /// `--attn-act-factor-no-fa`.
    pub attention: f64,
    /// `--attn-act-factor-fa`.
    pub flash_attention: f64,
    /// `--mlp-act-factor`.
    pub mlp: f64,
    /// `--logits-factor`.
    pub logits: f64,
    /// `--fragmentation-gib`.
    pub fragmentation_gib: f64,
    /// `--misc-overhead-gib`.
    pub misc_gib: f64,
    /// "CUDA/cuBLAS: ~2.5 GiB".
    pub cuda_gib: f64,
    /// fp32 copies of the weights ("optional").
    pub master_weights: bool,
}

impl Default for Coefficients {
    fn default() -> Self {
        Self {
            checkpoint_retention: 0.35,
            attention: 4.0,
            flash_attention: 0.8,
            mlp: 6.0,
            logits: 1.0,
            fragmentation_gib: 5.0,
            misc_gib: 3.0,
            cuda_gib: 2.5,
            master_weights: false,
        }
    }
}

/// "QLoRA: params × 0.56 (4-bit + scales/zeros overhead)".
const FOUR_BIT: f64 = 0.56;
/// "With fused loss: Multiply by 0.2".
const FUSED_LOSS: f64 = 0.2;
/// Modules adapted when none are named: those of Llama.
const TARGETS: [&str; 7] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];

/// Parameters that LoRA adds: rank × (in + out) for each target, attention taken as h × h.
pub fn lora_parameters(facts: &Facts, rank: u64, targets: Option<&[String]>) -> f64 {
    let (hidden, wide) = (facts.hidden as f64, facts.intermediate as f64);
    let sides = |name: &str| match name {
        "up_proj" | "gate_proj" | "down_proj" => hidden + wide,
        _ => 2.0 * hidden,
    };
    let per_layer: f64 = match targets {
        Some(names) => names.iter().map(|name| sides(name)).sum(),
        None => TARGETS.iter().map(|name| sides(name)).sum(),
    };
    per_layer * rank as f64 * facts.layers as f64
}

/// The run in this lens.
pub fn estimate(facts: &Facts, question: &Question) -> Result<Estimate, Silent> {
    if question.purpose == Purpose::Infer {
        return silent("is about fine-tuning");
    }
    let states = match question.optimizer {
        OptimizerKind::Adam | OptimizerKind::AdamW => 8.0,
        OptimizerKind::AdamW8bit | OptimizerKind::Adam8bit => 1.0,
        OptimizerKind::Sgd | OptimizerKind::SgdMomentum | OptimizerKind::Adafactor => 4.0,
        _ => return silent("does not list this optimizer"),
    };
    let at = question.coefficients;
    let (dp, tp, pp) = (question.dp.max(1) as f64, question.tp.max(1) as f64, question.pp.max(1) as f64);
    let split = |from: u8| if question.zero >= from { dp } else { 1.0 };
    let staged = facts.parameters as f64 / pp;
    let four_bit = question.adapter.as_ref().is_some_and(|adapter| adapter.four_bit);
    let base = staged * if four_bit { FOUR_BIT } else { question.weight_bytes } / tp / split(3);
    let trained = match &question.adapter {
        Some(adapter) => lora_parameters(facts, adapter.rank, adapter.targets.as_deref()) / pp,
        None => staged,
    };
    let gradients = trained * question.weight_bytes / split(2);
    let optimizer = trained * states / split(1);
    let masters = if at.master_weights { trained * 4.0 / split(3) } else { 0.0 };

    let tokens = question.batch as f64 * question.seq as f64;
    let layers = (facts.layers as f64 / pp).ceil().max(1.0);
    let per_token = tokens * layers * facts.hidden as f64 * question.weight_bytes;
    let retained = if question.checkpointing { at.checkpoint_retention } else { 1.0 };
    let attention = if question.flash {
        per_token * at.flash_attention
    } else {
        // "Attention score precision: Assumes FP32 for non-FA".
        let scores = tokens * question.seq as f64 * facts.heads as f64 * layers;
        scores * question.weight_bytes.max(4.0) + per_token * at.attention
    };
    let fused = if question.fused_loss { FUSED_LOSS } else { 1.0 };
    let logits = tokens * facts.vocab as f64 * at.logits * fused * question.weight_bytes / tp;
    // "DeepSpeed: 1-3 GiB (depends on ZeRO stage)".
    let deepspeed = [1.0, 1.5, 2.0, 3.0][usize::from(question.zero.min(3))];
    let gathered = if question.zero >= 3 && !four_bit { trained * question.weight_bytes / tp } else { 0.0 };
    let peak = 0.1 * GIB * (question.batch as f64).max(1.0) + gathered * (1.0 - 1.0 / dp);
    Ok(Estimate::new(
        Method::Factors,
        vec![
            ("base weights", base),
            ("trainable state", (gradients + optimizer + masters) / tp),
            ("attention activations", attention * retained / tp),
            ("MLP activations", per_token * at.mlp * retained / tp),
            ("output logits", logits),
            ("CUDA and cuBLAS", at.cuda_gib * GIB),
            ("DeepSpeed", deepspeed * GIB),
            ("fragmentation", at.fragmentation_gib * GIB),
            ("misc", at.misc_gib * GIB),
            ("peak buffer", peak),
        ],
    ))
}

#[cfg(test)]
mod tests {
    use super::super::{Adapter, EngineKind};
    use super::*;

    fn llama2_7b() -> Facts {
        Facts { intermediate: 11_008, gated: true, ..Facts::of_sizes(6_738_415_616, 32, 4096, 32, 32_000) }
    }

    /// README, "1. Full Fine-Tuning (7B Model)": the options of its command line.
    fn first_example() -> Question {
        Question {
            batch: 2,
            seq: 4096,
            zero: 2,
            dp: 8,
            engine: EngineKind::Deepspeed,
            flash: true,
            checkpointing: true,
            ..Question::default()
        }
    }

    /// "Base weights : 13.48 GiB": decimal GB under another name.
    #[test]
    fn base_weights_as_printed_in_decimal() {
        let estimate = estimate(&llama2_7b(), &first_example()).unwrap();
        assert_eq!(format!("{:.2}", estimate.terms[0].bytes / 1e9), "13.48");
        assert_eq!(format!("{:.2}", estimate.terms[0].bytes / GIB), "12.55");
    }

    /// "Trainable state : 6.74" is the eight bytes of Adam over eight cards alone; with the gradients that the formula
    /// names it is 8.42. Attention, MLP, logits and the total follow from no reading of the formulas.
    #[test]
    fn what_the_document_prints_and_what_its_formulas_give() {
        let estimate = estimate(&llama2_7b(), &first_example()).unwrap();
        let decimal = |index: usize| format!("{:.2}", estimate.terms[index].bytes / 1e9);
        assert_eq!(decimal(1), "8.42");
        assert_eq!(format!("{:.2}", 8.0 * 6_738_415_616.0 / 8.0 / 1e9), "6.74");
        assert_eq!([decimal(2), decimal(3), decimal(4)], ["0.60", "4.51", "0.52"]);
        assert_ne!([decimal(2), decimal(3), decimal(4)], ["2.25", "3.37", "1.00"]);
    }

    /// "QLoRA: params × 0.56", "With fused loss: Multiply by 0.2", "Divided by TP".
    #[test]
    fn options_do_what_the_document_says() {
        let adapter = Some(Adapter { rank: 8, targets: Some(vec!["q_proj".into(), "v_proj".into()]), four_bit: true });
        let qlora = estimate(&llama2_7b(), &Question { adapter, ..Question::default() }).unwrap();
        assert_eq!(qlora.terms[0].bytes, 6_738_415_616.0 * 0.56);
        assert_eq!(qlora.terms[1].bytes, 2.0 * 8.0 * 8192.0 * 32.0 * 10.0);
        let plain = estimate(&llama2_7b(), &first_example()).unwrap();
        let fused = estimate(&llama2_7b(), &Question { fused_loss: true, ..first_example() }).unwrap();
        assert!((fused.terms[4].bytes - plain.terms[4].bytes * 0.2).abs() < 1.0);
        let halved = estimate(&llama2_7b(), &Question { tp: 2, ..first_example() }).unwrap();
        assert_eq!(halved.terms[0].bytes * 2.0, plain.terms[0].bytes);
        let eager = estimate(&llama2_7b(), &Question { flash: false, ..first_example() }).unwrap();
        assert!(eager.terms[2].bytes > 10.0 * plain.terms[2].bytes);
    }
}
