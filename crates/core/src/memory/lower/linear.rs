//! Linears and embeddings: plain, quantised, under an adapter, or replaced by a trained copy.

use std::collections::BTreeMap;

use super::Runner;
use super::lora::{self, Base, LoraWeights};
use super::scales::{self, Scales};
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::memory::torch::quantised::QuantisedWeight;
use crate::memory::torch::stored::StoredWeight;
use crate::model::op::{LinearLayout, ModuleId, ParameterId};
use crate::plan::CheckpointOptions;

/// What stands in place of a model's plain parameters, and around its layers.
#[derive(Debug, Clone, Default)]
pub struct Wrapped {
    /// Matrices held in few bits.
    pub quantised: BTreeMap<ParameterId, QuantisedWeight>,
    /// Matrices as a quantised checkpoint holds them.
    pub stored: BTreeMap<ParameterId, StoredWeight>,
    /// Adapters of linears and embeddings.
    pub lora: BTreeMap<ModuleId, LoraWeights>,
    /// Adapters of parameters: fused experts and routers.
    pub lora_parameters: BTreeMap<ParameterId, LoraWeights>,
    /// Scales and shared matrices of IA³ and VeRA.
    pub scales: BTreeMap<ModuleId, Scales>,
    /// The table of virtual tokens that goes before what this embedding gives.
    pub prompt: Option<(ModuleId, Tensor)>,
    /// Trained copies that a module uses instead of the model's parameter.
    pub copies: BTreeMap<(ModuleId, ParameterId), Tensor>,
    /// Liger's kernels, where they are patched in.
    pub liger: Option<super::liger::Liger>,
    /// A loss that takes the head along.
    pub loss: Option<super::head::HeadLoss>,
    /// The input embedding whose output is made to require a gradient (`enable_input_require_grads`).
    pub input_embedding: Option<ModuleId>,
    /// Whether that embedding scales its rows itself, so that its output is the product.
    pub scaled_input: bool,
    /// How modules are split over tensor-parallel cards.
    pub split: Option<super::tensor_parallel::Split>,
    /// How layers are recomputed.
    pub checkpoints: CheckpointOptions,
}

impl Runner {
    /// A parameter as a module sees it.
    pub(super) fn parameter_of(&self, module: ModuleId, id: ParameterId) -> &Tensor {
        self.wrapped.copies.get(&(module, id)).unwrap_or_else(|| self.parameter(id))
    }

    /// `nn.Linear` or `Conv1D`, or what PEFT and bitsandbytes put in their place.
    pub(super) fn linear(
        &self,
        torch: &mut Torch,
        module: ModuleId,
        (weight, bias, layout): (ParameterId, Option<ParameterId>, LinearLayout),
        x: &Tensor,
    ) -> Tensor {
        let bias = bias.map(|id| self.parameter_of(module, id));
        let entered = self.split_input(torch, module, x);
        let x = entered.as_ref().unwrap_or(x);
        let scales = self.wrapped.scales.get(&module);
        let scaled = scales.and_then(|scales| scales::before(torch, scales, x));
        let x = scaled.as_ref().map_or(x, |[scaled, _]| scaled);
        if self.wrapped.lora_parameters.contains_key(&weight) {
            let matrix = self.matrix(torch, weight).get(torch);
            return torch.linear(x, &matrix, bias);
        }
        let transposed = layout == LinearLayout::InOut;
        let base = match (self.wrapped.quantised.get(&weight), self.wrapped.stored.get(&weight)) {
            (Some(quantised), _) => Base::Quantised(quantised),
            (_, Some(stored)) => Base::Stored(stored),
            (None, None) => Base::Plain { weight: self.parameter_of(module, weight), bias, transposed },
        };
        let result = match (base, bias) {
            (Base::Quantised(quantised), bias) => torch.quantised_linear(x, quantised, bias),
            (Base::Stored(stored), bias) => torch.stored_linear(x, stored, bias),
            (Base::Plain { weight, .. }, Some(bias)) if transposed => torch.conv1d_linear(x, weight, bias),
            (Base::Plain { weight, .. }, bias) => torch.linear(x, weight, bias),
        };
        match self.wrapped.lora.get(&module) {
            Some(adapter) => lora::linear(torch, adapter, base, result, x, self.hooks.as_deref()),
            None => match scales {
                Some(scales) => scales::after(torch, scales, result, x),
                None => self.split_output(torch, module, result),
            },
        }
    }

    /// `nn.Embedding`, or what PEFT puts in its place.
    pub(super) fn embedding(&self, torch: &mut Torch, module: ModuleId, weight: ParameterId, ids: &Tensor) -> Tensor {
        let prompt = self.wrapped.prompt.as_ref().filter(|(own, _)| *own == module);
        let mut result = match prompt {
            Some((_, prompt)) => {
                let hooked = |torch: &mut Torch, words| self.hooked_rows(torch, module, words);
                scales::prompted(torch, prompt, self.parameter_of(module, weight), ids, hooked)
            }
            None => {
                let table = self.parameter_of(module, weight);
                let split = self.split_embedding(torch, module, table, ids);
                split.unwrap_or_else(|| torch.embedding(table, ids))
            }
        };
        if let Some(adapter) = self.wrapped.lora.get(&module) {
            result = lora::embedding(torch, adapter, result, ids);
        }
        self.hooked_rows(torch, module, result)
    }

    /// Rows of a table are what the embedding returns, unless it scales them.
    fn hooked_rows(&self, torch: &mut Torch, module: ModuleId, rows: Tensor) -> Tensor {
        if self.wrapped.scaled_input { rows } else { self.hooked_input(torch, module, rows) }
    }

    /// What the input embedding returns: a hook makes it a leaf (`enable_input_require_grads`).
    pub(super) fn hooked_input(&self, torch: &mut Torch, module: ModuleId, output: Tensor) -> Tensor {
        if self.wrapped.input_embedding == Some(module) && !output.needs_grad() && torch.grad_enabled {
            return torch.leaf_in_graph(output);
        }
        output
    }
}
