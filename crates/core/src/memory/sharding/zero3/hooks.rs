//! What ZeRO 3 does around modules and operations: `_pre_forward_module_hook` and `_post_forward_module_hook` of
//! parameter_offload.py.

use super::super::leaf_modules::Part;
use super::Stage3;
use crate::memory::autograd::Edge;
use crate::memory::lower::hooks::Hooks;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Program;
use crate::model::op::{ModuleId, Op};

impl Hooks for Stage3 {
    fn watches(&self, module: ModuleId) -> bool {
        !self.coordinator.leaf_modules.hides(module)
    }

    fn before(&self, torch: &mut Torch, module: ModuleId, inputs: &mut [Tensor]) {
        let mut edges: Vec<&mut Option<Edge>> = inputs.iter_mut().map(|input| &mut input.edge).collect();
        self.begin_module(torch, Part::Module(module), &mut edges);
    }

    fn after(&self, torch: &mut Torch, module: ModuleId, outputs: &[Tensor]) {
        self.end(torch, Part::Module(module), outputs.iter());
    }

    fn watches_operation(&self, op: &Op, module: ModuleId, program: &Program) -> bool {
        use crate::model::ModuleKind::{Container, Embedding, Layer};
        if self.coordinator.leaf_modules.covers(module) {
            return false;
        }
        let leaf = match program.modules[module.0 as usize].kind {
            Container | Layer => false,
            // A scaled table is one module, which is there for its rows.
            Embedding { .. } => matches!(op, Op::Embedding { .. }),
            _ => true,
        };
        leaf || matches!(op, Op::RotaryTable(_) | Op::Activation(_) | Op::Gate(_) | Op::Glu(_) | Op::Dropout { .. })
    }

    fn before_operation(&self, torch: &mut Torch, module: Option<ModuleId>, inputs: &mut [Option<Tensor>]) {
        let Some(module) = module else { return self.coordinator.fetch(torch, Part::Nameless, &self.none) };
        let flowing = inputs.iter_mut().flatten().map(|input| &mut input.edge);
        let mut edges: Vec<&mut Option<Edge>> =
            flowing.filter(|edge| edge.as_ref().is_some_and(|edge| !edge.node.is_leaf())).collect();
        self.begin_module(torch, Part::Module(module), &mut edges);
    }

    fn after_operation(&self, torch: &mut Torch, module: Option<ModuleId>, outputs: &[Option<Tensor>]) {
        if let Some(module) = module {
            self.end(torch, Part::Module(module), outputs.iter().flatten());
        }
    }

    fn before_adapter(&self, torch: &mut Torch, weight: &Tensor, input: &mut Tensor) {
        let Some(module) = self.adapter(weight) else { return };
        if input.edge.as_ref().is_some_and(|edge| !edge.node.is_leaf()) {
            self.begin_module(torch, module, &mut [&mut input.edge]);
        } else {
            self.begin_module(torch, module, &mut []);
        }
    }

    fn after_adapter(&self, torch: &mut Torch, weight: &Tensor, output: &Tensor) {
        if let Some(module) = self.adapter(weight) {
            self.end(torch, module, std::iter::once(output));
        }
    }

    fn before_reading(&self, torch: &mut Torch, weight: &Tensor) {
        self.coordinator.lend(torch, weight);
    }

    fn after_reading(&self, torch: &mut Torch, weight: &Tensor) {
        self.coordinator.take_back(torch, weight);
    }

    fn recomputed(&self, torch: &mut Torch, module: ModuleId) {
        self.coordinator.fetch(torch, Part::Module(module), self.owned(Part::Module(module)));
    }
}
