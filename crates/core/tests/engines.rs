//! Serving engines by version and option: what changes, what does not, and that solvers agree with the forward answer.

#![allow(clippy::unwrap_used)]

use vramcast_core::dtype::DType;
use vramcast_core::model::Model;
use vramcast_core::serving::llama_cpp::{Build, LlamaCppPlan, Split};
use vramcast_core::serving::sglang::SglangPlan;
use vramcast_core::serving::solve;
use vramcast_core::serving::tensorrt_llm::TensorRtLlmPlan;
use vramcast_core::serving::tgi::TgiPlan;
use vramcast_core::serving::vllm::{Draft, Speculation, VllmPlan};
use vramcast_core::serving::{Budget, ServedModel, WeightFormat};
use vramcast_core::source::catalogue;

const GIB: u64 = 1 << 30;

fn served(id: &str) -> ServedModel {
    let entry = catalogue::find(id).unwrap();
    let model = Model::new(entry.config, entry.auto_class.as_deref()).unwrap();
    ServedModel::of(&model, &WeightFormat::Plain(DType::BF16)).unwrap()
}

fn vllm(version: &str) -> VllmPlan {
    VllmPlan { version: version.into(), max_model_len: Some(32_768), memory: 80 * GIB, ..VllmPlan::default() }
}

fn part(budget: &Budget, name: &str) -> u64 {
    budget.parts.iter().find(|part| part.name == name).map_or(0, |part| part.bytes)
}

#[test]
fn vllm_groups_layers_since_0_9_1() {
    let gemma = served("google/gemma-3-27b-it");
    let pool = 20 * GIB;
    let token = 2 * 16 * 128 * 2;
    // All 62 layers in full before.
    let flat = vllm("0.9.0").blocks(&gemma, None, pool);
    assert_eq!(flat.blocks, pool / (62 * token * 16));
    assert_eq!(flat.cache_tokens, flat.blocks * 16);
    // Groups of 10 layers: one of full ones, six of sliding ones, the last padded.
    let grouped = vllm("0.10.2").blocks(&gemma, None, pool);
    assert_eq!(grouped.blocks, pool / (10 * token * 16));
    assert_eq!(grouped.cache_tokens, grouped.blocks / 7 * 16);
    // A sequence of 32k: 2048 blocks, and six times the window with a batch of 8192, one block more.
    let need = 2048 + 6 * ((1023 + 8192_u64).div_ceil(16) + 1);
    assert_eq!(grouped.concurrency_thousandths, grouped.blocks * 1000 / need);
    // Since 0.20.1 the tokens printed are what that concurrency means.
    let printed = vllm("0.20.1").blocks(&gemma, None, pool);
    assert_eq!(printed.cache_tokens, printed.blocks * 32_768 / need);
}

#[test]
fn vllm_pads_kinds_that_are_nearly_as_many() {
    // gpt-oss-20b has 12 sliding and 12 full layers; one layer of a draft makes 13 full ones.
    let oss = served("openai/gpt-oss-20b");
    let token = 2 * 8 * 64 * 2;
    let draft = |version: &str| Draft::of(Speculation::Layers(1), &oss, &vllm(version));
    let of = |version: &str| vllm(version).blocks(&oss, Some(&draft(version)), 10 * GIB).blocks;
    assert_eq!(of("0.11.0"), 10 * GIB / (12 * token * 16));
    assert_eq!(of("0.12.0"), 10 * GIB / (13 * token * 16));
}

#[test]
fn vllm_keeps_states_as_the_config_says() {
    // Qwen3-Next names no type for its states, Qwen3.5 fp32: twice the page.
    let next = served("Qwen/Qwen3-Next-80B-A3B-Instruct");
    let five = served("Qwen/Qwen3.5-35B-A3B");
    assert_eq!((next.state_dtype, five.state_dtype), (None, Some(DType::F32)));
    let held = vllm("0.11.0").blocks(&next, None, 20 * GIB);
    // 32 heads of 128 x 128 and three positions of 8192 channels in 16 bits, over 2 heads of 256 for keys and values.
    let page = (32 * 128 * 128 + 3 * 8192) * 2;
    assert_eq!(held.block_size, (page / (2 * 2 * 256 * 2_u64)).next_multiple_of(16).max(16));
    // Kept prompts cost a second state, guessed tokens one each.
    let plan = vllm("0.24.0");
    let need = |plan: &VllmPlan| plan.blocks(&five, None, 20 * GIB).concurrency_thousandths;
    let kept = VllmPlan { prefix_caching: true, ..plan.clone() };
    let guessed = VllmPlan { speculative_tokens: 3, ..plan.clone() };
    assert!(need(&plan) > need(&kept) && need(&kept) > need(&guessed));
}

#[test]
fn vllm_drafts_take_weights_and_cache() {
    let model = served("deepseek-ai/DeepSeek-V3");
    let plan = VllmPlan { tensor_parallel: 8, memory: 288 * GIB, ..vllm("0.11.0") };
    let plain = plan.budget(&model);
    let with = |speculation| plan.budget_with(&model, Some(&Draft::of(speculation, &model, &plan)));
    let repeated = with(Speculation::NGram);
    assert_eq!((repeated.cache, repeated.blocks), (plain.cache, plain.blocks));
    let guessed = with(Speculation::MultiToken);
    // A layer of 256 experts over 8 cards, more than a GiB in bf16.
    assert!(part(&guessed, "draft model") > GIB && guessed.cache_tokens < plain.cache_tokens);
    let small = served("meta-llama/Llama-3.2-1B-Instruct");
    let llama = served("meta-llama/Llama-3.1-8B");
    let plan = vllm("0.11.0");
    let draft = Draft::of(Speculation::Model(&small), &llama, &plan);
    assert_eq!(draft.layers.len(), 16);
    // Its layers have half as wide heads: 16 of them weigh as 8 of the model's.
    let [own, both] = [None, Some(&draft)].map(|draft| plan.blocks(&llama, draft, 10 * GIB).blocks);
    assert_eq!((own, both), (10 * GIB / (32 * 4096 * 16), 10 * GIB / ((32 * 4096 + 16 * 2048) * 16)));
}

#[test]
fn vllm_spreads_whole_experts() {
    let model = served("Qwen/Qwen3-30B-A3B");
    let plan = |cards: u64, whole: bool| VllmPlan { tensor_parallel: cards, expert_parallel: whole, ..vllm("0.11.0") };
    let weights = |cards, whole| part(&plan(cards, whole).budget(&model), "weights");
    // 128 experts divide by 4 but not by 6, where some cards hold 22.
    assert_eq!(weights(4, true), weights(4, false));
    assert!(weights(6, true) > weights(6, false));
    let replicas = VllmPlan { data_parallel: 4, ..plan(1, true) };
    let alone = part(&plan(1, false).budget(&model), "weights");
    assert!(part(&replicas.budget(&model), "weights") < alone / 3);
}

#[test]
fn vllm_profiles_images_and_latents() {
    let gemma = served("google/gemma-3-27b-it");
    assert_eq!(gemma.image_encoder.unwrap().tokens, 256);
    let activations = |model: &ServedModel| part(&vllm("0.11.0").budget(model), "activations while profiling");
    let text = ServedModel { image_encoder: None, ..gemma.clone() };
    assert!(activations(&gemma) > activations(&text));
    let latent = served("deepseek-ai/DeepSeek-V3");
    // 64k tokens of 128 heads' keys without their rotary part and values: 4 GiB and more.
    assert!(activations(&latent) > (64 << 10) * 128 * 256 * 2);
}

#[test]
fn vllm_engines_of_one_version_differ() {
    let llama = served("meta-llama/Llama-3.1-8B");
    let activations = |version: &str| part(&vllm(version).budget(&llama), "activations while profiling");
    // The older engine runs a whole prompt at once.
    assert!(activations("0.8.5 V0") > activations("0.11.0") / 2);
    let tokens = 32_768 * 2 * 3 * (4096 + 14_336);
    assert!(activations("0.8.5 V0").abs_diff(tokens) <= 64 << 20);
}

/// Whether the longest sequence an engine names fits, and a longer one does not.
fn agrees(name: &str, largest: u64, step: u64, fits: impl Fn(u64) -> bool) {
    assert!(largest > 0, "{name}: nothing fits");
    assert!(fits(largest), "{name}: {largest} does not fit");
    assert!(!fits(largest + step), "{name}: {} fits, too", largest + step);
}

#[test]
fn solvers_agree_with_the_forward_answer() {
    for id in ["meta-llama/Llama-3.1-8B", "google/gemma-3-12b-it", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3.5-9B"] {
        let model = served(id);
        for (memory, cards) in [(80 * GIB, 1), (48 * GIB, 2), (141 * GIB, 4)] {
            let plan = VllmPlan { memory, tensor_parallel: cards, ..vllm("0.11.0") };
            let with = |length| VllmPlan { max_model_len: Some(length), ..plan.clone() }.budget(&model);
            agrees(id, plan.budget(&model).largest_sequence, 1, |length| with(length).fits);
            let plan = SglangPlan { memory, tensor_parallel: cards, ..SglangPlan::default() };
            let with = |length| SglangPlan { context: Some(length), ..plan.clone() }.budget(&model);
            agrees(id, plan.budget(&model).largest_sequence, 1, |length| with(length).fits);
            let plan = TgiPlan { memory, shards: cards, ..TgiPlan::default() };
            let with = |length| TgiPlan { max_total_tokens: Some(length), ..plan.clone() }.budget(&model);
            agrees(id, plan.budget(&model).largest_sequence, 1, |length| with(length).fits);
            let plan = TensorRtLlmPlan { memory, tensor_parallel: cards, ..TensorRtLlmPlan::default() };
            let with = |length| TensorRtLlmPlan { max_seq_len: Some(length), ..plan.clone() }.budget(&model);
            agrees(id, plan.budget(&model).largest_sequence, 1, |length| with(length).fits);
        }
        let held = |context: u64| LlamaCppPlan { context, ..LlamaCppPlan::default() }.estimate(&model).unwrap();
        let fits = |context: u64| held(context).devices[0].total() <= 80 * GIB;
        let largest = solve::largest(1, 1 << 26, fits).unwrap();
        assert!(fits(largest) && !fits(largest + 1), "{id}: {largest}");
    }
}

fn llama_cpp(build: Build) -> LlamaCppPlan {
    LlamaCppPlan { build, context: 8192, ..LlamaCppPlan::default() }
}

#[test]
fn llama_cpp_reserved_logits_of_a_whole_batch_before_june_2026() {
    let gemma = served("google/gemma-3-27b-it");
    let compute = |build| llama_cpp(build).estimate(&gemma).unwrap().devices[0].compute;
    let logits = 512 * gemma.vocabulary * 4;
    assert!(compute(Build::Numbered(9400)) > logits);
    assert!(compute(Build::Numbered(9500)) < logits && compute(Build::Numbered(9500)) == compute(Build::Current));
}

#[test]
fn sizes_that_a_config_leaves_out_are_found() {
    let gemma = served("google/gemma-3-4b-it");
    assert_eq!((gemma.vocabulary, gemma.heads, gemma.kv_heads, gemma.head_dim), (262_208, 8, 4, 256));
    // Experts' biases are no matrices.
    assert_eq!(served("openai/gpt-oss-20b").expert_width, 2880);
}

#[test]
fn llama_cpp_kept_windows_and_latents_by_build() {
    let gemma = served("google/gemma-3-27b-it");
    let cache = |model: &ServedModel, build| llama_cpp(build).estimate(model).unwrap().devices[0].cache;
    let cell = 16 * 128 * 2 * 2;
    assert_eq!(cache(&gemma, Build::Numbered(5400)), 62 * 8192 * cell);
    assert_eq!(cache(&gemma, Build::Numbered(5500)), (10 * 8192 + 52 * 1536) * cell);
    let latent = served("deepseek-ai/DeepSeek-V3");
    assert_eq!(cache(&latent, Build::Numbered(5000)), 8192 * 61 * 128 * 320 * 2);
    assert_eq!(cache(&latent, Build::Numbered(5200)), 8192 * 61 * (576 + 512) * 2);
    assert_eq!(cache(&latent, Build::Numbered(8000)), 8192 * 61 * 576 * 2);
}

#[test]
fn llama_cpp_splits_by_layers_rows_or_tensors() {
    let llama = served("meta-llama/Llama-3.1-8B");
    let of = |build, split| {
        let plan = LlamaCppPlan { tensor_split: vec![1, 1], split, ..llama_cpp(build) };
        plan.estimate(&llama).map(|estimate| estimate.devices)
    };
    let layers = of(Build::Numbered(9000), Split::Layer).unwrap();
    let rows = of(Build::Numbered(9000), Split::Row).unwrap();
    let sum = |devices: &[vramcast_core::serving::llama_cpp::Buffers]| devices.iter().map(|d| d.model).sum::<u64>();
    assert!(sum(&layers).abs_diff(sum(&rows)) < 1024);
    assert!(rows[0].model.abs_diff(rows[1].model) < 1 << 20);
    assert_eq!(rows[0].cache, layers[0].cache);
    // The copies that a pipeline keeps are those of whole layers only.
    assert!(rows[0].compute < layers[0].compute);
    let tensors = of(Build::Current, Split::Tensor).unwrap();
    assert_eq!((tensors[0].model, tensors[0].cache), (tensors[1].model, tensors[1].cache));
    assert_eq!(tensors[0].cache * 2, layers.iter().map(|device| device.cache).sum::<u64>());
    assert!(of(Build::Current, Split::Row).is_err());
}

#[test]
fn llama_cpp_copies_experts_of_the_host() {
    let model = served("Qwen/Qwen3-30B-A3B");
    let of = |cpu_experts| {
        let plan = LlamaCppPlan { tensor_split: vec![1, 1], cpu_experts, ..llama_cpp(Build::Current) };
        plan.estimate(&model).unwrap()
    };
    let (all, none) = (of(u64::MAX), of(0));
    let experts: u64 = model.layers.iter().map(|layer| layer.experts).sum();
    assert_eq!(all.host.model, none.host.model + experts);
    // One matrix of 128 experts at a time, on the first card.
    let matrix = 128 * 2048 * 768 * 2;
    assert!(all.devices[0].compute > matrix && all.devices[0].compute < 3 * matrix, "{:?}", all.devices);
    assert!(all.devices[1].compute < matrix);
}
