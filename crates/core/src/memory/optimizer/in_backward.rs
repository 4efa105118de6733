//! The optimizer in backward: every parameter has an optimizer of its own, which steps as soon as the parameter's gradient
//! is complete and frees the gradient (`register_post_accumulate_grad_hook`, as torchtune and torchao do it).

use std::cell::RefCell;
use std::rc::Rc;

use super::{Optimizer, Trained};
use crate::memory::torch::Torch;
use crate::plan;

/// Hangs an optimizer onto every parameter.
pub fn attach(torch: &mut Torch, plan: plan::Optimizer, trained: &[Trained]) {
    for parameter in trained {
        let own = std::slice::from_ref(parameter);
        let (optimizer, apart) = (RefCell::new(Optimizer::new(torch, plan, own)), parameter.apart);
        // The leaf holds the hook, so the hook must not hold the leaf.
        let (leaf, tensor) = (Rc::downgrade(&parameter.leaf), parameter.tensor.detached());
        let hook = move |torch: &mut Torch| {
            let Some(leaf) = leaf.upgrade() else { return };
            let one = [Trained { tensor: tensor.clone(), leaf, apart }];
            optimizer.borrow_mut().step(torch, &one);
            drop(one[0].leaf.grad.take());
        };
        *parameter.leaf.after.0.borrow_mut() = Some(Rc::new(hook));
    }
}
