//! Ways of keeping a cache in `generate`, and decoders beside encoders.

#![allow(clippy::unwrap_used)]

use vramcast_core::memory::simulation;
use vramcast_core::model::Model;
use vramcast_core::plan::{Batch, CacheImplementation, InferPlan};
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
