//! What tensor parallel does around linears and embeddings, as transformers' `tp_plan` has DTensor do it.

use std::collections::BTreeMap;

use super::Runner;
use super::variables::Frames;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::memory::torch::collective::RowsOutput;
use crate::model::op::{ModuleId, ParameterId, ValueId};
use crate::model::tensor_plans::TensorStyle;
use crate::model::{Program, Shape};

/// How the modules of a program are split.
#[derive(Debug, Clone, Default)]
pub struct Split {
    /// Over how many cards.
    pub ways: u64,
    /// The style of each module that is, and the size of what is gathered or looked up: rows of a table or a weight.
    pub modules: BTreeMap<ModuleId, (TensorStyle, u64)>,
    /// Whether what is between the split parts is split along the sequence.
    pub sequence: bool,
    /// Whether the loss is computed on each card's part of the vocabulary.
    pub loss_parallel: bool,
    /// The sizes that parameters have before they are cut.
    pub wholes: BTreeMap<ParameterId, Shape>,
}

impl Split {
    /// Whether a module gathers what comes in along the sequence (`PrepareModuleInput`).
    pub(in crate::memory) fn gathers(&self, program: &Program, module: ModuleId) -> bool {
        let path = &program.modules[module.0 as usize].path;
        self.sequence && (path.ends_with(".self_attn") || path.ends_with(".mlp"))
    }

    /// Whether what a linear gives is scattered along the sequence.
    pub(in crate::memory) fn scatters(&self, module: ModuleId) -> bool {
        self.sequence && self.modules.get(&module).is_some_and(|(style, _)| *style == TensorStyle::Row)
    }
}

impl Runner {
    fn style(&self, module: ModuleId) -> Option<(TensorStyle, u64, u64)> {
        let split = self.wrapped.split.as_ref()?;
        split.modules.get(&module).map(|(style, size)| (*style, *size, split.ways))
    }

    /// The input of a linear as the card's part of it sees it.
    pub(super) fn split_input(&self, torch: &mut Torch, module: ModuleId, x: &Tensor) -> Option<Tensor> {
        let (style, _, ways) = self.style(module)?;
        let sequence = self.wrapped.split.as_ref().is_some_and(|split| split.sequence);
        match style {
            // The module around it has gathered its input for all.
            TensorStyle::Column if sequence => None,
            TensorStyle::ColumnGathered if sequence => Some(torch.gather_sequence(x, ways)),
            TensorStyle::Column | TensorStyle::ColumnGathered => Some(torch.enter_columns(x)),
            TensorStyle::RowSplit => Some(torch.cut(x, -1, ways)),
            _ => None,
        }
    }

    /// The output of a linear as the rest of the model sees it.
    pub(super) fn split_output(&self, torch: &mut Torch, module: ModuleId, output: Tensor) -> Tensor {
        let Some((style, size, ways)) = self.style(module) else { return output };
        let split = self.wrapped.split.as_ref();
        let (sequence, loss_parallel) = split.map_or((false, false), |split| (split.sequence, split.loss_parallel));
        match style {
            TensorStyle::Row if sequence => torch.scatter_sequence(&output, ways),
            TensorStyle::ColumnGathered if loss_parallel => output,
            TensorStyle::Row | TensorStyle::RowSplit => torch.leave_rows(&output),
            TensorStyle::ColumnGathered => torch.gather_parts(&output, -1, (ways, size)),
            TensorStyle::LatentKeys => torch.cat(&[&output], (output.shape.rank().max(1) - 1) as u8),
            _ => output,
        }
    }

    /// Rows of a table that is split by rows.
    pub(super) fn split_embedding(
        &self,
        torch: &mut Torch,
        module: ModuleId,
        weight: &Tensor,
        ids: &Tensor,
    ) -> Option<Tensor> {
        match self.style(module)? {
            (TensorStyle::Embedding, rows, ways) => {
                let sequence = self.wrapped.split.as_ref().is_some_and(|split| split.sequence);
                let sum = if sequence { RowsOutput::Sequence(ways) } else { RowsOutput::Whole };
                Some(torch.embedding_rows(weight, ids, rows, sum))
            }
            _ => None,
        }
    }

    /// A split module whose input lies along the sequence gathers it (`PrepareModuleInput`).
    pub(super) fn gather_sequence(&self, torch: &mut Torch, frames: &mut Frames, module: ModuleId, at: usize) {
        let Some(split) = self.wrapped.split.as_ref().filter(|split| split.sequence) else { return };
        if !split.gathers(&self.program, module) {
            return;
        }
        let mut before: Vec<(ValueId, Tensor)> = Vec::new();
        for (value, tensor) in self.captured(frames, &(at + 1..self.exits[at])) {
            let whole = self.program.values[value.0 as usize];
            if whole.rank() == 3 && tensor.shape.size(1) < whole.size(1) {
                frames.values[value] = Some(torch.gather_sequence(&tensor, split.ways));
                before.push((value, tensor));
            }
        }
        frames.gathered.push((module, before));
    }

    /// The loss on each card's part of the vocabulary.
    pub(super) fn is_loss_parallel(&self) -> bool {
        self.wrapped.split.as_ref().is_some_and(|split| split.loss_parallel)
    }
}

impl Frames {
    /// The caller of a module has its own, ungathered value.
    pub(super) fn leave_gathered(&mut self, module: ModuleId) {
        if self.gathered.last().is_none_or(|(known, _)| *known != module) {
            return;
        }
        for (value, tensor) in self.gathered.pop().into_iter().flat_map(|(_, before)| before) {
            if let Some(now) = self.values[value].as_mut() {
                *now = tensor;
            }
        }
    }
}
