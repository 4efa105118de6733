//! Any `quantization_config` over weights of many shapes: an error, or parts that add up.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vramcast_core::dtype::{DType, elements};
use vramcast_core::source::quantization::{Quantization, Role, Weight};

const NAMES: &[&str] = &[
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.11.mlp.experts.gate_up_proj",
    "model.visual.blocks.3.attn.qkv.weight",
    "model.embed_tokens.weight",
    "lm_head.weight",
    "",
    ".",
];

const SHAPES: &[&[u64]] = &[
    &[],
    &[0],
    &[7],
    &[0, 0],
    &[64, 130],
    &[4096, 4096],
    &[8, 64, 33],
    &[u64::MAX, 1],
    &[1, u64::MAX],
    &[1 << 32, 1 << 32],
    &[2, 2, 2, 2],
];

fuzz_target!(|data: &[u8]| {
    let Ok(section) = serde_json::from_slice::<serde_json::Value>(data) else { return };
    let config = serde_json::json!({ "quantization_config": section });
    let Ok(Some(quantization)) = Quantization::from_config(&config) else { return };
    for name in NAMES {
        for shape in SHAPES {
            for role in [Role::Linear, Role::Experts, Role::Embedding, Role::Head, Role::Other] {
                for transposed in [false, true] {
                    let weight = Weight { name, shape, dtype: DType::BF16, role, transposed };
                    let Ok(stored) = quantization.stored(&weight) else { continue };
                    let sum: u64 = stored.parts.iter().map(|part| part.bytes).sum();
                    assert_eq!(sum, stored.bytes);
                    for part in &stored.parts {
                        assert_eq!(elements(&part.shape).and_then(|count| part.dtype.bytes(count)), Some(part.bytes));
                    }
                }
            }
        }
    }
});
