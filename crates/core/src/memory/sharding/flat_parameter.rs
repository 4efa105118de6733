//! The flat parameter of a unit of FSDP1, and this card's shard of it.
//!
//! Follows torch/distributed/fsdp/_flat_param.py of torch 2.11.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use super::members::Member;
use super::shares;
use crate::dtype::DType;
use crate::memory::adapters::Loaded;
use crate::memory::autograd::Leaf;
use crate::memory::log::{Category, Stream};
use crate::memory::optimizer::{Apart, Trained};
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;
use crate::plan::parallel::{Fsdp1, MixedPrecision, Strategy};

/// A wrapped module's parameters (`FlatParamHandle`).
pub(super) struct Handle {
    /// The gathered flat parameter, which every parameter of the unit is a view of.
    pub(super) full: Tensor,
    /// Where autograd puts the gradients of those views.
    pub(super) views: Vec<Rc<Leaf>>,
    /// Where the gradients of the parts on this card are.
    pub(super) parts: Vec<Rc<Leaf>>,
    /// Elements of the shard, padding included.
    pub(super) shard: u64,
    /// The type of the shard.
    pub(super) dtype: DType,
    /// Whether it was gathered for its turn in this backward pass.
    pub(super) ran_pre_backward: Cell<bool>,
    /// Its turn in forward.
    pub(super) place: Cell<Option<usize>>,
    /// Whether it is the root's.
    pub(super) root: bool,
    /// A gradient of the whole that waits to be reduced.
    pub(super) waiting: RefCell<Option<Tensor>>,
    /// The shard as it came up from the host: the original parameters look at it until the unit is sharded again.
    pub(super) copy: RefCell<Option<Tensor>>,
}

/// One flat parameter of a unit's parameters, and this card's shard of it.
pub(super) fn flatten(
    torch: &mut Torch,
    loaded: &mut Loaded,
    unit: Vec<(usize, Member)>,
    options: &Fsdp1,
    world: u64,
    root: bool,
    trained: &mut Vec<(usize, Trained)>,
) -> Handle {
    let dtype = unit.first().map_or(DType::F32, |(_, first)| first.tensor.dtype);
    let gathered = options.mixed_precision.map_or(dtype, |types| types.parameters);
    let category = unit.first().map_or(Category::Weights, |(_, first)| first.category());
    let layout = flat_layout(unit.iter().map(|(_, member)| member.tensor.elements()), dtype, world);
    let flat = torch.fresh("cat", Shape::from([layout.elements]), dtype);
    let whole = options.strategy == Strategy::No;
    let full = match whole && gathered == dtype {
        true => flat.clone(),
        false => torch.hollow("flat parameter", Shape::from([layout.elements]), layout.elements, gathered),
    };
    let size = layout.elements / world;
    let mut views = Vec::new();
    let mut sizes = Vec::new();
    // The views come from one tensor: where one of them is trained, gradients flow into all.
    let trains = unit.iter().any(|(_, member)| member.trains());
    let held = MixedPrecision::held(options.mixed_precision, dtype, trains);
    for (_, member) in &unit {
        let shape = member.tensor.shape;
        let mut view = full.detached().with_shape(shape);
        if trains {
            let leaf: Rc<Leaf>;
            (view, leaf) = torch.leaf(view);
            leaf.stream.set(Stream::Gather);
            views.push(leaf);
        }
        member.replace(loaded, view);
        sizes.push(shape.elements());
    }
    let places: Vec<(usize, bool, Apart)> =
        unit.iter().map(|(index, member)| (*index, member.trains(), member.apart)).collect();
    let shard = if whole {
        torch.log.borrow_mut().reclassify(flat.storage.id(), category);
        flat
    } else {
        let shard = torch.in_category(category, |torch| torch.fresh("flat shard", Shape::from([size]), held));
        drop(flat);
        shard
    };
    // The original parameters go last: the shard finds no room of theirs.
    drop(unit);
    let mut parts = Vec::new();
    let part = |torch: &mut Torch, elements: u64| {
        let shape = Shape::from([elements]);
        torch.leaf(shard.clone().with_shape(shape))
    };
    if options.offload {
        let bytes = size.saturating_mul(held.size());
        let mut log = torch.log.borrow_mut();
        log.on_host("parameter shards", bytes, true);
        log.on_host("gradient shards", bytes, true);
    } else if options.flat_params {
        // The optimizer sees the flat parameter itself.
        if let Some((index, ..)) = places.iter().find(|(_, trains, _)| *trains) {
            let (tensor, leaf) = part(torch, size);
            parts.push(Rc::clone(&leaf));
            trained.push((*index, Trained::new(tensor, leaf)));
        }
    } else {
        // Rank 0 has the first elements: whole parameters, and the first part of one more.
        for (((index, trains, apart), elements), start) in places.into_iter().zip(sizes).zip(layout.starts) {
            let here = size.saturating_sub(start).min(elements);
            if here > 0 && trains {
                let (tensor, leaf) = part(torch, here);
                parts.push(Rc::clone(&leaf));
                trained.push((index, Trained { tensor, leaf, apart }));
            }
        }
    }
    if !options.offload {
        loaded.parameters.push(shard);
    }
    Handle {
        full,
        views,
        parts,
        shard: size,
        dtype: held,
        ran_pre_backward: Cell::new(false),
        place: Cell::new(None),
        root,
        waiting: RefCell::default(),
        copy: RefCell::default(),
    }
}

/// Where parameters lie in a flat one.
struct FlatLayout {
    starts: Vec<u64>,
    elements: u64,
}

/// Every parameter begins at 16 bytes, and the whole divides by the world.
fn flat_layout(sizes: impl Iterator<Item = u64>, dtype: DType, world: u64) -> FlatLayout {
    let align = (16 / dtype.size()).max(1);
    let mut starts = Vec::new();
    let mut elements: u64 = 0;
    for size in sizes {
        elements = elements.next_multiple_of(align);
        starts.push(elements);
        elements = elements.saturating_add(size);
    }
    FlatLayout { starts, elements: shares::of_flat(elements, 1, world, 0).total() * world.max(1) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flat_parameters_are_aligned_and_divide_by_the_world() {
        let layout = flat_layout([3, 8, 5].into_iter(), DType::BF16, 4);
        assert_eq!(layout.starts, [0, 8, 16]);
        assert_eq!(layout.elements, 24);
    }
}
