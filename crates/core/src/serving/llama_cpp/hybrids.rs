//! What GGUF calls the parts of layers with states, and of Gemma 4's layers with experts (gguf-py/gguf/tensor_mapping.py and
//! conversion/*.py of llama.cpp).

use serde_json::Value as Json;

use crate::model::op::{CacheKind, CacheUpdate};
use crate::serving::ServedModel;
use crate::source::gguf::Value;

/// Names that are one name in GGUF.
const NAMES: &[(&str, &str)] = &[
    ("linear_attn.in_proj_qkv.weight", "attn_qkv.weight"),
    ("linear_attn.in_proj_z.weight", "attn_gate.weight"),
    ("linear_attn.in_proj_b.weight", "ssm_beta.weight"),
    ("linear_attn.in_proj_a.weight", "ssm_alpha.weight"),
    ("linear_attn.in_proj_ba.weight", "ssm_ba.weight"),
    ("linear_attn.dt_bias", "ssm_dt.bias"),
    ("linear_attn.A_log", "ssm_a"),
    ("linear_attn.norm.weight", "ssm_norm.weight"),
    ("linear_attn.out_proj.weight", "ssm_out.weight"),
    ("mamba.in_proj.weight", "ssm_in.weight"),
    ("mamba.conv1d.bias", "ssm_conv1d.bias"),
    ("mamba.dt_bias", "ssm_dt.bias"),
    ("mamba.out_proj.weight", "ssm_out.weight"),
    ("conv.in_proj.weight", "shortconv.in_proj.weight"),
    ("conv.out_proj.weight", "shortconv.out_proj.weight"),
    ("operator_norm.weight", "attn_norm.weight"),
    ("self_attn.q_layernorm.weight", "attn_q_norm.weight"),
    ("self_attn.k_layernorm.weight", "attn_k_norm.weight"),
    ("feed_forward.w1.weight", "ffn_gate.weight"),
    ("feed_forward.w3.weight", "ffn_up.weight"),
    ("feed_forward.w2.weight", "ffn_down.weight"),
    ("block_sparse_moe.router.weight", "ffn_gate_inp.weight"),
    ("router.proj.weight", "ffn_gate_inp.weight"),
    // BERT.
    ("attention.self.query.weight", "attn_q.weight"),
    ("attention.self.query.bias", "attn_q.bias"),
    ("attention.self.key.weight", "attn_k.weight"),
    ("attention.self.key.bias", "attn_k.bias"),
    ("attention.self.value.weight", "attn_v.weight"),
    ("attention.self.value.bias", "attn_v.bias"),
    ("attention.output.dense.weight", "attn_output.weight"),
    ("attention.output.dense.bias", "attn_output.bias"),
    ("attention.output.LayerNorm.weight", "attn_output_norm.weight"),
    ("attention.output.LayerNorm.bias", "attn_output_norm.bias"),
    ("intermediate.dense.weight", "ffn_up.weight"),
    ("intermediate.dense.bias", "ffn_up.bias"),
    ("output.dense.weight", "ffn_down.weight"),
    ("output.dense.bias", "ffn_down.bias"),
    ("output.LayerNorm.weight", "layer_output_norm.weight"),
    ("output.LayerNorm.bias", "layer_output_norm.bias"),
    // Nemotron-H: every layer is one thing.
    ("norm.weight", "attn_norm.weight"),
    ("mixer.in_proj.weight", "ssm_in.weight"),
    ("mixer.conv1d.bias", "ssm_conv1d.bias"),
    ("mixer.dt_bias", "ssm_dt.bias"),
    ("mixer.out_proj.weight", "ssm_out.weight"),
    ("mixer.q_proj.weight", "attn_q.weight"),
    ("mixer.k_proj.weight", "attn_k.weight"),
    ("mixer.v_proj.weight", "attn_v.weight"),
    ("mixer.o_proj.weight", "attn_output.weight"),
    ("mixer.up_proj.weight", "ffn_up.weight"),
    ("mixer.down_proj.weight", "ffn_down.weight"),
    ("mixer.gate.weight", "ffn_gate_inp.weight"),
    ("mixer.gate.e_score_correction_bias", "exp_probs_b.bias"),
    ("mixer.experts.up_proj", "ffn_up_exps.weight"),
    ("mixer.experts.down_proj", "ffn_down_exps.weight"),
    ("mixer.shared_experts.up_proj.weight", "ffn_up_shexp.weight"),
    ("mixer.shared_experts.down_proj.weight", "ffn_down_shexp.weight"),
    ("mixer.fc1_latent_proj.weight", "ffn_latent_down.weight"),
    ("mixer.fc2_latent_proj.weight", "ffn_latent_up.weight"),
    ("router.scale", "ffn_gate_inp.scale"),
    ("router.per_expert_scale", "ffn_down_exps.scale"),
    ("pre_feedforward_layernorm_2.weight", "pre_ffw_norm_2.weight"),
    ("post_feedforward_layernorm_1.weight", "post_ffw_norm_1.weight"),
    ("post_feedforward_layernorm_2.weight", "post_ffw_norm_2.weight"),
    ("experts.down_proj", "ffn_down_exps.weight"),
    ("experts.gate_up_proj", "ffn_gate_up_exps.weight"),
    // Gemma's E models.
    ("per_layer_input_gate.weight", "inp_gate.weight"),
    ("per_layer_projection.weight", "proj.weight"),
    ("post_per_layer_input_norm.weight", "post_norm.weight"),
    ("altup.correct_output_scale", "altup_correct_scale.weight"),
    ("altup.correction_coefs.weight", "altup_correct_coef.weight"),
    ("altup.modality_router.weight", "altup_router.weight"),
    ("altup.prediction_coefs.weight", "altup_predict_coef.weight"),
    ("altup.router_norm.weight", "altup_router_norm.weight"),
    ("laurel.linear_left.weight", "laurel_l.weight"),
    ("laurel.linear_right.weight", "laurel_r.weight"),
    ("laurel.post_laurel_norm.weight", "laurel_post_norm.weight"),
];

/// Names a weight, where it is one of these; `push` takes its name and sizes, the slowest first.
pub(super) fn named(
    inner: &str,
    shape: &[u64],
    config: &Json,
    served: &ServedModel,
    push: &mut impl FnMut(String, Vec<u64>),
) -> bool {
    if let Some((_, to)) = NAMES.iter().find(|(from, _)| *from == inner) {
        push((*to).to_owned(), shape.to_vec());
        return true;
    }
    let size = |key: &str| config[key].as_u64().unwrap_or(0);
    let (rows, columns) = (shape.first().copied().unwrap_or(0), shape.last().copied().unwrap_or(0));
    match inner {
        // Groups of one channel are no dimension.
        "linear_attn.conv1d.weight" | "mamba.conv1d.weight" | "mixer.conv1d.weight" => {
            push("ssm_conv1d.weight".into(), vec![rows, columns])
        }
        "conv.conv.weight" => push("shortconv.conv.weight".into(), vec![rows, columns]),
        "mamba.A_log" | "mixer.A_log" => push("ssm_a".into(), vec![rows, 1]),
        "mamba.D" | "mixer.D" => push("ssm_d".into(), vec![rows, 1]),
        "mamba.norm.weight" | "mixer.norm.weight" => {
            let groups = size("mamba_n_groups").max(size("n_groups")).max(1);
            push("ssm_norm.weight".into(), vec![groups, rows / groups]);
        }
        "linear_attn.in_proj_qkvz.weight" => {
            let gate = size("linear_num_value_heads").saturating_mul(size("linear_value_head_dim")).min(rows);
            push("attn_qkv.weight".into(), vec![rows - gate, columns]);
            push("attn_gate.weight".into(), vec![gate, columns]);
        }
        "shared_mlp.input_linear.weight" => {
            let end = if served.chosen_experts > 0 { "_shexp" } else { "" };
            push(format!("ffn_gate{end}.weight"), vec![rows / 2, columns]);
            push(format!("ffn_up{end}.weight"), vec![rows / 2, columns]);
        }
        "shared_mlp.output_linear.weight" => {
            let end = if served.chosen_experts > 0 { "_shexp" } else { "" };
            push(format!("ffn_down{end}.weight"), shape.to_vec());
        }
        _ => return false,
    }
    true
}

/// Whether a cache holds keys and values of a layer's own tokens.
pub(super) fn grows(cache: &&CacheUpdate) -> bool {
    !matches!(cache.kind, CacheKind::State { .. } | CacheKind::Cross)
}

/// Sizes of states, and which layers have them.
pub(super) fn metadata(config: &Json, served: &ServedModel, put: &mut impl FnMut(&str, Value)) {
    let recurs = |layer: &crate::serving::model::ServedLayer| {
        layer.caches.iter().any(|cache| matches!(cache.kind, CacheKind::State { .. }))
    };
    if !served.layers.iter().any(recurs) {
        return;
    }
    let size = |key: &str| config[key].as_u64().unwrap_or(0);
    let delta = size("linear_num_value_heads");
    let sizes = if delta > 0 {
        let heads = [size("linear_key_head_dim"), delta, size("linear_num_key_heads")];
        [
            size("linear_conv_kernel_dim"),
            delta.saturating_mul(size("linear_value_head_dim")),
            heads[0],
            heads[1],
            heads[2],
        ]
    } else {
        // Granite's and Jamba's words, and Nemotron-H's.
        let either = |one: &str, other: &str| size(one).max(size(other));
        let heads = either("mamba_n_heads", "mamba_num_heads");
        let inner = heads.saturating_mul(either("mamba_d_head", "mamba_head_dim"));
        let groups = either("mamba_n_groups", "n_groups");
        [either("mamba_d_conv", "conv_kernel"), inner, either("mamba_d_state", "ssm_state_size"), heads, groups]
    };
    let keys = ["ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank", "ssm.group_count"];
    for (key, value) in keys.into_iter().zip(sizes).filter(|(_, value)| *value > 0) {
        put(key, Value::Unsigned(value));
    }
    if let Some(kernel) = config["conv_L_cache"].as_u64() {
        put("shortconv.l_cache", Value::Unsigned(kernel));
    }
    put(
        "attention.recurrent_layers",
        Value::Array(served.layers.iter().map(|layer| Value::Bool(recurs(layer))).collect()),
    );
    if config["position_embedding_type"] == "nope" {
        put("rope.scaling.finetuned", Value::Bool(false));
    }
}
