//! Language models that also see or hear.
//!
//! A batch without images or audio runs the language model alone, as transformers does; the towers are then declared
//! but not run.

use super::{Family, Task};

pub mod blip2;
pub mod gemma3;
pub mod gemma3n;
mod gemma3n_audio;
mod gemma3n_text;
pub mod gemma4;
mod gemma4_audio;
mod gemma4_text;
mod gemma4_vision;
pub mod idefics3;
pub mod internvl;
pub mod lfm2_vl;
pub mod llama4;
pub mod llava;
pub mod mistral3;
pub mod mllama;
mod mllama_vision;
mod mobilenet_v5;
pub mod paligemma;
mod parts;
mod phi4_audio;
pub mod phi4_multimodal;
mod pixtral;
pub mod qwen2_5_vl;
pub mod qwen2_vl;
pub mod qwen3_5;
pub mod qwen3_vl;
mod qwen_text;
mod qwen_vision;
pub mod voxtral;

/// Heads of those that `MODEL_FOR_CAUSAL_LM_MAPPING_NAMES` names as well (transformers 5.17, models/auto/modeling_auto.py).
const ALSO_CAUSAL: Option<&[Task]> = Some(&[Task::ImageTextToText, Task::MultimodalLm, Task::CausalLm, Task::Base]);
/// Heads of a text model on its own.
const ONLY_CAUSAL: Option<&[Task]> = Some(&[Task::CausalLm, Task::Base]);

/// Every family in this folder.
pub const ALL: &[&Family] = &[
    &qwen2_5_vl::FAMILY,
    &qwen2_vl::FAMILY,
    &qwen3_vl::FAMILY,
    &llava::FAMILY,
    &llava::NEXT,
    &mistral3::FAMILY,
    &internvl::FAMILY,
    &paligemma::FAMILY,
    &idefics3::FAMILY,
    &idefics3::SMOLVLM,
    &voxtral::FAMILY,
    &gemma3::FAMILY,
    &gemma3n::FAMILY,
    &gemma3n::TEXT,
    &gemma4::FAMILY,
    &gemma4::TEXT,
    &mllama::FAMILY,
    &blip2::FAMILY,
    &phi4_multimodal::FAMILY,
    &qwen3_5::FAMILY,
    &lfm2_vl::FAMILY,
    &llama4::FAMILY,
];

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::ALL;
    use crate::model::{Images, Inputs, Model};
    use serde_json::{Value, json};

    /// A shallow model of each kind; everything else is the class default.
    fn config(model_type: &str, depth: u64) -> Value {
        let layers = json!({
            "num_hidden_layers": depth, "depth": depth.min(2), "num_global_layers": 1, "num_blocks": 1, "conf_num_hidden_layers": 1,
            "num_kv_shared_layers": depth / 3, "fullatt_block_indexes": [1], "deepstack_visual_indexes": [0],
            "intermediate_layers_indices": [0, 1, 2, 3, 4]
        });
        let mut config = layers.clone();
        for section in ["text_config", "vision_config", "audio_config", "qformer_config"] {
            config[section] = layers.clone();
        }
        config["model_type"] = json!(model_type);
        // Some class defaults do not fit together.
        match model_type {
            "qwen3_vl" => config["vision_config"]["out_hidden_size"] = json!(4096),
            "qwen3_vl_moe" => config["vision_config"]["out_hidden_size"] = json!(2048),
            "idefics3" | "smolvlm" => config["vision_config"]["image_size"] = json!(256),
            _ => {}
        }
        config
    }

    fn modes() -> [Inputs; 6] {
        let inventory = Inputs::inventory();
        let train = Inputs { batch: 2, labels: true, mask: true, cache: false, last_logits: None, ..inventory };
        let images = Some(Images { count: 2, height: 32, width: 32, frames: 1 });
        let seeing = Inputs { seq: 512, images, ..train.clone() };
        let hearing = Inputs { seq: 512, audio_frames: Some(3000), ..train.clone() };
        let prefill = Inputs { batch: 2, seq: 512, images, ..Inputs::inventory() };
        let decode = Inputs { batch: 2, seq: 1, past: 512, images, ..Inputs::inventory() };
        [Inputs::inventory(), train, seeing, hearing, prefill, decode]
    }

    #[test]
    fn class_defaults_run_in_every_mode_with_the_same_parameters() {
        for model_type in ALL.iter().flat_map(|family| family.model_types) {
            for class in ["AutoModelForImageTextToText", "AutoModel"] {
                // Text models on their own, and those of sound, are loaded by other classes.
                let has = super::super::with_head(model_type, super::Task::by_class(class).unwrap()).is_some();
                let class = if has { Some(class) } else { None };
                let model = Model::new(config(model_type, 6), class).unwrap();
                let run =
                    |inputs| model.program(inputs).unwrap_or_else(|error| panic!("{model_type} {class:?}: {error}"));
                let programs = modes().map(run);
                for program in &programs {
                    assert!(program.parameters == programs[0].parameters, "{model_type} {class:?}");
                }
            }
        }
    }

    #[test]
    fn impossible_sizes_are_refused_without_a_panic() {
        let keys = [
            "hidden_size",
            "num_attention_heads",
            "num_heads",
            "num_key_value_heads",
            "head_dim",
            "intermediate_size",
            "patch_size",
            "image_size",
            "spatial_merge_size",
            "embed_dim",
            "max_num_tiles",
            "attention_chunk_size",
            "num_channels",
            "in_channels",
            "temporal_patch_size",
            "num_position_embeddings",
            "global_head_dim",
        ];
        for model_type in ALL.iter().flat_map(|family| family.model_types) {
            for section in ["text_config", "vision_config", "audio_config", "qformer_config", ""] {
                for (key, value) in keys.iter().flat_map(|key| [(key, 0), (key, 7), (key, 1_u64 << 32)]) {
                    let mut config = config(model_type, 1);
                    if section.is_empty() {
                        config[*key] = json!(value);
                    } else {
                        config[section][*key] = json!(value);
                    }
                    let model = Model::new(config, None).unwrap();
                    let images = Some(Images { count: 2, height: 0, width: 7, frames: 0 });
                    let _ = model.program(Inputs {
                        batch: 3,
                        seq: 5,
                        images,
                        audio_frames: Some(1),
                        ..Inputs::inventory()
                    });
                }
            }
        }
    }
}
