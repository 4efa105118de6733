//! Dense decoders of the Llama generation: RMSNorm, rotary positions, gated MLPs, grouped heads.

use super::Family;
use crate::model::Task;

pub mod apertus;
pub mod arcee;
pub mod bitnet;
pub mod cohere;
pub(crate) mod decoder;
pub mod ernie4_5;
pub mod gemma;
pub mod gemma3;
pub mod glm;
pub mod granite;
pub mod jais2;
pub mod llama;
pub mod ministral;
pub mod nemotron;
pub mod olmo;
pub mod olmo2;
pub mod phi;
pub mod phi3;
pub mod seed_oss;
pub mod smollm3;
pub mod stablelm;
pub mod starcoder2;

/// Heads of those that transformers has no class over samples for (5.22, models/auto/modeling_auto.py).
const UNSCORED: Option<&[Task]> = Some(&[Task::CausalLm, Task::Base]);

/// Every family in this folder.
pub const ALL: &[&Family] = &[
    &llama::FAMILY,
    &llama::MISTRAL,
    &ministral::MINISTRAL,
    &ministral::MINISTRAL3,
    &ministral::CWM,
    &llama::QWEN2,
    &llama::QWEN3,
    &gemma::FAMILY,
    &gemma3::GEMMA2,
    &gemma3::FAMILY,
    &phi::FAMILY,
    &phi3::FAMILY,
    &stablelm::FAMILY,
    &starcoder2::FAMILY,
    &olmo::FAMILY,
    &olmo2::OLMO2,
    &olmo2::OLMO3,
    &olmo2::EXAONE4,
    &smollm3::FAMILY,
    &seed_oss::FAMILY,
    &apertus::FAMILY,
    &arcee::FAMILY,
    &jais2::FAMILY,
    &bitnet::FAMILY,
    &granite::FAMILY,
    &ernie4_5::FAMILY,
    &nemotron::FAMILY,
    &cohere::COHERE,
    &cohere::COHERE2,
    &glm::GLM,
    &glm::GLM4,
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Inputs, Model};
    use serde_json::json;

    fn modes() -> [Inputs; 4] {
        let inventory = Inputs::inventory();
        let training = Inputs { batch: 2, labels: true, mask: true, cache: false, last_logits: None, ..inventory };
        let prefill = Inputs { batch: 3, seq: 5, ..Inputs::inventory() };
        let decode = Inputs { batch: 3, seq: 1, past: 7, ..Inputs::inventory() };
        [Inputs::inventory(), training, prefill, decode]
    }

    #[test]
    fn class_defaults_run_in_every_mode_with_the_same_parameters() {
        for model_type in ALL.iter().flat_map(|family| family.model_types) {
            for class in ["AutoModelForCausalLM", "AutoModel", "AutoModelForSequenceClassification"] {
                let config = json!({"model_type": model_type, "num_hidden_layers": 5});
                if !crate::model::families::tasks(model_type).unwrap().contains(&Task::by_class(class).unwrap()) {
                    assert!(Model::new(config, Some(class)).is_err(), "{model_type} {class}");
                    continue;
                }
                let model = Model::new(config, Some(class)).unwrap();
                let programs = modes().map(|inputs| model.program(inputs).unwrap());
                for program in &programs {
                    assert_eq!(program.parameters, programs[0].parameters, "{model_type} {class}");
                }
            }
        }
    }

    #[test]
    fn impossible_sizes_are_refused_without_a_panic() {
        let keys = ["hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"];
        for model_type in ALL.iter().flat_map(|family| family.model_types) {
            for (key, value) in keys.iter().flat_map(|key| [(key, 0), (key, 7), (key, 1_u64 << 32)]) {
                let mut config = json!({"model_type": model_type, "num_hidden_layers": 2, "qk_layernorm": true});
                config[*key] = json!(value);
                let _ = Model::new(config, None).unwrap().inventory();
            }
            let config = json!({"model_type": model_type, "num_hidden_layers": 2, "layer_types": ["other"]});
            let _ = Model::new(config, None).unwrap().inventory();
        }
    }
}
