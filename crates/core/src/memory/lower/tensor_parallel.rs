//! What tensor parallel does around linears and embeddings, as transformers' `tp_plan` has DTensor do it.

use std::collections::BTreeMap;

use super::Runner;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;
use crate::model::op::{ModuleId, ParameterId};
use crate::model::tensor_plans::TensorStyle;

/// How the modules of a program are split.
#[derive(Debug, Clone, Default)]
pub struct Split {
    /// Over how many cards.
    pub ways: u64,
    /// The style of each module that is, and the size of what is gathered or looked up: rows of a table or a weight.
    pub modules: BTreeMap<ModuleId, (TensorStyle, u64)>,
    /// The sizes that parameters have before they are cut.
    pub wholes: BTreeMap<ParameterId, Shape>,
}

impl Runner {
    fn style(&self, module: ModuleId) -> Option<(TensorStyle, u64, u64)> {
        let split = self.wrapped.split.as_ref()?;
        split.modules.get(&module).map(|(style, size)| (*style, *size, split.ways))
    }

    /// The input of a linear as the card's part of it sees it.
    pub(super) fn split_input(&self, torch: &mut Torch, module: ModuleId, x: &Tensor) -> Option<Tensor> {
        let (style, _, ways) = self.style(module)?;
        match style {
            TensorStyle::Column | TensorStyle::ColumnGathered => Some(torch.enter_columns(x)),
            TensorStyle::RowSplit => Some(torch.cut(x, -1, ways)),
            _ => None,
        }
    }

    /// The output of a linear as the rest of the model sees it.
    pub(super) fn split_output(&self, torch: &mut Torch, module: ModuleId, output: Tensor) -> Tensor {
        let Some((style, size, ways)) = self.style(module) else { return output };
        match style {
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
            (TensorStyle::Embedding, rows, _) => Some(torch.embedding_rows(weight, ids, rows)),
            _ => None,
        }
    }
}
