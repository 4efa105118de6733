//! No engine around the model: what tensor parallel does is in its modules.

use std::rc::Rc;

use super::{Staged, Wrapper};
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

    fn staged(self: Rc<Self>) -> Option<Rc<dyn Staged>> {
        Some(self)
    }
}

impl Staged for Alone {
    fn be_stage(&self, _place: u8) {}

    fn before_stage(&self, _torch: &mut Torch) {}

    fn begin_backward(&self) {}

    fn after_stage_backward(&self, _torch: &mut Torch) {}

    fn reduce(&self, _torch: &mut Torch) {}

    fn gather_all(&self, _torch: &mut Torch) {}

    fn wait_for_all(&self, _torch: &mut Torch) {}

    fn scatter_all(&self) {}
}
