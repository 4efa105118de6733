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

use TensorStyle::{Column, ColumnGathered, Row, RowSplit};

/// Modules by the end of their path in a layer.
pub type TensorRules = &'static [(&'static str, TensorStyle)];

/// Attention whose heads are split.
pub const ATTENTION: TensorRules = &[
    ("self_attn.q_proj", Column),
    ("self_attn.k_proj", Column),
    ("self_attn.v_proj", Column),
    ("self_attn.o_proj", Row),
];
/// The same where norms over all heads need them whole.
pub const GATHERED_ATTENTION: TensorRules = &[
    ("self_attn.q_proj", ColumnGathered),
    ("self_attn.k_proj", ColumnGathered),
    ("self_attn.v_proj", ColumnGathered),
    ("self_attn.o_proj", RowSplit),
];
/// A gated MLP.
pub const GATED_MLP: TensorRules = &[("mlp.gate_proj", Column), ("mlp.up_proj", Column), ("mlp.down_proj", Row)];
/// An MLP without a gate.
pub const MLP: TensorRules = &[("mlp.up_proj", Column), ("mlp.down_proj", Row)];
/// A gated MLP with gate and up projection in one.
pub const JOINED_MLP: TensorRules = &[("mlp.gate_up_proj", ColumnGathered), ("mlp.down_proj", RowSplit)];
/// Fused experts.
pub const EXPERTS: TensorRules = &[("mlp.experts", TensorStyle::Experts)];
/// Experts that run for every token.
pub const SHARED_EXPERTS: TensorRules = &[
    ("mlp.shared_experts.gate_proj", Column),
    ("mlp.shared_experts.up_proj", Column),
    ("mlp.shared_experts.down_proj", Row),
];

/// The style of a module in a layer of the stack, by its path.
pub fn style(plan: &[TensorRules], path: &str) -> Option<TensorStyle> {
    let (_, inside) = path.split_once("layers.")?;
    let (_, inside) = inside.split_once('.')?;
    plan.iter().flat_map(|rules| rules.iter()).find(|(name, _)| *name == inside).map(|(_, style)| *style)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn styles_are_found_by_the_path_inside_a_layer() {
        let plan = [ATTENTION, EXPERTS];
        assert_eq!(style(&plan, "model.layers.3.self_attn.o_proj"), Some(Row));
        assert_eq!(style(&plan, "model.layers.3.mlp.experts"), Some(TensorStyle::Experts));
        assert_eq!(style(&plan, "model.layers.3.mlp.gate"), None);
        assert_eq!(style(&plan, "lm_head"), None);
        assert_eq!(style(&[], "model.layers.3.self_attn.o_proj"), None);
    }
}
