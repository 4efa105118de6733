//! transformers' own tensor-parallel plans (`base_model_tp_plan`, `_tp_plan` of the head): which linear is split how.
//!
//! Source: the `configuration_*.py` files of transformers 5.17, and `distributed/tensor_parallel.py` for what a style does.

/// How a module is split over tensor-parallel cards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum TensorStyle {
    /// Rows of the weight; the output is split.
    Column,
    /// Rows of the weight; the output is gathered again.
    ColumnGathered,
    /// Columns of the weight; the input is split already, the output is summed.
    Row,
    /// The same for an input that every card has whole.
    RowSplit,
    /// Rows of an embedding table; the output is summed.
    Embedding,
    /// The width of fused experts, gate and up projection packed in one.
    Experts,
    /// The compressed keys and values of latent attention: whole, its rotated part is joined again.
    LatentKeys,
}

use TensorStyle::{Column, ColumnGathered, LatentKeys, Row, RowSplit};

type Rules = &'static [(&'static str, TensorStyle)];

const ATTENTION: Rules = &[
    ("self_attn.q_proj", Column),
    ("self_attn.k_proj", Column),
    ("self_attn.v_proj", Column),
    ("self_attn.o_proj", Row),
];
const GATHERED_ATTENTION: Rules = &[
    ("self_attn.q_proj", ColumnGathered),
    ("self_attn.k_proj", ColumnGathered),
    ("self_attn.v_proj", ColumnGathered),
    ("self_attn.o_proj", RowSplit),
];
const LATENT_ATTENTION: Rules = &[
    ("self_attn.kv_a_proj_with_mqa", LatentKeys),
    ("self_attn.q_proj", Column),
    ("self_attn.q_b_proj", Column),
    ("self_attn.kv_b_proj", Column),
    ("self_attn.o_proj", Row),
];
const GATED_MLP: Rules = &[("mlp.gate_proj", Column), ("mlp.up_proj", Column), ("mlp.down_proj", Row)];
const MLP: Rules = &[("mlp.up_proj", Column), ("mlp.down_proj", Row)];
const JOINED_MLP: Rules = &[("mlp.gate_up_proj", ColumnGathered), ("mlp.down_proj", RowSplit)];
const EXPERTS: Rules = &[("mlp.experts", TensorStyle::Experts)];
const SHARED_EXPERTS: Rules = &[
    ("mlp.shared_experts.gate_proj", Column),
    ("mlp.shared_experts.up_proj", Column),
    ("mlp.shared_experts.down_proj", Row),
];
const PHI3: Rules = &[("self_attn.qkv_proj", ColumnGathered), ("self_attn.o_proj", RowSplit)];
const PHI: Rules = &[
    ("self_attn.q_proj", Column),
    ("self_attn.k_proj", Column),
    ("self_attn.v_proj", Column),
    ("self_attn.dense", Row),
    ("mlp.fc1", Column),
    ("mlp.fc2", Row),
];
const NEOX: Rules = &[
    ("attention.query_key_value", Column),
    ("attention.dense", Row),
    ("mlp.dense_h_to_4h", Column),
    ("mlp.dense_4h_to_h", Row),
];
/// Mixers of the hybrid models: every projection is split and gathered again, so what is between them is whole.
const GATED_DELTA: Rules = &[
    ("linear_attn.in_proj_qkv", ColumnGathered),
    ("linear_attn.in_proj_z", ColumnGathered),
    ("linear_attn.in_proj_b", ColumnGathered),
    ("linear_attn.in_proj_a", ColumnGathered),
    ("linear_attn.out_proj", ColumnGathered),
];
const STARCODER2: Rules = &[("mlp.c_fc", Column), ("mlp.c_proj", Row)];

/// The rules for the modules of a layer, by the end of their path.
#[derive(Debug, Clone, Copy)]
pub struct TensorPlan {
    parts: &'static [Rules],
    /// Where layers are, in front of what the rules name.
    layers: &'static str,
}

/// The plan of a model type, where transformers has one that is known here.
pub fn tensor_plan(model_type: &str) -> Option<TensorPlan> {
    let parts: &'static [Rules] = match model_type {
        "llama" | "mistral" | "ministral" | "ministral3" | "qwen2" | "qwen3" | "gemma" | "gemma2" | "gemma3_text"
        | "granite" | "cohere" | "cohere2" | "ernie4_5" | "exaone4" | "helium" | "olmo" | "seed_oss" | "smollm3"
        | "qwen2_moe" => &[ATTENTION, GATED_MLP],
        "qwen3_5_text" => &[ATTENTION, GATED_MLP, GATED_DELTA],
        "arcee" | "apertus" => &[ATTENTION, MLP],
        "glm" | "glm4" => &[ATTENTION, JOINED_MLP],
        "olmo2" | "olmo3" => &[GATHERED_ATTENTION, GATED_MLP],
        "olmoe" | "minimax_m2" => &[GATHERED_ATTENTION, EXPERTS],
        "mixtral" => &[ATTENTION, EXPERTS],
        "qwen3_moe" => &[ATTENTION, GATED_MLP, EXPERTS],
        "glm4_moe" | "ernie4_5_moe" => &[ATTENTION, GATED_MLP, EXPERTS, SHARED_EXPERTS],
        "deepseek_v3" => &[GATED_MLP, EXPERTS, SHARED_EXPERTS],
        "deepseek_v2" => &[LATENT_ATTENTION, GATED_MLP, EXPERTS, SHARED_EXPERTS],
        "phi3" | "phi4_multimodal" => &[PHI3, JOINED_MLP],
        "phi" => &[PHI],
        "gpt_neox" => &[NEOX],
        "starcoder2" => &[ATTENTION, STARCODER2],
        _ => return None,
    };
    Some(TensorPlan { parts, layers: "layers." })
}

impl TensorPlan {
    /// The style of a module in a layer of the stack, by its path.
    pub fn of(&self, path: &str) -> Option<TensorStyle> {
        let (_, inside) = path.split_once(self.layers)?;
        let (_, inside) = inside.split_once('.')?;
        self.parts.iter().flat_map(|rules| rules.iter()).find(|(name, _)| *name == inside).map(|(_, style)| *style)
    }
}

/// Model types that have a plan here, for refusals.
pub const PLANNED: &[&str] =
    &["llama", "mistral", "qwen2", "qwen3", "gemma2", "mixtral", "phi3", "olmo2", "glm4", "qwen3_moe"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn styles_are_found_by_the_path_inside_a_layer() {
        let plan = tensor_plan("mixtral").expect("mixtral has a plan");
        assert_eq!(plan.of("model.layers.3.self_attn.o_proj"), Some(Row));
        assert_eq!(plan.of("model.layers.3.mlp.experts"), Some(TensorStyle::Experts));
        assert_eq!(plan.of("model.layers.3.mlp.gate"), None);
        assert_eq!(plan.of("lm_head"), None);
        assert!(tensor_plan("bert").is_none());
    }
}
