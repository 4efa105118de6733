//! No engine around the model: what tensor parallel does is in its modules.

use std::rc::Rc;

use super::Wrapper;
use crate::memory::lower::hooks::Hooks;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::op::ModuleId;

/// Does nothing.
pub(super) struct Alone;

impl Hooks for Alone {
    fn watches(&self, _module: ModuleId) -> bool {
        false
    }

    fn before(&self, _torch: &mut Torch, _module: ModuleId, _inputs: &mut [Tensor]) {}

    fn after(&self, _torch: &mut Torch, _module: ModuleId, _outputs: &[Tensor]) {}
}

impl Wrapper for Alone {
    fn before_forward(&self, _torch: &mut Torch, _syncs: bool) {}

    fn after_forward(&self, _torch: &mut Torch, _outputs: &[Tensor]) {}

    fn after_backward(&self, _torch: &mut Torch) {}

    fn hooks(self: Rc<Self>) -> Rc<dyn Hooks> {
        self
    }
}
