//! The budgets of SGLang, TGI and TensorRT-LLM, worked out by hand from their published rules.

#![allow(clippy::unwrap_used)]

use vramcast_core::dtype::DType;
use vramcast_core::model::Model;
use vramcast_core::serving::sglang::SglangPlan;
use vramcast_core::serving::tensorrt_llm::TensorRtLlmPlan;
use vramcast_core::serving::tgi::TgiPlan;
use vramcast_core::serving::{ServedModel, WeightFormat};
use vramcast_core::source::catalogue;

const GIB: u64 = 1 << 30;
/// Llama 3.1 8B in bf16: 8,030,261,248 parameters; 32 layers of 8 key and 8 value heads of 128.
const WEIGHTS: u64 = 8_030_261_248 * 2;
const TOKEN: u64 = 32 * 2 * 8 * 128 * 2;

fn llama() -> ServedModel {
    let entry = catalogue::find("meta-llama/Llama-3.1-8B").unwrap();
    let model = Model::new(entry.config, entry.auto_class.as_deref()).unwrap();
    ServedModel::of(&model, &WeightFormat::Plain(DType::BF16)).unwrap()
}

/// What the CUDA context of a process takes.
fn context() -> u64 {
    vramcast_core::plan::Gpu::h200().context()
}

#[test]
fn sglang_keeps_chunks_and_graphs_free() {
    // 512 MiB, 8192 tokens of a chunk at 1.5 MiB, 256 graphs at 2 MiB, 128 MiB of one rank: 13440 MiB of 81920, so that
    // 0.836 of what is free before weights are loaded may be used.
    let plan = SglangPlan { memory: 80 * GIB, context: Some(8192), ..SglangPlan::default() };
    let budget = plan.budget(&llama());
    let granted = (80 * GIB - context()) * 836 / 1000;
    assert_eq!((budget.granted, budget.cache), (granted, granted - WEIGHTS));
    assert_eq!(budget.cache_tokens, (granted - WEIGHTS) / TOKEN);
    // A share that is given holds as it is.
    let given = SglangPlan { static_thousandths: Some(800), ..plan }.budget(&llama());
    assert_eq!(given.granted, (80 * GIB - context()) * 800 / 1000);
    // A small card has small chunks and few graphs: 512 + 2048 * 1.5 + 24 * 2 + 128 MiB of 24 GiB.
    let small = SglangPlan { memory: 24 * GIB, context: Some(4096), ..SglangPlan::default() };
    assert_eq!(small.budget(&llama()).granted, (24 * GIB - context()) * 847 / 1000);
}

#[test]
fn sglang_replicates_attention_alone() {
    let tensor = SglangPlan { memory: 80 * GIB, context: Some(8192), tensor_parallel: 8, ..SglangPlan::default() };
    let plan = SglangPlan { replicas: 2, dp_attention: true, ..tensor.clone() };
    let (apart, whole) = (plan.budget(&llama()), tensor.budget(&llama()));
    // Queries and outputs of 4096 x 4096, keys and values of 1024 x 4096, in 32 layers, and 128,256 words: over four cards each.
    let attention = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096) * 2;
    let table = 128_256 * 4096 * 2;
    let weights = |budget: &vramcast_core::serving::Budget| budget.parts[0].bytes;
    assert_eq!(weights(&apart) - weights(&whole), (attention + table) / 4 - (attention + table) / 8);
    // Two heads of keys and values a card for one, and 3 MiB for each of 512 sequences of both, half as much again.
    assert_eq!((apart.cache_tokens, whole.cache_tokens), (apart.cache / (TOKEN / 4), whole.cache / (TOKEN / 8)));
    let reserved = 512 + 8192 * 3 / 2 + 512 * 2 + 8 * 128;
    let share = |reserved: u64| ((80 * 1024 - reserved) * 1000 + 40 * 1024) / (80 * 1024);
    let free = 80 * GIB - context() - (424 << 20);
    assert_eq!(whole.granted, free * share(reserved) / 1000);
    assert_eq!(apart.granted, free * share(reserved + 512 * 2 * 9 / 2) / 1000);
    // One replica is none; pages are whole.
    assert_eq!(SglangPlan { replicas: 1, ..plan }.budget(&llama()).cache, whole.cache);
    let pages = SglangPlan { page_size: 64, ..tensor }.budget(&llama());
    assert_eq!(pages.cache_tokens, whole.cache_tokens / 64 * 64);
}

#[test]
fn sglang_counts_sliding_layers_by_four_fifths_and_states_beside() {
    let served = |id: &str| {
        let entry = catalogue::find(id).unwrap();
        let model = Model::new(entry.config, entry.auto_class.as_deref()).unwrap();
        ServedModel::of(&model, &WeightFormat::Plain(DType::BF16)).unwrap()
    };
    let gemma = served("google/gemma-3-27b-it");
    let plan = SglangPlan { memory: 141 * GIB, context: Some(8192), ..SglangPlan::default() };
    let budget = plan.budget(&gemma);
    // 10 layers of 16 heads of 128, and 52 of which four fifths are kept.
    let layer = 2 * 16 * 128 * 2;
    assert_eq!(budget.cache_tokens, budget.cache / (10 * layer + 52 * layer * 4 / 5));
    let next = served("Qwen/Qwen3-Next-80B-A3B-Instruct");
    let budget = SglangPlan { tensor_parallel: 4, ..plan }.budget(&next);
    let states = budget.parts.iter().find(|part| part.name == "states of sequences").unwrap().bytes;
    let ratio = 1000 * states / budget.cache;
    assert!((895..=905).contains(&ratio), "{ratio}");
}

#[test]
fn tgi_leaves_a_tenth_of_the_card() {
    let plan = TgiPlan { memory: 80 * GIB, max_total_tokens: Some(8192), ..TgiPlan::default() };
    let budget = plan.budget(&llama());
    let prefill = budget.parts.iter().find(|part| part.name == "warm-up prefill").unwrap().bytes;
    assert!(prefill > 0);
    assert_eq!(budget.cache, 72 * GIB - WEIGHTS - prefill - context());
    assert_eq!(budget.largest_sequence, budget.cache / TOKEN);
}

#[test]
fn tensorrt_llm_takes_nine_tenths_in_blocks_of_32() {
    let plan = TensorRtLlmPlan { memory: 80 * GIB, max_seq_len: Some(8192), ..TensorRtLlmPlan::default() };
    let budget = plan.budget(&llama());
    let activations = budget.parts.iter().find(|part| part.name == "activations").unwrap().bytes;
    let free = 80 * GIB - WEIGHTS - activations - context();
    assert!(budget.cache.abs_diff(free / 10 * 9) < 1024, "{budget:?}");
    assert_eq!((budget.block_size, budget.blocks), (32, budget.cache / (32 * TOKEN)));
    // Half as much per card where two share weights and heads.
    let two = TensorRtLlmPlan { tensor_parallel: 2, ..plan }.budget(&llama());
    assert_eq!(two.parts[0].bytes, WEIGHTS / 2);
    assert!(two.cache_tokens > 2 * budget.cache_tokens);
}
