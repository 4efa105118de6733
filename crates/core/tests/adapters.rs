//! What PEFT trains: counts that PEFT 0.21.2 gave on the meta device, and what it refuses.

use serde_json::{Value, json};
use vramcast_core::model::{Inventory, Model};
use vramcast_core::plan::adapter::{
    AdapterLayout, Ia3Plan, LoraBias, LoraPlan, OftPlan, OtherAdapter, PrefixPlan, PromptPlan, Targets, VeraPlan,
};

fn llama() -> (Inventory, &'static str) {
    let config = json!({
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": true,
    });
    (inventory(config), "llama")
}

fn gpt2() -> (Inventory, &'static str) {
    let config = json!({
        "model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024,
    });
    (inventory(config), "gpt2")
}

fn mixtral() -> (Inventory, &'static str) {
    let config = json!({
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8,
        "num_experts_per_tok": 2,
    });
    (inventory(config), "mixtral")
}

fn inventory(config: Value) -> Inventory {
    Model::new(config, Some("AutoModelForCausalLM")).unwrap().inventory().unwrap()
}

fn names(list: &[&str]) -> Targets {
    Targets::Names(list.iter().map(|name| (*name).to_owned()).collect())
}

fn trained(plan: &LoraPlan, (inventory, model_type): &(Inventory, &'static str)) -> Result<u64, String> {
    AdapterLayout::of_inventory(plan, model_type, inventory).map(|l| l.trainable()).map_err(|e| e.to_string())
}

#[test]
fn targets_are_found_as_peft_finds_them() {
    let model = llama();
    let plan = |targets: Targets| LoraPlan { rank: 16, targets, ..LoraPlan::default() };
    let attention = names(&["q_proj", "v_proj"]);
    let whole = trained(&plan(attention.clone()), &model).unwrap();
    assert_eq!(whole, 16 * 16 * (2048 + 2048 + 2048 + 512));
    assert_eq!(trained(&plan(Targets::Default), &model).unwrap(), whole);
    assert_eq!(trained(&plan(Targets::parse(r".*\.self_attn\.(q|v)_proj")), &model).unwrap(), whole);
    let some = LoraPlan { layers_to_transform: vec![0, 3], ..plan(attention.clone()) };
    assert_eq!(trained(&some, &model).unwrap(), whole / 8);
    let without = LoraPlan { exclude: Some(names(&["v_proj"])), ..plan(attention.clone()) };
    assert_eq!(trained(&without, &model).unwrap(), 16 * 16 * (2048 + 2048));
    let ranked = LoraPlan { rank_pattern: vec![("q_proj".into(), 32)], ..plan(attention) };
    assert_eq!(trained(&ranked, &model).unwrap(), 16 * (32 * 4096 + 16 * 2560));
}

#[test]
fn copies_magnitudes_and_biases_are_counted() {
    let model = llama();
    let plan = LoraPlan { rank: 16, targets: names(&["q_proj"]), ..LoraPlan::default() };
    let base = trained(&plan, &model).unwrap();
    let dora = LoraPlan { dora: true, ..plan.clone() };
    assert_eq!(trained(&dora, &model).unwrap() - base, 16 * 2048);
    // Tied or not, both are copied.
    let saved = LoraPlan { modules_to_save: vec!["embed_tokens".into(), "lm_head".into()], ..plan };
    assert_eq!(trained(&saved, &model).unwrap() - base, 525_336_576);
    let biased = LoraPlan { targets: names(&["c_attn"]), bias: LoraBias::LoraOnly, ..LoraPlan::default() };
    assert_eq!(trained(&biased, &gpt2()).unwrap(), 12 * (8 * (768 + 2304) + 2304));
}

#[test]
fn fused_experts_take_the_rank_of_all_that_is_fused() {
    let model = mixtral();
    let plan = |targets: Targets| LoraPlan { rank: 16, targets, ..LoraPlan::default() };
    assert_eq!(trained(&plan(Targets::AllLinear), &model).unwrap(), 359_665_664);
    assert!(trained(&plan(Targets::Default), &model).is_err(), "PEFT refuses its own default here");
    assert!(trained(&plan(names(&["w1"])), &model).is_err(), "w1 and w3 are fused");
}

#[test]
fn refusals_name_what_exists() {
    let model = llama();
    let wrong = LoraPlan { targets: names(&["query"]), ..LoraPlan::default() };
    let message = trained(&wrong, &model).unwrap_err();
    assert!(message.contains("query") && message.contains("q_proj"), "{message}");
    let container = LoraPlan { targets: names(&["self_attn"]), ..LoraPlan::default() };
    assert!(trained(&container, &model).unwrap_err().contains("self_attn"));
    assert!(trained(&LoraPlan { rank: 0, ..LoraPlan::default() }, &model).is_err());
    assert!(trained(&LoraPlan { targets: Targets::parse("(("), ..LoraPlan::default() }, &model).is_err());
}

#[test]
fn other_methods_are_counted() {
    let (llama, gpt2) = (llama(), gpt2());
    let count = |adapter: OtherAdapter, (inventory, model_type): &(Inventory, &'static str)| {
        adapter.trainable(model_type, inventory).map_err(|e| e.to_string())
    };
    let prompt = OtherAdapter::PromptTuning(PromptPlan { virtual_tokens: 20, encoder_decoder: false });
    let prefix = |projection| {
        OtherAdapter::PrefixTuning(PrefixPlan { virtual_tokens: 20, projection, encoder_hidden_size: None })
    };
    let by_rank = OftPlan { targets: names(&["q_proj", "down_proj"]), rank: 8, block_size: 0, block_share: false };
    for (adapter, on_llama, on_gpt2) in [
        (OtherAdapter::Ia3(Ia3Plan::default()), Some(147_456), Some(64_512)),
        (OtherAdapter::Vera(VeraPlan::default()), Some(49_152), Some(30_720)),
        (OtherAdapter::Oft(OftPlan::default()), Some(1_015_808), None),
        (OtherAdapter::Oft(by_rank), Some(71_221_248), None),
        (prompt, Some(40_960), Some(15_360)),
        (prefix(false), Some(327_680), Some(368_640)),
        (prefix(true), Some(8_677_888), Some(14_780_160)),
    ] {
        assert_eq!(count(adapter.clone(), &llama).ok(), on_llama, "{adapter:?}");
        assert_eq!(count(adapter.clone(), &gpt2).ok(), on_gpt2, "{adapter:?}");
    }
}
