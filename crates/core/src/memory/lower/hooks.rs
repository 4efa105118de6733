//! What a wrapper does around modules: the hooks of DDP, FSDP and ZeRO.

use std::rc::Rc;

use super::Runner;
use super::variables::Frames;
use crate::memory::along::Along;
use crate::memory::autograd::Edge;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::op::{ModuleId, Op, ValueId};
use crate::model::{ModuleKind, Program, Step};

/// Runs around a module's forward pass.
pub trait Hooks {
    /// Whether it cares about a module.
    fn watches(&self, module: ModuleId) -> bool;

    /// Before the module runs. `inputs` are the tensors it reads that a gradient flows into; what is put in their place
    /// is what it reads.
    fn before(&self, torch: &mut Torch, module: ModuleId, inputs: &mut [Tensor]);

    /// After it ran, with the tensors it returns that a gradient flows into.
    fn after(&self, torch: &mut Torch, module: ModuleId, outputs: &[Tensor]);

    /// Whether it cares about an operation: those of leaf modules are modules of their own.
    fn watches_operation(&self, _op: &Op, _module: ModuleId, _program: &Program) -> bool {
        false
    }

    /// Before such an operation; a module without parameters has no name here.
    fn before_operation(&self, _torch: &mut Torch, _module: Option<ModuleId>, _inputs: &mut [Option<Tensor>]) {}

    /// After it.
    fn after_operation(&self, _torch: &mut Torch, _module: Option<ModuleId>, _outputs: &[Option<Tensor>]) {}

    /// Before a linear of an adapter runs, which is a module of its own.
    fn before_adapter(&self, _torch: &mut Torch, _weight: &Tensor, _input: &mut Tensor) {}

    /// After it.
    fn after_adapter(&self, _torch: &mut Torch, _weight: &Tensor, _output: &Tensor) {}

    /// Before a weight is read by others than the module that owns it.
    fn before_reading(&self, _torch: &mut Torch, _weight: &Tensor) {}

    /// After that.
    fn after_reading(&self, _torch: &mut Torch, _weight: &Tensor) {}

    /// A checkpointed layer is about to run again.
    fn recomputed(&self, _torch: &mut Torch, _module: ModuleId) {}

    /// What follows where layers are written down, not run; none where they must be run.
    fn along(&self) -> Option<&dyn Along> {
        None
    }
}

/// Values whose place in the graph a hook changed for the time of a module.
pub(super) struct Entered {
    start: usize,
    edges: Vec<(ValueId, Option<Edge>)>,
}

impl Runner {
    /// The same with hooks around modules, where there are some.
    pub fn hooked(self, hooks: Option<Rc<dyn Hooks>>) -> Self {
        Self { hooks, ..self }
    }

    /// The hooks of a module, where some care.
    fn watching(&self, torch: &Torch, module: ModuleId) -> Option<Rc<dyn Hooks>> {
        let hooks = self.hooks.as_ref().filter(|hooks| hooks.watches(module))?;
        (torch.recomputing.is_none() || self.kind(module) != ModuleKind::Layer).then(|| Rc::clone(hooks))
    }

    /// The hooks of an operation, and the module it is when it owns parameters.
    pub(super) fn watching_operation(&self, op: &Op, module: ModuleId) -> Option<(Rc<dyn Hooks>, Option<ModuleId>)> {
        let hooks = self.hooks.as_ref().filter(|hooks| hooks.watches_operation(op, module, &self.program))?;
        let leaf = !matches!(self.kind(module), ModuleKind::Container | ModuleKind::Layer);
        Some((Rc::clone(hooks), leaf.then_some(module)))
    }

    /// A checkpointed layer whose steps are `range` runs again.
    pub(super) fn recomputed(&self, torch: &mut Torch, range: &std::ops::Range<usize>) {
        let before = range.start.checked_sub(1).and_then(|at| self.program.steps.get(at));
        if let (Some(hooks), Some(Step::Enter(module))) = (&self.hooks, before) {
            hooks.recomputed(torch, *module);
        }
    }

    /// A module begins at step `at`.
    pub(super) fn enter(&self, torch: &mut Torch, frames: &mut Frames, module: ModuleId, at: usize) {
        let Some(hooks) = self.watching(torch, module) else { return };
        let captured = self.captured(frames, &(at + 1..self.exits[at]));
        let (values, mut inputs): (Vec<ValueId>, Vec<Tensor>) =
            captured.into_iter().filter(|(_, tensor)| tensor.edge.as_ref().is_some_and(|e| !e.node.is_leaf())).unzip();
        hooks.before(torch, module, &mut inputs);
        let mut edges = Vec::new();
        for (value, input) in values.into_iter().zip(inputs) {
            if let Some(tensor) = &mut frames.values[value] {
                edges.push((value, tensor.edge.take()));
                tensor.edge = input.edge;
            }
        }
        frames.entered.push(Entered { start: at, edges });
    }

    /// A module ends at step `at`.
    pub(super) fn exit(&self, torch: &mut Torch, frames: &mut Frames, module: ModuleId, at: usize) {
        let Some(hooks) = self.watching(torch, module) else { return };
        let Some(entered) = frames.entered.pop() else { return };
        for (value, edge) in entered.edges {
            if let Some(tensor) = &mut frames.values[value] {
                tensor.edge = edge;
            }
        }
        let mut outputs = Vec::new();
        for step in &self.program.steps[entered.start..at] {
            let Step::Run { outputs: made, .. } = step else { continue };
            let alive = made.iter().filter_map(|value| frames.values[*value].clone());
            outputs.extend(alive.filter(Tensor::needs_grad));
        }
        hooks.after(torch, module, &outputs);
    }
}
