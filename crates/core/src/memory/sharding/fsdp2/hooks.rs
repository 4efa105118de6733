//! Where `fully_shard` stands in a step: before and after its units, and around the whole.

use std::rc::Rc;

use super::{FullyShard, State};
use crate::memory::along::Along;
use crate::memory::autograd::Edge;
use crate::memory::engine::Engine;
use crate::memory::log::Stream;
use crate::memory::lower::hooks::Hooks;
use crate::memory::optimizer::Trained;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::op::{ModuleId, Op};
use crate::model::{ModuleKind, Program};

impl Hooks for FullyShard {
    fn watches(&self, module: ModuleId) -> bool {
        self.modules.of_module.contains_key(&module)
    }

    fn before(&self, torch: &mut Torch, module: ModuleId, inputs: &mut [Tensor]) {
        let Some(&at) = self.modules.of_module.get(&module) else { return };
        self.pre_forward(torch, at);
        self.end_with(torch, at, &mut inputs.iter_mut().map(|input| &mut input.edge).collect::<Vec<_>>());
    }

    fn after(&self, torch: &mut Torch, module: ModuleId, outputs: &[Tensor]) {
        if let Some(&at) = self.modules.of_module.get(&module) {
            self.post_forward(torch, at, outputs);
        }
    }

    fn along(&self) -> Option<&dyn Along> {
        self.goes_along().then_some(self)
    }

    fn watches_operation(&self, op: &Op, module: ModuleId, program: &Program) -> bool {
        // A scaled table is one module, which is there for its rows.
        let is_table = matches!(program.modules[module.0 as usize].kind, ModuleKind::Embedding { .. });
        self.modules.ends.contains_key(&module) && (!is_table || matches!(op, Op::Embedding { .. }))
    }

    fn before_operation(&self, torch: &mut Torch, module: Option<ModuleId>, inputs: &mut [Option<Tensor>]) {
        let Some(end) = module.and_then(|module| self.modules.ends.get(&module)) else { return };
        // Modules of one unit: the first to run begins it.
        if self.units[end.unit].state.get() == State::Forward {
            return;
        }
        self.pre_forward(torch, end.unit);
        let edges = inputs.iter_mut().flatten().map(|input| &mut input.edge);
        let flows = |edge: &&mut Option<Edge>| edge.as_ref().is_some_and(|edge| !edge.node.is_leaf());
        self.end_with(torch, end.unit, &mut edges.filter(flows).collect::<Vec<_>>());
    }

    fn after_operation(&self, torch: &mut Torch, module: Option<ModuleId>, outputs: &[Option<Tensor>]) {
        let Some(end) = module.and_then(|module| self.modules.ends.get(&module)) else { return };
        if end.is_last {
            let outputs: Vec<Tensor> = outputs.iter().flatten().filter(|output| output.needs_grad()).cloned().collect();
            self.post_forward(torch, end.unit, &outputs);
        }
    }
}

impl Engine for FullyShard {
    fn gathers(&self) -> bool {
        true
    }

    fn trained(&self) -> &[Trained] {
        &self.trained
    }

    fn hooks(self: Rc<Self>) -> Option<Rc<dyn Hooks>> {
        Some(self)
    }

    fn before_forward(&self, torch: &mut Torch, syncs: bool) {
        self.reduces.set(syncs);
        self.pre_forward(torch, self.modules.root());
    }

    fn after_forward(&self, torch: &mut Torch, outputs: &[Tensor]) {
        let outputs: Vec<Tensor> = outputs.iter().filter(|output| output.needs_grad()).cloned().collect();
        self.post_forward(torch, self.modules.root(), &outputs);
        drop(self.last_flat.take());
    }

    /// `get_model_state_dict` with `full_state_dict` and `cpu_offload`: one `DTensor` after the other is made whole and goes to the
    /// host. The optimizer's state has the same sizes and follows in the same way.
    fn save(&self, torch: &mut Torch, full: bool) -> u64 {
        // `state_dict` begins with shards.
        self.units.iter().for_each(|unit| self.reshard(unit));
        let mut bytes: u64 = 0;
        for parameter in self.units.iter().flat_map(|unit| &unit.parameters).filter(|_| full) {
            if self.offload {
                drop(torch.flat("_to_copy", parameter.shard.elements(), parameter.dtype, Stream::Default));
            }
            let elements = parameter.shard.elements().saturating_mul(self.world);
            drop(torch.flat("all_gather", elements, parameter.dtype, Stream::Default));
            bytes = bytes.saturating_add(elements.saturating_mul(parameter.dtype.size()));
        }
        bytes
    }

    fn after_backward(&self, torch: &mut Torch) {
        let root = self.modules.root();
        for at in std::iter::once(root).chain(0..root) {
            if self.units[at].state.get() != State::PostBackward {
                self.post_backward(torch, at);
            }
            let unit = &self.units[at];
            unit.state.set(State::Idle);
            drop(unit.flat.take());
            drop(unit.all_reduced.take());
            unit.places.borrow_mut().clear();
        }
        self.order.borrow_mut().clear();
        drop(self.last_reduction.take());
    }
}
