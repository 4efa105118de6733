//! DeepSpeed without ZeRO: every card has all weights in fp32 beside the bf16 ones, and all states.
//!
//! Follows deepspeed/runtime/fp16/unfused_optimizer.py and the reductions of deepspeed/runtime/engine.py.

use std::cell::Cell;
use std::rc::Rc;

use crate::dtype::DType;
use crate::memory::autograd::Leaf;
use crate::memory::engine::Engine;
use crate::memory::log::{Category, Stream};
use crate::memory::optimizer::{Optimizer, Trained};
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::plan;

/// Gradients are reduced in joined buckets of this many elements (`allreduce_no_retain`).
const BUCKET: u64 = 500_000_000;

/// The engine (`FP16_UnfusedOptimizer`).
pub(super) struct Unfused {
    leaves: Vec<Rc<Leaf>>,
    masters: Vec<Trained>,
    /// Whether a step follows this micro-batch.
    boundary: Cell<bool>,
}

/// Makes the fp32 copies of a loaded model.
pub(super) fn wrap(torch: &mut Torch, trained: Vec<Trained>) -> Rc<dyn Engine> {
    let mut masters = Vec::new();
    let mut leaves = Vec::new();
    for parameter in trained {
        let narrow = torch.fresh_like("clone", &parameter.tensor, DType::BF16);
        let wide = torch.in_category(Category::Weights, |torch| torch.fresh_like("fp32 copy", &narrow, DType::F32));
        let (tensor, leaf) = torch.leaf(wide);
        masters.push(Trained::new(tensor, leaf));
        leaves.push(parameter.leaf);
    }
    Rc::new(Unfused { leaves, masters, boundary: Cell::new(true) })
}

impl Unfused {
    /// fp32 gradients, the step, and away with them.
    fn run(&self, torch: &mut Torch, optimizer: &mut Optimizer) {
        for master in &self.masters {
            let make = |torch: &mut Torch| torch.fresh_like("_to_copy", &master.tensor, DType::F32);
            *master.leaf.grad.borrow_mut() = Some(torch.in_category(Category::Gradients, make));
        }
        optimizer.step(torch, &self.masters);
        self.masters.iter().for_each(|master| drop(master.leaf.grad.take()));
    }
}

impl Engine for Unfused {
    fn begin(&self, last: bool) {
        self.boundary.set(last);
    }

    fn steps_alone(&self) -> bool {
        true
    }

    fn trained(&self) -> &[Trained] {
        &self.masters
    }

    fn prepare(&self, torch: &mut Torch, optimizer: &mut Optimizer, _plan: plan::Optimizer) {
        // States are made by a step on zeros.
        let zeros: Vec<Tensor> =
            self.masters.iter().map(|master| torch.fresh_like("zeros", &master.tensor, DType::BF16)).collect();
        self.run(torch, optimizer);
        drop(zeros);
    }

    fn after_backward(&self, torch: &mut Torch) {
        if !self.boundary.get() {
            return;
        }
        let mut elements = 0;
        let mut count = 0;
        for leaf in self.leaves.iter().filter(|leaf| leaf.grad.borrow().is_some()) {
            elements += leaf.shape.elements();
            count += 1;
            if elements > BUCKET {
                drop((count > 1).then(|| torch.flat("cat", elements, DType::BF16, Stream::Default)));
                (elements, count) = (0, 0);
            }
        }
        drop((count > 1).then(|| torch.flat("cat", elements, DType::BF16, Stream::Default)));
    }

    fn step(&self, torch: &mut Torch, optimizer: &mut Optimizer) {
        // The norm of every gradient is taken in fp32.
        for master in &self.masters {
            drop(torch.scratch("_to_copy", master.tensor.elements() * 4));
        }
        self.run(torch, optimizer);
        self.leaves.iter().for_each(|leaf| drop(leaf.grad.take()));
    }
}
