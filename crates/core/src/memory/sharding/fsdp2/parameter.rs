//! One parameter of a unit: the shard that this card holds, and the whole while the unit is gathered.

use std::cell::RefCell;
use std::rc::Rc;

use crate::dtype::DType;
use crate::memory::autograd::Leaf;
use crate::memory::sharding::members::Member;
use crate::memory::sharding::shares;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;
use crate::plan::parallel::{Fsdp2, MixedPrecision};

/// One parameter (`FSDPParam`).
pub(super) struct Parameter {
    /// The whole of it: a storage that is filled while the unit is gathered.
    pub(super) whole: Tensor,
    /// Where autograd puts the gradient of the whole.
    pub(super) whole_leaf: Option<Rc<Leaf>>,
    /// Where the gradient of the shard is; none where shards are on the host.
    pub(super) shard_leaf: Option<Rc<Leaf>>,
    /// The shard's sizes, padded.
    pub(super) shard: Shape,
    /// The type of the shard.
    pub(super) dtype: DType,
    /// Whether it is gathered as bytes (torchao's `WeightWithDynamicFloat8CastTensor`).
    pub(super) bytes: bool,
    /// A gradient of the whole that waits to be reduced, in the type of reductions (`unsharded_accumulated_grad`).
    pub(super) waiting: RefCell<Option<Tensor>>,
}

impl Parameter {
    /// Takes what is to be reduced.
    pub(super) fn take_gradient(&self, torch: &mut Torch) -> Option<Tensor> {
        let leaf = self.whole_leaf.as_ref()?;
        let gradient = self.waiting.take().or_else(|| leaf.grad.take())?;
        if gradient.elements() <= leaf.shape.elements() {
            return Some(gradient);
        }
        // A tensor-parallel table's gradient is whole on every card (`unsharded_grad_data` redistributes it).
        Some(torch.fresh("clone", leaf.shape, gradient.dtype))
    }
}

/// This card's shard of a parameter, on the card or on the host.
pub(super) fn shard(
    torch: &mut Torch,
    member: &Member,
    (options, bytes): (&Fsdp2, bool),
    world: u64,
) -> (Parameter, Option<Tensor>) {
    let whole = &member.tensor;
    let dtype = MixedPrecision::held(options.mixed_precision, whole.dtype, member.trains());
    let rows = whole.shape.sizes().first().copied().unwrap_or(1);
    let shape = if whole.shape.rank() == 0 {
        Shape::from([1])
    } else {
        whole.shape.with(0, shares::by_rows(rows, 1, world, 0).total())
    };
    let part = torch.in_category(member.category(), |torch| torch.fresh("shard", shape, dtype));
    let gathered = match bytes {
        true => DType::F8E4M3,
        false => options.mixed_precision.map_or(dtype, |types| types.parameters),
    };
    let hollow = torch.hollow("gathered parameter", whole.shape, shape.elements() * world, gathered);
    let mut parameter = Parameter {
        whole: hollow,
        whole_leaf: None,
        shard_leaf: None,
        shard: shape,
        dtype,
        bytes,
        waiting: RefCell::default(),
    };
    let mut part = Some(part);
    if options.offload {
        part = None;
        let bytes = shape.elements().saturating_mul(dtype.size());
        let mut log = torch.log.borrow_mut();
        log.on_host("parameter shards", bytes, true);
        if member.trains() {
            log.on_host("gradient shards", bytes, true);
        }
    }
    if member.trains() {
        let (whole, leaf) = torch.leaf(parameter.whole);
        (parameter.whole, parameter.whole_leaf) = (whole, Some(leaf));
        if let Some(tensor) = part {
            let (tensor, leaf) = torch.leaf(tensor);
            (part, parameter.shard_leaf) = (Some(tensor), Some(leaf));
        }
    }
    (parameter, part)
}
