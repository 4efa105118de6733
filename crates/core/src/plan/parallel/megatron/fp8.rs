//! Products in fp8: Megatron's `fp8_format` and what belongs to it.

use serde::{Deserialize, Serialize};

use super::checks::at;
use crate::plan::{Fault, Faults, TrainPlan};

/// Transformer Engine's products in fp8. Attention, router, embedding and output layer stay in bf16.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Fp8 {
    /// `fp8_recipe`.
    pub recipe: Fp8Recipe,
    /// `fp8_param_gather`: the weights themselves are fp8, and gathered so.
    pub param_gather: bool,
    /// Whether fp8 copies of bf16 weights live on between micro-batches (not `disable_parameter_transpose_cache`).
    pub weight_cache: bool,
    /// `num_layers_at_start_in_bf16`, with `first_last_layers_bf16`.
    pub layers_at_start_in_bf16: u64,
    /// `num_layers_at_end_in_bf16`.
    pub layers_at_end_in_bf16: u64,
}

impl Default for Fp8 {
    fn default() -> Self {
        Self {
            recipe: Fp8Recipe::Delayed,
            param_gather: false,
            weight_cache: true,
            layers_at_start_in_bf16: 0,
            layers_at_end_in_bf16: 0,
        }
    }
}

/// How tensors are scaled.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Fp8Recipe {
    /// One factor a tensor, from earlier steps.
    #[default]
    Delayed,
    /// One factor a tensor, of the tensor itself (`tensorwise`, current scaling).
    Tensorwise,
    /// A factor for every 1 x 128 values, of weights 128 x 128.
    Blockwise,
    /// A factor for every 32 values.
    Mxfp8,
}

impl Fp8Recipe {
    /// Whether there is one factor for the whole tensor.
    pub fn is_per_tensor(self) -> bool {
        matches!(self, Self::Delayed | Self::Tensorwise)
    }
}

impl Fp8 {
    /// Whether a layer's products are in fp8.
    pub fn covers(&self, layer: u64, layers: u64) -> bool {
        layer >= self.layers_at_start_in_bf16 && layer < layers.saturating_sub(self.layers_at_end_in_bf16)
    }

    /// Refuses cards without such products, and what Megatron refuses.
    pub(super) fn check(&self, plan: &TrainPlan, faults: &mut Faults) {
        let (recipe, capability) = (at("fp8.recipe"), plan.gpu.capability.unwrap_or(0));
        let (needed, name) = match self.recipe {
            Fp8Recipe::Delayed | Fp8Recipe::Tensorwise => (89, "fp8 products need Ada, Hopper or later"),
            Fp8Recipe::Blockwise => (90, "the blockwise recipe needs Hopper or later"),
            Fp8Recipe::Mxfp8 => (100, "the mxfp8 recipe needs Blackwell"),
        };
        faults.when(capability < needed, || {
            let fault = Fault::new(&recipe, format!("{name}, not {}", plan.gpu.name));
            let fault = if capability >= 89 { fault.or_set(&recipe, "tensorwise") } else { fault };
            fault.or_drop(at("fp8")).or("take another card ({gpu})")
        });
        let ends = self.layers_at_start_in_bf16.saturating_add(self.layers_at_end_in_bf16);
        faults.when(self.recipe == Fp8Recipe::Delayed && ends > 0, || {
            let key = if self.layers_at_start_in_bf16 > 0 { "start" } else { "end" };
            let path = at(&format!("fp8.layers_at_{key}_in_bf16"));
            Fault::new(&path, "layers in bf16 at the ends with the delayed recipe, which Megatron refuses")
                .or_set(&recipe, "tensorwise")
                .or_drop(path)
        });
        faults.when(self.param_gather && !self.weight_cache, || {
            Fault::no_effect(
                at("fp8.weight_cache"),
                "where weights are fp8 themselves ({parallel.engine.megatron.fp8.param_gather})",
            )
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ends_stay_in_bf16() {
        let fp8 = Fp8 { layers_at_start_in_bf16: 1, layers_at_end_in_bf16: 2, ..Fp8::default() };
        let covered: Vec<u64> = (0..6).filter(|layer| fp8.covers(*layer, 6)).collect();
        assert_eq!(covered, [1, 2, 3]);
    }
}
