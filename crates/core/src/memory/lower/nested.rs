//! Checkpoints that run a backward pass inside the backward pass: `torch.utils.checkpoint(use_reentrant=True)`, and the
//! same with the layer's input waiting on the host (Unsloth's offloaded checkpointing).
//!
//! The layer first runs without a graph. Backward runs all of it again with one, goes back through that, and hands out
//! the gradient of the layer's input; there is no early stop, and the layer's output is made once more.

use std::ops::Range;
use std::rc::Rc;

use super::Runner;
use super::variables::{Frames, Variables};
use crate::memory::autograd::Gradients;
use crate::memory::autograd::{self, Edge, Leaf};
use crate::memory::log::Category;
use crate::memory::saved::OnHost;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Step;
use crate::model::op::ValueId;

/// A value that a layer reads, as its checkpoint keeps it.
pub(super) struct Kept {
    pub(super) value: ValueId,
    held: Held,
    edge: Option<Edge>,
}

/// On the card or on the host.
enum Held {
    Here(Tensor),
    OnHost(OnHost),
}

impl Kept {
    /// Keeps a value; what a gradient flows into may wait on the host.
    pub(super) fn new(torch: &mut Torch, value: ValueId, tensor: Tensor, on_host: bool) -> Self {
        let edge = tensor.edge.clone();
        let held = match on_host && edge.is_some() {
            true => Held::OnHost(OnHost::new(torch, &tensor)),
            false => Held::Here(tensor.detached()),
        };
        Self { value, held, edge }
    }

    /// The value again, where it was in the graph.
    pub(super) fn tensor(&self, torch: &mut Torch) -> Tensor {
        let tensor = match &self.held {
            Held::Here(tensor) => tensor.clone(),
            Held::OnHost(copy) => copy.fetch(torch),
        };
        Tensor { edge: self.edge.clone(), ..tensor }
    }
}

impl Runner {
    /// Runs a layer under such a checkpoint.
    pub(super) fn checkpoint_nested(self: &Rc<Self>, torch: &mut Torch, frames: &mut Frames, range: Range<usize>) {
        let captured = self.captured(frames, &range);
        let inputs: Vec<Tensor> =
            captured.iter().filter(|(_, tensor)| tensor.needs_grad()).map(|(_, tensor)| tensor.clone()).collect();
        let grad = std::mem::replace(&mut torch.grad_enabled, false);
        self.run(torch, frames, range.clone());
        torch.grad_enabled = grad;
        frames.held.clear();
        let written = self.written(frames, &range);
        if inputs.is_empty() || written.is_empty() {
            // Nothing to go back to: torch warns that no input needs a gradient, and the layer gets none.
            return;
        }
        let offload = self.wrapped.checkpoints.offload || torch.saves_on_host.is_some();
        let kept: Vec<Kept> = captured.into_iter().map(|(id, x)| Kept::new(torch, id, x, offload)).collect();
        let mut outputs: Vec<Tensor> = written.iter().filter_map(|id| frames.values[*id].clone()).collect();
        let runner = Rc::clone(self);
        let ids = written.clone();
        let inputs: Vec<&Tensor> = inputs.iter().collect();
        torch.attach_many(&mut outputs, &inputs, move |torch, gradients| {
            runner.back_through(torch, kept, &ids, range, &gradients)
        });
        for (id, output) in written.into_iter().zip(outputs) {
            frames.values[id] = Some(output);
        }
    }

    /// Values that a range of steps made and left behind.
    fn written(&self, frames: &Frames, range: &Range<usize>) -> Vec<ValueId> {
        let steps = self.program.steps[range.clone()].iter();
        let made = steps.flat_map(|step| match step {
            Step::Run { outputs, .. } => outputs.as_slice(),
            _ => &[],
        });
        made.copied().filter(|id| frames.values[*id].is_some()).collect()
    }

    fn back_through(
        self: &Rc<Self>,
        torch: &mut Torch,
        kept: Vec<Kept>,
        written: &[ValueId],
        range: Range<usize>,
        gradients: &[Option<Tensor>],
    ) -> Gradients {
        let mut frames = Frames::new(Variables::of(&self.program, &range));
        let mut leaves: Vec<Rc<Leaf>> = Vec::new();
        for kept in kept {
            let mut tensor = kept.tensor(torch);
            if tensor.edge.take().is_some() {
                let leaf: Rc<Leaf>;
                (tensor, leaf) = torch.leaf(tensor);
                leaves.push(leaf);
            }
            frames.values[kept.value] = Some(tensor);
        }
        let (grad, autocast) = (torch.grad_enabled, torch.autocast);
        (torch.grad_enabled, torch.autocast) = (true, self.settings.autocast);
        let mark = torch.graph_mark();
        torch.in_category(Category::Activations, |torch| self.run(torch, &mut frames, range));
        torch.cast_cache.clear();
        (torch.grad_enabled, torch.autocast) = (grad, autocast);
        let outputs: Vec<Option<Tensor>> = written.iter().map(|id| frames.values[*id].take()).collect();
        let pairs: Vec<(Tensor, Tensor)> = outputs
            .into_iter()
            .zip(gradients)
            .filter_map(|(output, gradient)| Some((output?, gradient.clone()?)))
            .collect();
        autograd::backward_nested(torch, &pairs);
        drop(pairs);
        torch.drop_graph(mark);
        leaves.iter().map(|leaf| handed_out(torch, leaf)).collect()
    }
}

/// The gradient of a layer's input: no longer that of a leaf.
fn handed_out(torch: &mut Torch, leaf: &Rc<Leaf>) -> Option<Tensor> {
    let gradient = leaf.grad.take()?;
    torch.log.borrow_mut().reclassify(gradient.storage.id(), Category::Temporaries);
    Some(gradient)
}
