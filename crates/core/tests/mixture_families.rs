//! GPT-style decoders and mixtures of experts: every mode declares the same parameters, and no size panics.

use serde_json::{Value, json};
use vramcast_core::model::families::{Family, gpt, mixtures};
use vramcast_core::model::{Inputs, Model};

fn configs() -> impl Iterator<Item = Value> {
    let folders: [&[&Family]; 2] = [gpt::ALL, mixtures::ALL];
    let types = folders.into_iter().flatten().flat_map(|family| family.model_types.iter());
    types.map(|model_type| {
        // DeepSeek-V2 has no default for it; layers of every kind stand among the first five.
        let mut config = json!({"model_type": model_type, "num_experts_per_tok": 4});
        for key in ["num_hidden_layers", "n_layer", "n_layers", "num_layers"] {
            config[key] = 5.into();
        }
        config
    })
}

fn modes() -> [Inputs; 5] {
    let inventory = Inputs::inventory();
    let training = Inputs { batch: 2, seq: 300, labels: true, cache: false, last_logits: None, ..inventory.clone() };
    let padded = Inputs { mask: true, ..training.clone() };
    let prefill = Inputs { batch: 3, seq: 257, mask: true, ..inventory.clone() };
    let decode = Inputs { batch: 3, seq: 1, past: 1000, mask: true, ..inventory.clone() };
    [inventory, training, padded, prefill, decode]
}

#[test]
fn every_mode_runs_and_declares_the_same_parameters() {
    for config in configs() {
        for class in ["AutoModel", "AutoModelForCausalLM"] {
            let model = Model::new(config.clone(), Some(class)).unwrap();
            let programs = modes().map(|mode| model.program(mode).unwrap_or_else(|error| panic!("{config}: {error}")));
            let names = |program: &vramcast_core::model::Program| {
                let mut names: Vec<_> = program.parameters.iter().map(|p| (p.name.clone(), p.shape)).collect();
                names.sort();
                names
            };
            let first = names(&programs[0]);
            assert!(programs.iter().all(|program| names(program) == first), "{config} {class}");
        }
    }
}

#[test]
fn odd_values_give_errors_not_panics() {
    let odd = [json!(0), json!(1), json!(3), json!(4_294_967_296_u64), json!(-1), json!(0.5), json!("x"), json!([1])];
    let keys = [
        "vocab_size",
        "hidden_size",
        "n_embd",
        "d_model",
        "num_attention_heads",
        "n_head",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "num_experts_per_tok",
        "num_local_experts",
        "n_routed_experts",
        "n_group",
        "topk_group",
        "kv_lora_rank",
        "q_lora_rank",
        "qk_rope_head_dim",
        "rotary_dim",
        "sliding_window",
        "layer_types",
        "hc_mult",
        "o_groups",
        "partial_rotary_factor",
    ];
    for config in configs() {
        for key in keys {
            for value in &odd {
                let mut config = config.clone();
                config[key] = value.clone();
                if let Ok(model) = Model::new(config, None) {
                    let _ = model.program(Inputs { batch: 2, seq: 150, ..Inputs::inventory() });
                }
            }
        }
    }
}

/// GLM-4.7 Flash by its class's defaults, which are its config: what transformers 5.22 has of it, tensor by tensor.
#[test]
fn glm_flash_is_as_large_as_transformers_makes_it() {
    let model = Model::new(json!({"model_type": "glm4_moe_lite"}), Some("AutoModelForCausalLM")).unwrap();
    let inventory = model.inventory().unwrap();
    assert_eq!((inventory.total(), inventory.parameters.len()), (29_943_390_976, 705));
    let built_in = vramcast_core::source::catalogue::find("GLM-4.7-Flash").unwrap();
    let built_in = Model::new(built_in.config, built_in.auto_class.as_deref()).unwrap();
    assert_eq!(built_in.inventory().unwrap().total(), inventory.total());
}
