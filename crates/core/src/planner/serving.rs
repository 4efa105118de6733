//! What can be changed where tokens are generated: rows as in `moves.rs`, for transformers' `generate` and for engines. The search for
//! plans of training knows none of them.

use serde_json::{Value, json};

use super::moves::{Cost, Move, Now, when};
use crate::ask::{Runner, longest_sequence, tree};
use crate::plan::ModelSizes;
use crate::serving::llama_cpp::Mixture;

/// Tokens by which a sequence is made shorter.
const STEP: u64 = 1024;

impl Now<'_> {
    /// An engine whose cache is a pool of blocks.
    fn pooled(&self) -> bool {
        self.runner.serves() && !self.local()
    }

    fn local(&self) -> bool {
        matches!(self.runner, Runner::LlamaCpp | Runner::Ollama)
    }

    /// Whether its weights could be held in fewer bits than its files have.
    fn is_whole(&self) -> bool {
        let files = self.model.config()["quantization_config"].is_null() && self.model.files().is_empty();
        files && self.absent("quantization") && !self.model.is_pipeline()
    }
}

/// The table.
pub(super) const MOVES: &[Move] = &[
    Move {
        settings: &["enforce_eager"],
        fixed: &["enforce_eager"],
        cost: Cost::Time,
        why: "no CUDA graphs are kept",
        values: |now| when(now.runner == Runner::Vllm && !now.on("enforce_eager"), [json!({"enforce_eager": true})]),
    },
    Move {
        settings: &["n_gpu_layers"],
        fixed: &["n_gpu_layers"],
        cost: Cost::Time,
        why: "the other layers are computed on the host",
        values: |now| {
            let layers = ModelSizes::of(now.model.config(), 0).layers.unwrap_or(0);
            when(
                now.local() && now.absent("n_gpu_layers"),
                (0..=layers).rev().map(|count| json!({"n_gpu_layers": count})),
            )
        },
    },
    Move {
        settings: &["kv_cache_dtype"],
        fixed: &["kv_cache_dtype"],
        cost: Cost::Arithmetic,
        why: "keys and values in one byte",
        values: |now| when(now.pooled() && now.absent("kv_cache_dtype"), [json!({"kv_cache_dtype": "fp8"})]),
    },
    Move {
        settings: &["cache_type_k", "cache_type_v", "flash_attn"],
        fixed: &["cache_type_k", "cache_type_v", "flash_attn"],
        cost: Cost::Arithmetic,
        why: "keys and values in about one byte, which needs flash attention",
        values: |now| {
            let small = json!({"cache_type_k": "q8_0", "cache_type_v": "q8_0", "flash_attn": "on"});
            when(now.local() && now.absent("cache_type_k") && now.absent("cache_type_v"), [small])
        },
    },
    Move {
        settings: &["quantization"],
        fixed: &["quantization"],
        cost: Cost::Arithmetic,
        why: "weights in fewer bits",
        values: |now| {
            let held = |how: Vec<Value>| when(now.is_whole(), how.into_iter().map(|how| json!({"quantization": how})));
            match now.runner {
                Runner::Transformers => {
                    held(["int8", "nf4"].map(|scheme| json!({"scheme": scheme, "double": false})).to_vec())
                }
                Runner::LlamaCpp | Runner::Ollama => {
                    let few = |mixture: &&Mixture| !["F16", "BF16"].contains(&mixture.name);
                    held(Mixture::published().filter(few).map(|mixture| json!(mixture.name)).collect())
                }
                _ if now.pooled() => held(["fp8", "awq"].map(|method| json!(method)).to_vec()),
                _ => Vec::new(),
            }
        },
    },
    Move {
        settings: &["diffusion.vae_tiling"],
        fixed: &["diffusion.vae_tiling"],
        cost: Cost::Arithmetic,
        why: "large pictures are decoded in tiles, which are blended where they meet",
        values: |now| {
            let whole = now.model.is_pipeline() && !now.on("diffusion.vae_tiling");
            when(whole, [tree::of("diffusion.vae_tiling", json!(true))])
        },
    },
    Move {
        settings: &["context"],
        fixed: &["context"],
        cost: Cost::Length,
        why: "shorter sequences at most",
        values: |now| {
            let asked = tree::get(now.tree, "context").and_then(Value::as_u64).or_else(|| longest_sequence(now.model));
            let steps = asked.unwrap_or(0).saturating_sub(1) / STEP;
            when(now.runner.serves(), (1..=steps.min(1 << 12)).rev().map(|step| json!({"context": step * STEP})))
        },
    },
    Move {
        settings: &["tensor_parallel_size", "tensor_split"],
        fixed: &["tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "tensor_split"],
        cost: Cost::Hardware,
        why: "more cards share weights and cache",
        values: |now| {
            let cards = [2usize, 4, 8];
            let split = |cards: usize| json!({"tensor_split": vec![1; cards]});
            match now.runner {
                Runner::LlamaCpp => cards.map(split).to_vec(),
                _ => when(now.pooled(), cards.map(|cards| json!({"tensor_parallel_size": cards}))),
            }
        },
    },
];
