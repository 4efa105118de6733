//! What a GGUF file says of layers with states, in the words of configs: gated delta rules, Mamba 2, short convolutions.

use serde_json::{Map, Value as Json, json};

use super::{Header, Value};

/// Adds it; files without such layers are left as they are.
pub(super) fn read(header: &Header, name: &str, config: &mut Map<String, Json>) {
    let number = |key: &str| header.get(&format!("{name}.{key}")).and_then(Value::as_u64).unwrap_or(0);
    let has = |tensor: &str| header.tensors.iter().any(|own| own.name == tensor);
    let layers = number("block_count").saturating_sub(number("nextn_predict_layers")).min(4096);
    let any = |end: &str| header.tensors.iter().any(|own| own.name.ends_with(end));
    let (delta, mamba, short) =
        (any(".ssm_alpha.weight") || any(".ssm_ba.weight"), any(".ssm_in.weight"), any(".shortconv.conv.weight"));
    if !delta && !mamba && !short {
        return;
    }
    let state = if delta {
        "linear_attention"
    } else if mamba {
        "mamba"
    } else {
        "conv"
    };
    let full = if mamba { "attention" } else { "full_attention" };
    let attends =
        |layer: &u64| has(&format!("blk.{layer}.attn_q.weight")) || has(&format!("blk.{layer}.attn_k.weight"));
    let alone = |layer: u64| !attends(&layer) && !has(&format!("blk.{layer}.ssm_in.weight"));
    if mamba && (0..layers).any(alone) {
        // Feed-forwards are layers of their own: another kind of model.
        return;
    }
    let kinds: Vec<&str> = (0..layers).map(|layer| if attends(&layer) { full } else { state }).collect();
    let mut put = |key: &str, value: Json| drop(config.insert(key.to_owned(), value));
    put("layer_types", json!(kinds));
    let (inner, heads) = (number("ssm.inner_size"), number("ssm.time_step_rank").max(1));
    if delta {
        put("linear_conv_kernel_dim", json!(number("ssm.conv_kernel")));
        put("linear_key_head_dim", json!(number("ssm.state_size")));
        put("linear_value_head_dim", json!(inner / heads));
        put("linear_num_key_heads", json!(number("ssm.group_count")));
        put("linear_num_value_heads", json!(heads));
    } else if mamba {
        put("mamba_d_conv", json!(number("ssm.conv_kernel")));
        put("mamba_n_heads", json!(heads));
        put("mamba_d_head", json!(inner / heads));
        put("mamba_d_state", json!(number("ssm.state_size")));
        put("mamba_n_groups", json!(number("ssm.group_count")));
        put("mamba_expand", json!(inner.checked_div(number("embedding_length"))));
        let shared = number("expert_shared_feed_forward_length");
        put("shared_intermediate_size", json!(if shared > 0 { shared } else { number("feed_forward_length") }));
        if number("expert_count") == 0 {
            put("num_local_experts", json!(0));
            put("num_experts_per_tok", json!(0));
        }
        let unturned = header.get(&format!("{name}.rope.scaling.finetuned")) == Some(&Value::Bool(false));
        put("position_embedding_type", json!(if unturned { "nope" } else { "rope" }));
    } else {
        put("conv_L_cache", json!(number("shortconv.l_cache")));
        put("block_auto_adjust_ff_dim", json!(false));
    }
}
