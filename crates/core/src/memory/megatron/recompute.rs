//! `tensor_parallel.checkpoint` and `CheckpointWithoutOutput`: what is run again in backward.

use smallvec::smallvec;
use std::cell::RefCell;
use std::rc::Rc;

use crate::memory::autograd;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;

/// Runs a part without a graph, keeps its inputs, and runs it again inside backward (megatron/core/tensor_parallel/
/// random.py, `CheckpointFunction`).
pub(super) fn checkpoint(
    torch: &mut Torch,
    inputs: &[Tensor],
    part: impl Fn(&mut Torch, &[Tensor]) -> Tensor + 'static,
) -> Tensor {
    let references: Vec<&Tensor> = inputs.iter().collect();
    let records = torch.records(&references);
    let before = std::mem::replace(&mut torch.grad_enabled, false);
    let output = part(torch, inputs);
    torch.grad_enabled = before;
    if !records {
        return output;
    }
    let held: Vec<Tensor> = inputs.iter().map(Tensor::detached).collect();
    let needed: Vec<bool> = inputs.iter().map(Tensor::needs_grad).collect();
    torch.attach(output, &references, move |torch, gradient| {
        let before = std::mem::replace(&mut torch.grad_enabled, true);
        let (inputs, leaves): (Vec<Tensor>, Vec<_>) = held.into_iter().map(|tensor| torch.leaf(tensor)).unzip();
        let again = part(torch, &inputs);
        torch.grad_enabled = before;
        autograd::backward_nested(torch, &[(again, gradient)]);
        drop(inputs);
        leaves.iter().zip(needed).map(|(leaf, needed)| leaf.grad.borrow_mut().take().filter(|_| needed)).collect()
    })
}

/// What the second run of a part made: its output, and the leaves that collect the gradients of its inputs.
type SecondRun = Rc<RefCell<Option<(Tensor, Vec<Rc<autograd::Leaf>>)>>>;

/// A part whose output is given back to the allocator once it was used, and made again when the gradient of what used it
/// arrives (`CheckpointWithoutOutput`).
pub(super) struct Discarded {
    output: Tensor,
    again: Rc<dyn Fn(&mut Torch) -> Tensor>,
    inner: SecondRun,
}

/// Runs a part whose output is to be discarded.
pub(super) fn without_output(
    torch: &mut Torch,
    inputs: &[Tensor],
    part: impl Fn(&mut Torch, &[Tensor]) -> Tensor + 'static,
) -> (Tensor, Option<Discarded>) {
    let references: Vec<&Tensor> = inputs.iter().collect();
    let records = torch.records(&references);
    let before = std::mem::replace(&mut torch.grad_enabled, false);
    let output = part(torch, inputs);
    torch.grad_enabled = before;
    if !records {
        return (output, None);
    }
    let inner = SecondRun::default();
    let held: Vec<Tensor> = inputs.iter().map(Tensor::detached).collect();
    let needed: Vec<bool> = inputs.iter().map(Tensor::needs_grad).collect();
    let again = {
        let inner = Rc::clone(&inner);
        move |torch: &mut Torch| {
            let before = std::mem::replace(&mut torch.grad_enabled, true);
            let (inputs, leaves): (Vec<Tensor>, Vec<_>) = held.iter().map(|tensor| torch.leaf(tensor.clone())).unzip();
            let again = part(torch, &inputs);
            torch.grad_enabled = before;
            *inner.borrow_mut() = Some((again.clone(), leaves));
            again.detached()
        }
    };
    let backward = Rc::clone(&inner);
    let output = torch.attach(output, &references, move |torch, gradient| {
        let Some((again, leaves)) = backward.borrow_mut().take() else { return smallvec![None; needed.len()] };
        autograd::backward_nested(torch, &[(again, gradient)]);
        leaves.iter().zip(needed).map(|(leaf, needed)| leaf.grad.borrow_mut().take().filter(|_| needed)).collect()
    });
    let discarded = Discarded { output: output.detached(), again: Rc::new(again), inner };
    (output, Some(discarded))
}

impl Discarded {
    /// Gives the output's bytes back; they return, with a second copy beside them, before `user` goes back.
    pub(super) fn discard_until(self, user: &Tensor) {
        let Some(edge) = &user.edge else { return };
        let Self { output, again, inner } = self;
        output.storage.empty();
        edge.node.run_before(Rc::new(move |torch| {
            let made = again(torch);
            output.storage.fill();
            // The copy that was made lives with the graph that made it.
            drop((made, &inner));
        }));
    }
}
