//! Caches that estimators get wrong by whole factors, in the form each engine keeps them.

#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

use vramcast_core::dtype::DType;
use vramcast_core::model::Model;
use vramcast_core::plan::{Batch, CacheImplementation, InferPlan, ServePlan, ServingEngine};
use vramcast_core::serving::llama_cpp::{Build, Flash, LlamaCppPlan, Mixture};
use vramcast_core::serving::model::Element;
use vramcast_core::serving::start::{Served, start};
use vramcast_core::serving::vllm::{Draft, Speculation, VllmPlan};
use vramcast_core::serving::{Budget, ServedModel, WeightFormat};
use vramcast_core::source::catalogue;
use vramcast_core::source::uploads::quantised;

mod vllm;
mod vllm_profile;

const F16: Element = Element::plain(DType::F16);

fn model(id: &str) -> Model {
    let entry = catalogue::find(id).unwrap();
    Model::new(entry.config, entry.auto_class.as_deref()).unwrap()
}

fn served(id: &str) -> ServedModel {
    ServedModel::of(&model(id), &WeightFormat::Plain(DType::BF16)).unwrap()
}

/// Bytes that `generate` has in its cache when the prompt is done.
fn cached_by_transformers(model: &Model, prompt: u64) -> u64 {
    let plan = InferPlan {
        batch: Batch { batch_size: 1, seq_len: prompt, ..Batch::default() },
        new_tokens: 1,
        cache: CacheImplementation::Dynamic,
        ..InferPlan::default()
    };
    let (_, log, _) = vramcast_core::memory::infer::simulate(model, &plan).unwrap();
    let cache = |storage: &&vramcast_core::memory::log::StorageInfo| {
        storage.category == vramcast_core::memory::log::Category::Cache
    };
    log.storages.iter().filter(cache).map(|storage| storage.bytes).sum()
}

#[test]
fn deepseek_v3_keeps_a_latent() {
    let served = served("deepseek-ai/DeepSeek-V3");
    // 61 layers of 512 + 64 elements, the same on every tensor-parallel rank.
    assert_eq!(served.bytes_per_token(F16, 1), 61 * 576 * 2);
    assert_eq!(served.bytes_per_token(F16, 8), 61 * 576 * 2);
    let plan = |build| LlamaCppPlan { build, context: 1024, ..LlamaCppPlan::default() };
    let cache = |build| plan(build).estimate(&served).unwrap().devices[0].cache;
    assert_eq!(cache(Build::Current), 1024 * 61 * 576 * 2);
    // Whole heads are 71 times as much: 128 · (192 + 128) elements a layer.
    assert_eq!(cache(Build::Early), 1024 * 61 * 128 * 320 * 2);
    assert_eq!(cache(Build::Ik { mla: 1 }), 1024 * 61 * (576 + 512) * 2);
}

#[test]
fn gemma_3_slides() {
    let served = served("google/gemma-3-27b-it");
    let plan = LlamaCppPlan { context: 131_072, ..LlamaCppPlan::default() };
    let cell = 16 * 128 * 2 * 2;
    // 10 layers see everything, 52 a window of 1024 and the micro-batch.
    let expected = 10 * 131_072 * cell + 52 * 1536 * cell;
    assert_eq!(plan.estimate(&served).unwrap().devices[0].cache, expected);
    let counted_in_full = 62 * 131_072 * cell;
    assert!(counted_in_full > 5 * expected);
}

#[test]
fn hybrids_grow_in_few_layers() {
    let next = served("Qwen/Qwen3-Next-80B-A3B-Instruct");
    assert_eq!(next.layers.len(), 48);
    assert_eq!(next.bytes_per_token(F16, 1), 12 * 2 * 2 * 256 * 2);
    assert!(next.state_bytes(DType::BF16, DType::F32, 1) > 36 * 32 * 128 * 128 * 4);
    let jamba = served("ai21labs/Jamba-v0.1");
    assert_eq!(jamba.bytes_per_token(F16, 1), 4 * 2 * 8 * 128 * 2);
}

#[test]
fn falcon_40b_broadcasts_in_transformers_only() {
    let config = serde_json::json!({
        "model_type": "falcon", "architectures": ["FalconForCausalLM"], "hidden_size": 8192, "num_hidden_layers": 2,
        "num_attention_heads": 128, "num_kv_heads": 8, "new_decoder_architecture": true, "multi_query": true,
        "parallel_attn": true, "bias": false, "alibi": false, "vocab_size": 65024
    });
    let falcon = Model::new(config, None).unwrap();
    let served = ServedModel::of(&falcon, &WeightFormat::Plain(DType::BF16)).unwrap();
    assert_eq!(served.bytes_per_token(F16, 1), 2 * 2 * 8 * 64 * 2);
    // transformers repeats every key and value 16 times before it caches them.
    assert_eq!(cached_by_transformers(&falcon, 256), 256 * 2 * 2 * 128 * 64 * 2);
}

#[test]
fn gemma_3n_shares_keys_and_values() {
    let served = served("google/gemma-3n-E2B-it");
    let caching = served.layers.iter().filter(|layer| !layer.caches.is_empty()).count();
    // 30 layers, of which the last 10 read what earlier ones cached.
    assert_eq!(caching, 20);
    assert_eq!(served.bytes_per_token(F16, 1), 20 * 2 * 2 * 256 * 2);
}

/// The models of `truth/models` that cache, with what truth says of it.
fn truth() -> Vec<(Model, serde_json::Value)> {
    let folder = format!("{}/../../truth/models", env!("CARGO_MANIFEST_DIR"));
    let read =
        |file: std::fs::DirEntry| vramcast_core::source::json::parse(&std::fs::read(file.path()).unwrap()).unwrap();
    let rows = std::fs::read_dir(folder).unwrap().map(|file| read(file.unwrap()));
    let caching = rows.filter(|row| row["kv_cache_bytes_per_token_bf16"].as_u64().is_some_and(|bytes| bytes > 0));
    let model = |row: &serde_json::Value| Model::new(row["config"].clone(), row["auto_class"].as_str()).unwrap();
    caching.map(|row| (model(&row), row)).collect()
}

/// Compares a figure of every model, and says for which it is off.
fn compare(most_left_out: usize, pair: impl Fn(&Model, &serde_json::Value) -> Option<[u64; 2]>) {
    let rows = truth();
    let (mut compared, mut wrong) = (0, Vec::new());
    for (model, row) in &rows {
        let Some([ours, theirs]) = pair(model, row) else { continue };
        compared += 1;
        if ours != theirs {
            wrong.push(format!("{}: {ours} instead of {theirs}", row["id"]));
        }
    }
    assert!(wrong.is_empty(), "{compared} compared: {wrong:#?}");
    assert!(compared > 150 && compared + most_left_out >= rows.len(), "only {compared} of {}", rows.len());
}

/// What the truth's figure becomes in the form engines keep: the latent, index keys in fp8 with a scale per 128, and
/// DeepSeek-V4's folded entries, which truth names but does not count (21 layers fold 4 tokens into 512 + 128 elements,
/// 20 fold 128 into 512).
fn kept_by_engines(row: &serde_json::Value) -> u64 {
    let kv = &row["kv_cache"];
    let counted = row["kv_cache_bytes_per_token_bf16"].as_u64().unwrap();
    let index = kv["indexer_key_bytes_per_token_bf16"].as_u64().unwrap_or(0);
    let folded = if row["model_type"] == "deepseek_v4" { 21 * (512 + 128) * 2 / 4 + 20 * 512 * 2 / 128 } else { 0 };
    kv["mla_latent_bytes_per_token_bf16"].as_u64().unwrap_or(counted) + index / 256 * 132 + folded
}

#[test]
fn cache_bytes_per_token_are_those_of_truth() {
    compare(0, |model, row| {
        let served = ServedModel::of(model, &WeightFormat::Plain(DType::BF16)).unwrap();
        Some([served.bytes_per_token(F16, 1), kept_by_engines(row)])
    });
}

#[test]
fn transformers_caches_what_truth_measured() {
    use vramcast_core::model::op::{CacheKind, CacheUpdate};
    // Heads as they are stored: Falcon's after the broadcast. Encoder-decoders: a token of the decoder.
    let stored = |cache: &CacheUpdate| match cache.kind {
        CacheKind::Full | CacheKind::Sliding(_) | CacheKind::Latent { .. } => {
            cache.heads * (cache.key_dim + cache.value_dim) * 2
        }
        _ => 0,
    };
    // Two rows have a figure that was counted, not measured.
    compare(2, |model, row| {
        let caches = model.inventory().unwrap().caches;
        let kv = &row["kv_cache"];
        let measured = kv["hf_cache_bytes_per_token_bf16"].as_u64();
        let wanted = measured.or_else(|| kv["self_attention_bytes_per_decoder_token_bf16"].as_u64())?;
        Some([caches.iter().map(stored).sum(), wanted])
    });
}

#[test]
fn cross_attention_keeps_the_encoder_once() {
    use vramcast_core::model::op::CacheKind;
    let mut compared = 0;
    for (model, row) in truth() {
        let Some(wanted) = row["kv_cache"]["cross_attention_bytes_per_encoder_token_bf16"].as_u64() else { continue };
        let caches = model.inventory().unwrap().caches;
        let cross = caches.iter().filter(|cache| cache.kind == CacheKind::Cross);
        let ours: u64 = cross.map(|cache| cache.heads * (cache.key_dim + cache.value_dim) * 2).sum();
        assert_eq!(ours, wanted, "{}", row["id"]);
        compared += 1;
    }
    assert!(compared >= 18, "{compared}");
}

#[test]
fn llama_cpp_keeps_as_much_in_its_cells() {
    compare(0, |model, row| {
        let served = ServedModel::of(model, &WeightFormat::Plain(DType::BF16)).unwrap();
        let plan = |context| LlamaCppPlan { context, full_windows: true, parallel: 1, ..LlamaCppPlan::default() };
        let cache = |context| plan(context).estimate(&served).unwrap().devices[0].cache;
        // Index keys of sparse attention are not kept; states do not grow.
        let index = row["kv_cache"]["indexer_key_bytes_per_token_bf16"].as_u64().unwrap_or(0);
        Some([(cache(8192) - cache(4096)) / 4096, kept_by_engines(row) - index / 256 * 132])
    });
}

/// The log in the conversation of llama.cpp's pull request 6122: Command-R on two cards, without flash attention.
#[test]
fn early_llama_cpp_kept_four_copies_of_inputs_on_several_cards() {
    let plan = LlamaCppPlan {
        build: Build::Early,
        context: 4096,
        tensor_split: vec![12, 29],
        flash_attention: Flash::Off,
        ..LlamaCppPlan::default()
    };
    let estimate = plan.estimate(&served("CohereForAI/c4ai-command-r-v01")).unwrap();
    assert_eq!(estimate.devices[0].cache, 1536 << 20);
    assert_eq!(estimate.devices[1].cache, 3584 << 20);
    assert_eq!(estimate.devices[0].compute >> 20, 672);
}

fn part(budget: &vramcast_core::serving::Budget, name: &str) -> u64 {
    budget.parts.iter().find(|part| part.name == name).map_or(0, |part| part.bytes)
}

/// A draft is stored as its own name says, whatever the model is.
#[test]
fn drafts_are_stored_as_their_names_say() {
    let config = catalogue::find("Qwen/Qwen2.5-0.5B").unwrap().config;
    let taken = |name: &str| {
        let plan = ServePlan {
            engine: ServingEngine::LlamaCpp,
            quantization: Some("Q4_K_M".into()),
            context: Some(4096),
            speculative_model: Some(name.into()),
            speculative_config: Some(config.clone()),
            ..ServePlan::default()
        };
        let Ok(Served::Buffers(estimate)) = start(&model("Qwen/Qwen2.5-7B"), &plan) else { panic!("{name}") };
        estimate.notes.join(" ")
    };
    assert!(taken("a/draft-Q4_0.gguf").contains("taken as Q4_0"), "{}", taken("a/draft-Q4_0.gguf"));
    assert!(taken("a/draft-GGUF:Q8_0").contains("taken as Q8_0"));
    assert!(taken("Qwen/Qwen2.5-0.5B").contains("taken as Q4_K_M"));
    // Uploads of gpt-oss have no mixture but their own.
    assert_eq!(Mixture::of_name("ggml-org/gpt-oss-20b-GGUF").unwrap().1.name, "MXFP4_MOE");
}

fn pool(id: &str, plan: &ServePlan) -> Box<vramcast_core::serving::Budget> {
    let Served::Pool(budget) = start(&model(id), plan).unwrap() else { panic!("no budget") };
    budget
}

fn card(name: &str) -> vramcast_core::plan::Gpu {
    vramcast_core::plan::Gpus::embedded().find(name).unwrap()
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}
