//! DeepSpeed ZeRO 1 with gradients accumulated in fp32: every card has all of them.
//!
//! Follows deepspeed/runtime/bf16_optimizer.py of DeepSpeed 0.19, which takes the place of ZeRO's own optimizer then.

use std::cell::Cell;
use std::rc::Rc;

use super::members::Member;
use super::shares;
use super::zero12::ALIGNMENT;
use crate::dtype::DType;
use crate::memory::adapters::Loaded;
use crate::memory::autograd::Leaf;
use crate::memory::engine::Engine;
use crate::memory::log::{Category, Stream};
use crate::memory::optimizer::{Optimizer, Trained};
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;

/// The engine (`BF16_Optimizer`).
struct Wide {
    leaves: Vec<Rc<Leaf>>,
    /// This card's fp32 weights, which the optimizer steps on.
    master: Vec<Trained>,
    /// The fp32 gradients of the whole model.
    gradients: Tensor,
    partition: Shape,
    /// Whether a step follows this micro-batch.
    boundary: Cell<bool>,
}

/// Flattens a loaded model, and makes the fp32 partition and gradients.
pub(super) fn wrap(torch: &mut Torch, loaded: &mut Loaded, members: Vec<Member>, world: u64) -> Rc<dyn Engine> {
    loaded.trained.clear();
    let trained: Vec<Member> = members.into_iter().filter(Member::trains).collect();
    let total: u64 = trained.iter().map(|parameter| parameter.tensor.elements()).sum();
    let partition = shares::of_flat(total, ALIGNMENT, world, 0).total();
    let whole = Shape::from([partition * world]);
    let flat = torch.in_category(Category::Weights, |torch| torch.fresh("flat parameters", whole, DType::BF16));
    let mut leaves = Vec::new();
    for parameter in trained {
        leaves.extend(parameter.leaf.as_ref().map(Rc::clone));
        parameter.replace(loaded, Tensor { storage: Rc::clone(&flat.storage), ..parameter.tensor.clone() });
    }
    let partition = Shape::from([partition]);
    let narrow = torch.fresh("clone", partition, DType::BF16);
    let wide = torch.in_category(Category::Weights, |torch| torch.fresh("fp32 partition", partition, DType::F32));
    drop(narrow);
    let (tensor, leaf) = torch.leaf(wide);
    let gradients = torch.in_category(Category::Gradients, |torch| torch.fresh("zeros", whole, DType::F32));
    Rc::new(Wide { leaves, master: vec![Trained::new(tensor, leaf)], gradients, partition, boundary: Cell::new(true) })
}

impl Engine for Wide {
    fn begin(&self, last: bool) {
        self.boundary.set(last);
    }

    fn steps_alone(&self) -> bool {
        true
    }

    fn trained(&self) -> &[Trained] {
        &self.master
    }

    fn after_backward(&self, torch: &mut Torch) {
        // The bf16 gradients stay until the step, and are written over in fp32's shadow one by one.
        for leaf in self.leaves.iter().filter(|leaf| leaf.grad.borrow().is_some()) {
            drop(torch.scratch("_to_copy", leaf.shape.elements() * 4));
        }
        if self.boundary.get() {
            // All of them are reduced at once, in bf16.
            drop(torch.flat("_to_copy", self.gradients.elements(), DType::BF16, Stream::Default));
        }
    }

    fn step(&self, torch: &mut Torch, optimizer: &mut Optimizer) {
        let Some(master) = self.master.first() else { return };
        *master.leaf.grad.borrow_mut() = Some(self.gradients.clone().with_shape(self.partition));
        optimizer.step(torch, &self.master);
        drop(master.leaf.grad.take());
        self.leaves.iter().for_each(|leaf| drop(leaf.grad.take()));
    }
}
