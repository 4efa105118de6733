//! Ways of keeping a cache in `generate`, and decoders beside encoders.

#![allow(clippy::unwrap_used)]
#![allow(clippy::disallowed_methods, reason = "tests read the recorded truth")]

use std::collections::BTreeMap;

use serde_json::Value;
use vramcast_core::dtype::DType;
use vramcast_core::memory::infer::placement::{self, Tree};
use vramcast_core::memory::lower::Dealt;
use vramcast_core::memory::simulation;
use vramcast_core::model::op::Parameter;
use vramcast_core::model::{Inputs, Model};
use vramcast_core::plan::device_map::{DeviceMap, Holder};
use vramcast_core::plan::{Accepted, Assistant, Batch, CacheBackend, CacheImplementation, InferPlan, QuantizedCache};
use vramcast_core::source::catalogue;

fn peak(id: &str, plan: &InferPlan) -> u64 {
    let entry = catalogue::find(id).unwrap();
    let model = Model::new(entry.config, entry.auto_class.as_deref()).unwrap();
    simulation::infer(&model, plan).unwrap().replay.peak_allocated()
}

fn plan(prompt: u64, new_tokens: u64) -> InferPlan {
    let batch = Batch { batch_size: 2, seq_len: prompt, ..Batch::default() };
    InferPlan { batch, new_tokens, ..InferPlan::default() }
}

#[test]
fn an_offloaded_cache_leaves_two_layers_on_the_card() {
    let dynamic = plan(4096, 4);
    let offloaded = InferPlan { cache: CacheImplementation::Offloaded, ..dynamic.clone() };
    let saved = peak("HuggingFaceTB/SmolLM2-1.7B", &dynamic) - peak("HuggingFaceTB/SmolLM2-1.7B", &offloaded);
    // 24 layers of keys and values, 32 heads of 64, in bf16; the last layer's and the first one's stay.
    let layer = 2 * 2 * 4096 * 32 * 64 * 2;
    assert!((21 * layer..=23 * layer).contains(&saved), "{saved} of {}", 24 * layer);
}

#[test]
fn beams_copy_what_the_encoder_made() {
    let one = plan(512, 8);
    let four = InferPlan { beams: 4, ..one.clone() };
    let more = peak("google/flan-t5-base", &four) - peak("google/flan-t5-base", &one);
    // Keys and values of 12 layers for the encoder's positions, for three beams more; one beam peaks in the encoder, so a
    // part of that is hidden.
    let crossed = 3 * 2 * 512 * 12 * 2 * 768 * 2;
    assert!(more > crossed / 2, "{more} beside {crossed}");
}

#[test]
fn a_decoder_without_a_cache_computes_everything_again() {
    let uncached = |new_tokens| InferPlan { cache: CacheImplementation::None, ..plan(64, new_tokens) };
    let [short, long] = [100, 200].map(|tokens| peak("google/flan-t5-base", &uncached(tokens)));
    // Logits of all positions so far, in bf16, for two prompts; a block may be 1 MiB larger than what is in it.
    assert!(long - short >= 100 * 2 * 32128 * 2 - (1 << 20), "{short} and {long}");
}

#[test]
fn reserved_bytes_stop_at_the_card() {
    let entry = catalogue::find("mosaicml/mpt-30b").unwrap();
    let mut config = entry.config;
    config["n_layers"] = 2.into();
    let model = Model::new(config, entry.auto_class.as_deref()).unwrap();
    let batch = Batch { batch_size: 32, seq_len: 1000, ..Batch::default() };
    let plan = InferPlan { batch, new_tokens: 16, ..InferPlan::default() };
    let simulation = simulation::infer(&model, &plan).unwrap();
    // MPT keeps no cache: each token's scores are a little longer than what was freed before them.
    assert!(simulation.replay.peak_allocated() < 40 << 30);
    assert!(simulation.process_bytes() <= plan.gpu.memory);
}

fn quantised(how: QuantizedCache) -> CacheImplementation {
    CacheImplementation::Quantized(how)
}

#[test]
fn a_quantised_cache_saves_all_layers_but_the_one_that_is_read() {
    let dynamic = InferPlan { batch: Batch { batch_size: 8, seq_len: 4096, ..Batch::default() }, ..plan(4096, 4) };
    let model = "HuggingFaceTB/SmolLM2-1.7B";
    let four = InferPlan { cache: quantised(QuantizedCache::default()), ..dynamic.clone() };
    let two =
        InferPlan { cache: quantised(QuantizedCache { bits: 2, ..QuantizedCache::default() }), ..dynamic.clone() };
    let [wide, four, two] = [&dynamic, &four, &two].map(|plan| peak(model, plan));
    // 24 layers of keys and values, 32 heads of 64; 4 bits and two bf16 numbers for 64 elements are 4.5 bits.
    let elements = 8 * 4096 * 24 * 2 * 32 * 64;
    let saved = elements * 2 - elements * 9 / 16;
    assert!(wide - four > saved * 8 / 10 && wide - four <= saved, "{} of {saved}", wide - four);
    assert!((four - two).abs_diff(elements / 4) < elements / 50, "{} beside {}", four - two, elements / 4);
}

#[test]
fn a_quantised_cache_of_sliding_layers_is_refused() {
    let entry = catalogue::find("google/gemma-3-1b-pt").or_else(|| catalogue::find("google/gemma-3-1b-it")).unwrap();
    let model = Model::new(entry.config, entry.auto_class.as_deref()).unwrap();
    let how = QuantizedCache { backend: CacheBackend::Hqq, ..QuantizedCache::default() };
    let refused = simulation::infer(&model, &InferPlan { cache: quantised(how), ..plan(64, 4) });
    assert!(refused.unwrap_err().to_string().contains("full attention"));
    let odd = QuantizedCache { bits: 3, ..how };
    assert!(InferPlan { cache: quantised(odd), ..plan(64, 4) }.check().is_err());
}

#[test]
fn whisper_generates_beside_its_encoder() {
    let speech = |new_tokens| InferPlan {
        batch: Batch { batch_size: 4, seq_len: 64, ..Batch::default() },
        ..plan(64, new_tokens)
    };
    let [few, many] = [4, 200].map(|tokens| peak("openai/whisper-tiny", &speech(tokens)));
    // 1500 positions in the encoder weigh more than 200 tokens beside them.
    assert_eq!(few, many);
    let entry = catalogue::find("openai/whisper-tiny").unwrap();
    let model = Model::new(entry.config, entry.auto_class.as_deref()).unwrap();
    let beams = simulation::infer(&model, &InferPlan { beams: 4, ..speech(4) });
    assert!(beams.unwrap_err().to_string().contains("speech"));
}

fn assisted(prompt: u64, new_tokens: u64, assistant: &str) -> InferPlan {
    let config = catalogue::find(assistant).unwrap().config;
    let assistant = Assistant { model: assistant.to_owned(), config, ..Assistant::default() };
    let batch = Batch { batch_size: 1, ..plan(prompt, new_tokens).batch };
    InferPlan { batch, assistant: Some(assistant), ..plan(prompt, new_tokens) }
}

#[test]
fn an_assistant_brings_its_weights_and_its_cache() {
    let with = assisted(2048, 24, "Qwen/Qwen2.5-0.5B");
    let without = InferPlan { assistant: None, ..with.clone() };
    let more = peak("Qwen/Qwen2.5-1.5B", &with) - peak("Qwen/Qwen2.5-1.5B", &without);
    // 494,032,768 parameters; 24 layers of keys and values, 2 heads of 64.
    let weights = 494_032_768 * 2;
    let cache = 24 * 2 * 2048 * 2 * 64 * 2;
    assert!(more >= weights + cache && more < weights + weights / 8, "{more} beside {weights} and {cache}");
}

#[test]
fn what_is_accepted_hardly_matters_to_the_peak() {
    let all = assisted(1024, 30, "Qwen/Qwen2.5-0.5B");
    let none = InferPlan { accepted: Accepted::None, ..all.clone() };
    let [all, none] = [all, none].map(|plan| peak("Qwen/Qwen2.5-1.5B", &plan));
    assert!(all.abs_diff(none) < all / 1000, "{all} and {none}");
}

#[test]
fn drafts_are_refused_where_transformers_refuses_them() {
    let entry = catalogue::find("Qwen/Qwen2.5-1.5B").unwrap();
    let model = Model::new(entry.config, entry.auto_class.as_deref()).unwrap();
    let good = InferPlan { prompt_lookup: Some(10), assistant: None, ..assisted(64, 4, "Qwen/Qwen2.5-0.5B") };
    simulation::infer(&model, &good).unwrap();
    let refused = |plan: InferPlan| simulation::infer(&model, &plan).unwrap_err().to_string();
    let two = Batch { batch_size: 2, ..good.batch.clone() };
    assert!(refused(InferPlan { batch: two, ..good.clone() }).contains("several prompts"));
    assert!(refused(InferPlan { cache: CacheImplementation::Static, ..good.clone() }).contains("a static cache"));
    assert!(refused(InferPlan { cache: CacheImplementation::None, ..good.clone() }).contains("no cache"));
    assert!(refused(InferPlan { beams: 2, ..good.clone() }).contains("beams"));
    assert!(
        refused(InferPlan { prompt_lookup: Some(0), ..good.clone() })
            .contains("prompt_lookup: 0 is not from 1 to 4096")
    );
    let nameless = InferPlan { prompt_lookup: None, assistant: Some(Assistant::default()), ..good };
    assert!(refused(nameless).contains("assistant"));
}

#[test]
fn a_model_with_a_state_cannot_forget_rejected_tokens() {
    let entry = catalogue::find("Qwen/Qwen3-Next-80B-A3B-Instruct").unwrap();
    let mut config = entry.config;
    config["num_hidden_layers"] = 4.into();
    let model = Model::new(config, entry.auto_class.as_deref()).unwrap();
    let plan = InferPlan { prompt_lookup: Some(10), assistant: None, ..assisted(64, 4, "Qwen/Qwen2.5-0.5B") };
    assert!(simulation::infer(&model, &plan).unwrap_err().to_string().contains("state"));
}

#[test]
fn beams_compute_experts_as_the_prompt_does() {
    let entry = catalogue::find("allenai/OLMoE-1B-7B-0924").unwrap();
    let model = Model::new(entry.config, entry.auto_class.as_deref()).unwrap();
    let gathered = |beams| {
        let run = simulation::infer(&model, &InferPlan { beams, ..plan(64, 4) }).unwrap();
        run.replay.peak_allocated()
    };
    // Without beams, decoding gathers 2 x 8 experts' matrices of 2 x 1024 x 2048; four beams would gather four times that.
    let one = 2 * 8 * 2 * 1024 * 2048 * 2;
    assert!(gathered(4) < gathered(1) + one, "{} and {}", gathered(1), gathered(4));
}

fn rows(file: &str) -> Vec<Value> {
    let path = format!("{}/../../truth/placement/{file}", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn map_of(row: &Value) -> DeviceMap {
    DeviceMap {
        how: serde_json::from_value(row["device_map"].clone()).unwrap(),
        cards: 64,
        max_memory: serde_json::from_value(row["max_memory"].clone()).unwrap(),
        modules: BTreeMap::new(),
    }
}

/// What transformers itself answers (truth/placement): bytes of weights on every device.
#[test]
fn modules_go_where_transformers_puts_them() {
    let mut known: BTreeMap<String, (Tree, BTreeMap<String, u64>)> = BTreeMap::new();
    let mut wrong = Vec::new();
    let all = rows("maps.jsonl");
    assert!(all.len() >= 48);
    for row in all {
        let name = row["model"].as_str().unwrap();
        let (tree, sizes) = known.entry(name.to_owned()).or_insert_with(|| {
            let entry = catalogue::find(name).unwrap();
            let model = Model::new(entry.config, entry.auto_class.as_deref()).unwrap();
            let program = model.program(Inputs::inventory()).unwrap();
            let size = |parameter: &Parameter| (parameter.name.clone(), parameter.shape.elements() * 2);
            let sizes = program.registration.iter().map(|id| size(&program.parameters[id.0 as usize])).collect();
            (Tree::of(&program, DType::BF16, None), sizes)
        });
        let dealt = Dealt { map: placement::place(tree, &map_of(&row), 0, false), main: 0 };
        let mut held: BTreeMap<String, u64> = BTreeMap::new();
        for (name, bytes) in sizes.iter() {
            let device = match dealt.holder(name) {
                Holder::Card(card) => card.to_string(),
                Holder::Host => "cpu".to_owned(),
                Holder::Disk => "disk".to_owned(),
            };
            *held.entry(device).or_default() += bytes;
        }
        let truth: BTreeMap<String, u64> = serde_json::from_value(row["held"].clone()).unwrap();
        if held != truth {
            wrong.push(format!("{} {name} {}: {held:?}, not {truth:?}", row["id"], row["device_map"]));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Peaks of every card of `generate` over a map, as transformers and accelerate run it.
#[test]
fn cards_of_a_map_peak_as_accelerate_runs_them() {
    let mut wrong = Vec::new();
    let all = rows("peaks.jsonl");
    assert!(all.len() >= 6);
    for row in all {
        let entry = catalogue::find(row["model"].as_str().unwrap()).unwrap();
        let model = Model::new(entry.config, entry.auto_class.as_deref()).unwrap();
        let batch = Batch { batch_size: 1, seq_len: row["prompt"].as_u64().unwrap(), ..Batch::default() };
        let device_map = Some(DeviceMap { cards: 2, ..map_of(&row) });
        let new_tokens = row["new_tokens"].as_u64().unwrap();
        let plan = InferPlan { batch, new_tokens, device_map, forced_length: new_tokens > 0, ..InferPlan::default() };
        let run = simulation::infer(&model, &plan).unwrap();
        for (card, rank) in run.ranks.iter().enumerate() {
            let truth = row["allocated"][card.to_string()].as_u64().unwrap();
            let off = rank.allocated as f64 / truth.max(1) as f64 - 1.0;
            println!("{} card {card}: {} of {truth}, {:+.4} %", row["id"], rank.allocated, off * 100.0);
            if rank.allocated.abs_diff(truth) > truth / 500 + (1 << 20) {
                wrong.push(format!("{} card {card}: {} of {truth}, {:+.2} %", row["id"], rank.allocated, off * 100.0));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
