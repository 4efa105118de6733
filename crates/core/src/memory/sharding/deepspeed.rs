//! A model under DeepSpeed: in one 16-bit type, with ZeRO's optimizer around the plan's.

use std::rc::Rc;

use super::members::{self, Member};
use super::{zero0, zero1_wide, zero3, zero12};
use crate::dtype::DType;
use crate::memory::adapters::Loaded;
use crate::memory::autograd::Leaf;
use crate::memory::engine::Engine;
use crate::memory::log::Category;
use crate::memory::optimizer::Trained;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::{Program, Shape};
use crate::plan::TrainPlan;
use crate::plan::parallel::DeepSpeed;

/// Wraps a loaded model.
pub(super) fn wrap(
    torch: &mut Torch,
    program: &Program,
    plan: &TrainPlan,
    mut loaded: Loaded,
    (options, world): (&DeepSpeed, u64),
) -> (Loaded, Rc<dyn Engine>) {
    let members = narrowed(torch, program, &mut loaded, plan.weights);
    // MiCS: everything is shared as if the others were not there; gradients are summed over the copies in place.
    let world = options.zero.mics_ranks().unwrap_or(world);
    let engine = match options.zero.stage {
        3 => zero3::wrap(torch, program, &mut loaded, members, (plan, options), world),
        _ => wrap_below_3(torch, &mut loaded, members, (plan, options), world),
    };
    (loaded, engine)
}

/// ZeRO 0 to 2.
fn wrap_below_3(
    torch: &mut Torch,
    loaded: &mut Loaded,
    members: Vec<Member>,
    (plan, options): (&TrainPlan, &DeepSpeed),
    world: u64,
) -> Rc<dyn Engine> {
    match options.zero.stage {
        0 => {
            drop(members);
            zero0::wrap(torch, std::mem::take(&mut loaded.trained))
        }
        1 if options.accumulates_wide(plan.weights) => zero1_wide::wrap(torch, loaded, members, world),
        _ => zero12::wrap(torch, loaded, members, (plan, options), world),
    }
}

/// ZeRO 0 to 2 on parameters of these shapes, which are made here; returned are the tensors to compute with.
pub(in crate::memory) fn wrap_plain(
    torch: &mut Torch,
    shapes: &[Shape],
    (plan, options): (&TrainPlan, &DeepSpeed),
    world: u64,
) -> (Rc<dyn Engine>, Vec<Tensor>) {
    let make = |shape: &Shape| {
        let made = torch.in_category(Category::Weights, |torch| torch.fresh("parameter", *shape, plan.weights));
        torch.leaf(made)
    };
    let made: Vec<(Tensor, Rc<Leaf>)> = shapes.iter().map(make).collect();
    let members =
        made.iter().enumerate().map(|(at, (tensor, leaf))| Member::plain(at, tensor.clone(), Rc::clone(leaf)));
    let members: Vec<Member> = members.collect();
    let parameters = made.iter().map(|(tensor, _)| tensor.clone()).collect();
    let trained: Vec<Trained> = made.into_iter().map(|(tensor, leaf)| Trained::new(tensor, leaf)).collect();
    let mut loaded = Loaded { parameters, trained, wrapped: Default::default() };
    let engine = wrap_below_3(torch, &mut loaded, members, (plan, options), world);
    (engine, loaded.parameters)
}

/// `module.bfloat16()` (or `.half()`): every parameter in the model's type, adapters too.
fn narrowed(torch: &mut Torch, program: &Program, loaded: &mut Loaded, dtype: DType) -> Vec<Member> {
    for member in members::of(program, loaded) {
        if member.is_packed() || member.tensor.dtype == dtype {
            continue;
        }
        let narrow = torch.in_category(member.category(), |torch| torch.cast(&member.tensor.detached(), dtype));
        let Some(old) = &member.leaf else {
            member.replace(loaded, narrow);
            continue;
        };
        let (tensor, leaf) = torch.leaf(narrow);
        for trained in loaded.trained.iter_mut().filter(|trained| Rc::ptr_eq(&trained.leaf, old)) {
            *trained = Trained::new(tensor.clone(), Rc::clone(&leaf));
        }
        member.replace(loaded, tensor);
    }
    members::of(program, loaded)
}
