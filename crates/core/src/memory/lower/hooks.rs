//! What a wrapper does around modules: the hooks of DDP, FSDP and ZeRO.

use std::rc::Rc;

use super::{Frames, Runner};
use crate::memory::autograd::Edge;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::op::{ModuleId, ValueId};
use crate::model::{ModuleKind, Step};

/// Runs around a module's forward pass.
pub trait Hooks {
    /// Whether it cares about a module.
    fn watches(&self, module: ModuleId) -> bool;

    /// Before the module runs. `inputs` are the tensors it reads that a gradient flows into; what is put in their place
    /// is what it reads.
    fn before(&self, torch: &mut Torch, module: ModuleId, inputs: &mut [Tensor]);

    /// After it ran, with the tensors it returns that a gradient flows into.
    fn after(&self, torch: &mut Torch, module: ModuleId, outputs: &[Tensor]);

    /// Before one operation of a module that owns parameters.
    fn before_operation(&self, _torch: &mut Torch, _module: ModuleId, _inputs: &mut [Option<Tensor>]) {}

    /// After it.
    fn after_operation(&self, _torch: &mut Torch, _module: ModuleId, _outputs: &[Option<Tensor>]) {}
}

/// Values whose place in the graph a hook changed for the time of a module.
pub(super) struct Entered {
    start: usize,
    edges: Vec<(ValueId, Option<Edge>)>,
}

impl Runner {
    /// The same with hooks around modules.
    pub fn hooked(self: Rc<Self>, hooks: Rc<dyn Hooks>) -> Rc<Self> {
        match Rc::try_unwrap(self) {
            Ok(runner) => Rc::new(Self { hooks: Some(hooks), ..runner }),
            Err(shared) => shared,
        }
    }

    /// The hooks of a module, where some care.
    fn watching(&self, torch: &Torch, module: ModuleId) -> Option<Rc<dyn Hooks>> {
        let hooks = self.hooks.as_ref().filter(|hooks| hooks.watches(module))?;
        (torch.recomputing.is_none() || self.kind(module) != ModuleKind::Layer).then(|| Rc::clone(hooks))
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
            if let Some(tensor) = &mut frames.values[value.0 as usize] {
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
            if let Some(tensor) = &mut frames.values[value.0 as usize] {
                tensor.edge = edge;
            }
        }
        let mut outputs = Vec::new();
        for step in &self.program.steps[entered.start..at] {
            let Step::Run { outputs: made, .. } = step else { continue };
            let alive = made.iter().filter_map(|value| frames.values[value.0 as usize].clone());
            outputs.extend(alive.filter(Tensor::needs_grad));
        }
        hooks.after(torch, module, &outputs);
    }
}
