//! Checkpoints that are quantised already, and adapters other than LoRA: what is on the card, and what is refused.

use serde_json::{Value, json};
use vramcast_core::memory::simulation;
use vramcast_core::model::Model;
use vramcast_core::plan::adapter::{Ia3Plan, OtherAdapter, PrefixPlan, PromptPlan, VeraPlan};
use vramcast_core::plan::{AdapterPlan, Batch, InferPlan, LoraPlan, Quantization, Targets, TrainPlan};

fn model(quantization: Value) -> Model {
    let mut config = json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 1000, "intermediate_size": 1024,
    });
    if !quantization.is_null() {
        config["quantization_config"] = quantization;
    }
    Model::new(config, None).unwrap()
}

fn gptq() -> Value {
    json!({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": true})
}

fn lora() -> TrainPlan {
    let lora = LoraPlan { targets: Targets::Names(vec!["q_proj".into(), "v_proj".into()]), ..LoraPlan::default() };
    TrainPlan { batch: Batch { seq_len: 64, ..Batch::default() }, adapter: Some(AdapterPlan::Lora(lora)), ..plan() }
}

fn plan() -> TrainPlan {
    TrainPlan { batch: Batch { seq_len: 64, ..Batch::default() }, ..TrainPlan::default() }
}

fn other(adapter: OtherAdapter) -> TrainPlan {
    TrainPlan { adapter: Some(AdapterPlan::Other(adapter)), ..plan() }
}

fn refusal(model: &Model, plan: &TrainPlan) -> String {
    simulation::train(model, plan).unwrap_err().to_string()
}

/// The weights of a generation, as the first phase finds them.
fn weights(model: &Model) -> u64 {
    let plan = InferPlan { batch: Batch { seq_len: 8, ..Batch::default() }, new_tokens: 1, ..InferPlan::default() };
    let simulation = simulation::infer(model, &plan).unwrap();
    assert!(simulation.replay.peak_allocated() > 0);
    simulation.replay.phases[0].before
}

#[test]
fn a_stored_base_weighs_what_its_config_says() {
    let dense = weights(&model(Value::Null));
    let fp8 = json!({"quant_method": "fp8", "weight_block_size": [128, 128]});
    let hqq = json!({"quant_method": "hqq", "skip_modules": ["lm_head"],
        "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64, "axis": 1}}});
    let nf4 = json!({"quant_method": "bitsandbytes", "load_in_4bit": true, "bnb_4bit_quant_type": "nf4"});
    // Linears are 5.24 M of 6.27 M parameters: half their bytes in fp8, about a quarter in 4 bits.
    for (config, at_least, at_most) in [(fp8, 50, 62), (gptq(), 28, 42), (hqq, 28, 42), (nf4, 28, 42)] {
        let share = 100 * weights(&model(config.clone())) / dense;
        assert!((at_least..=at_most).contains(&share), "{config}: {share} %");
    }
}

#[test]
fn adapters_go_beside_what_can_be_trained() {
    let quantised = simulation::train(&model(gptq()), &lora()).unwrap();
    let dense = simulation::train(&model(Value::Null), &lora()).unwrap();
    assert!(quantised.replay.phases[0].before < dense.replay.phases[0].before);
    assert!(quantised.notes.iter().any(|note| note.contains("gptq")));
    // What transformers cannot train quantised is taken in full, and that is said.
    let fp8 = model(json!({"quant_method": "fp8", "weight_block_size": [128, 128]}));
    let full = simulation::train(&fp8, &lora()).unwrap();
    assert_eq!(full.replay.phases[0].before, dense.replay.phases[0].before);
    assert!(full.notes.iter().any(|note| note.contains("dequantize")));
}

#[test]
fn what_cannot_run_is_refused_with_its_reason() {
    let quantised = model(gptq());
    assert!(refusal(&quantised, &plan()).contains("train an adapter beside them"));
    let twice = TrainPlan { quantization: Some(Quantization::default()), ..lora() };
    assert!(refusal(&quantised, &twice).contains("quantised already"));
    let dora = LoraPlan { dora: true, targets: Targets::Names(vec!["q_proj".into()]), ..LoraPlan::default() };
    let dora = TrainPlan { adapter: Some(AdapterPlan::Lora(dora)), ..plan() };
    assert!(refusal(&quantised, &dora).contains("DoRA"));
    let all = LoraPlan { targets: Targets::AllLinear, ..LoraPlan::default() };
    let all = TrainPlan { adapter: Some(AdapterPlan::Lora(all)), ..plan() };
    assert!(refusal(&quantised, &all).contains("all-linear"));
    let prefix = PrefixPlan { virtual_tokens: 4, projection: false, encoder_hidden_size: None };
    // Two layers of 2 × 512 for each of 4 tokens.
    assert!(refusal(&model(Value::Null), &other(OtherAdapter::PrefixTuning(prefix))).contains("8192 parameters"));
}

#[test]
fn other_methods_train_what_peft_counts() {
    let model = model(Value::Null);
    let inventory = model.inventory().unwrap();
    let prompt = PromptPlan { virtual_tokens: 16, encoder_decoder: false };
    for adapter in [
        OtherAdapter::Ia3(Ia3Plan::default()),
        OtherAdapter::Vera(VeraPlan { rank: 64, ..VeraPlan::default() }),
        OtherAdapter::PromptTuning(prompt),
    ] {
        let expected = adapter.trainable("llama", &inventory).unwrap();
        let simulation = simulation::train(&model, &other(adapter.clone())).unwrap();
        let trained = simulation.adapter.as_ref().unwrap().trainable();
        assert_eq!(trained, expected, "{}", adapter.name());
        assert!(simulation.replay.peak_allocated() > 0);
    }
}
