//! State-space models, linear attention, and hybrids of them with attention.

use super::Family;

mod gated_delta;
pub mod granite_hybrid;
pub mod jamba;
pub mod lfm2;
pub mod mamba;
pub mod mamba2;
mod mamba2_mixer;
mod mamba2_sums;
mod mamba_mixer;
pub mod nemotron_h;
pub mod qwen3_next;
pub mod recurrent_gemma;
pub mod rwkv;
mod state;
pub mod zamba2;

/// Every family in this folder.
pub const ALL: &[&Family] = &[
    &mamba::FAMILY,
    &mamba2::FAMILY,
    &jamba::FAMILY,
    &zamba2::FAMILY,
    &granite_hybrid::FAMILY,
    &nemotron_h::FAMILY,
    &lfm2::FAMILY,
    &qwen3_next::FAMILY,
    &qwen3_next::QWEN3_5,
    &qwen3_next::QWEN3_5_MOE,
    &recurrent_gemma::FAMILY,
    &rwkv::FAMILY,
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Inputs, Model, Sharing};
    use serde_json::{Value, json};

    fn modes() -> [Inputs; 6] {
        let inventory = Inputs::inventory();
        let training = Inputs { batch: 2, labels: true, mask: true, cache: false, last_logits: None, ..inventory };
        [
            Inputs::inventory(),
            Inputs { seq: 70, ..training.clone() },
            training,
            Inputs { batch: 3, seq: 2, ..Inputs::inventory() },
            Inputs { batch: 3, seq: 1, past: 7, ..Inputs::inventory() },
            Inputs { batch: 3, seq: 5, past: 7, ..Inputs::inventory() },
        ]
    }

    fn model_types() -> impl Iterator<Item = &'static str> {
        ALL.iter().flat_map(|family| family.model_types).copied().chain(["qwen3_5", "qwen3_5_moe"])
    }

    #[test]
    fn layers_that_are_wrapped_one_by_one_do_not_share_a_block() {
        let model = Model::new(json!({"model_type": "zamba2"}), None).unwrap();
        let copies = |sharing, name: &str| {
            let program = model.program(Inputs { sharing, ..Inputs::inventory() }).unwrap();
            program.parameters.iter().filter(|parameter| parameter.name.ends_with(name)).count()
        };
        let (norm, linear) =
            ("shared_transformer.input_layernorm.weight", "shared_transformer.self_attn.q_proj.weight");
        let uses = 9;
        assert_eq!([copies(Sharing::Once, norm), copies(Sharing::Once, linear)], [1, 1]);
        assert_eq!([copies(Sharing::LinearsApart, norm), copies(Sharing::LinearsApart, linear)], [1, uses]);
        assert_eq!([copies(Sharing::Apart, norm), copies(Sharing::Apart, linear)], [uses, uses]);
    }

    #[test]
    fn class_defaults_run_in_every_mode_with_the_same_parameters() {
        for model_type in model_types() {
            for class in ["AutoModelForCausalLM", "AutoModel"] {
                let config = json!({"model_type": model_type, "num_hidden_layers": 5});
                let model = Model::new(config, Some(class)).unwrap();
                let sorted = |inputs| {
                    let mut parameters = model.program(inputs).unwrap().parameters;
                    crate::order::sort_by(&mut parameters, |a, b| a.name.cmp(&b.name));
                    parameters
                };
                let [first, others @ ..] = modes().map(sorted);
                others.iter().for_each(|other| assert_eq!(*other, first, "{model_type} {class}"));
            }
        }
    }

    #[test]
    fn impossible_values_are_refused_without_a_panic() {
        let keys = "hidden_size num_attention_heads num_key_value_heads head_dim intermediate_size num_heads n_groups \
            state_size conv_kernel expand time_step_rank chunk_size mamba_expand mamba_d_state mamba_dt_rank n_mamba_heads \
            mamba_ngroups num_mem_blocks adapter_rank mamba_n_heads mamba_n_groups mamba_d_conv num_local_experts \
            num_experts num_experts_per_tok mamba_num_heads mamba_head_dim ssm_state_size n_group topk_group conv_L_cache \
            block_ff_dim lru_width conv1d_width attention_hidden_size linear_num_key_heads linear_num_value_heads \
            linear_key_head_dim linear_value_head_dim full_attention_interval partial_rotary_factor layer_types \
            layers_block_type hybrid_override_pattern block_types block_ffn_dim_multiplier attn_layer_period";
        let values = [json!(0), json!(7), json!(1_u64 << 32), json!(-1), json!("x"), json!([]), json!(["other"])];
        for model_type in model_types() {
            for key in keys.split_whitespace() {
                for value in &values {
                    let mut config = json!({"model_type": model_type, "num_hidden_layers": 2});
                    config[key] = value.clone();
                    config["text_config"] = config.clone();
                    for inputs in [Inputs::inventory(), Inputs { seq: 1, past: 3, ..Inputs::inventory() }] {
                        let _ = Model::new(config.clone(), None).unwrap().program(inputs);
                    }
                }
            }
        }
    }

    #[test]
    fn states_have_the_sizes_that_transformers_keeps() {
        let states = |config: Value| Model::new(config, None).unwrap().inventory().unwrap().constant_state_elements();
        let layers = |model_type| json!({"model_type": model_type, "num_hidden_layers": 2});
        assert_eq!(states(layers("mamba")), 2 * (1536 * 4 + 1536 * 16));
        assert_eq!(states(layers("mamba2")), 2 * (10240 * 4 + 128 * 64 * 128));
        assert_eq!(states(layers("rwkv")), 2 * 5 * 4096);
        assert_eq!(states(layers("recurrent_gemma")), 2 * (2560 * 3 + 2560));
        assert_eq!(states(layers("qwen3_next")), 2 * (8192 * 4 + 32 * 128 * 128));
    }
}
