//! `DistributedDataParallel`: everything on every card, gradients reduced in buckets.
//!
//! Follows torch/nn/parallel/distributed.py and torch/csrc/distributed/c10d/reducer.cpp of torch 2.11.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};

use super::members;
use crate::memory::adapters::Loaded;
use crate::memory::autograd::Leaf;
use crate::memory::engine::Engine;
use crate::memory::log::Category;
use crate::memory::optimizer::Trained;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::{Program, Shape};
use crate::plan::parallel::Ddp;

/// The first bucket after rebuilding is small, so that reducing starts early (`_DEFAULT_FIRST_BUCKET_BYTES`).
const FIRST_BUCKET: u64 = 1 << 20;
/// State is sent from rank 0 in pieces of this size at construction (`broadcast_bucket_size`).
const BROADCAST: u64 = 250 << 20;

/// The engine (`Reducer`).
pub(super) struct Replicas {
    trained: Vec<Trained>,
    leaves: Vec<Rc<Leaf>>,
    buffers: Vec<Tensor>,
    /// A flat tensor per bucket, and the bucket of every leaf.
    buckets: RefCell<Vec<Tensor>>,
    bucket_of: RefCell<Vec<usize>>,
    /// Leaves in the order their gradients came in the first backward pass.
    order: RefCell<Vec<usize>>,
    rebuilt: Cell<bool>,
    /// Whether this backward pass reduces: under `no_sync` gradients stay where autograd puts them.
    syncs: Cell<bool>,
    options: Ddp,
}

/// Wraps a loaded model.
pub(super) fn wrap(
    torch: &mut Torch,
    program: &Program,
    mut loaded: Loaded,
    options: &Ddp,
) -> (Loaded, Rc<dyn Engine>) {
    let buffers: Vec<Tensor> = loaded.parameters.iter().skip(program.parameters.len()).cloned().collect();
    let mut state: Vec<Tensor> = members::of(program, &loaded).into_iter().map(|member| member.tensor).collect();
    state.extend(buffers.iter().cloned());
    broadcast(torch, &state);
    drop(state);
    let leaves: Vec<Rc<Leaf>> = loaded.trained.iter().map(|parameter| Rc::clone(&parameter.leaf)).collect();
    let engine = Rc::new(Replicas {
        bucket_of: RefCell::new(vec![0; leaves.len()]),
        trained: std::mem::take(&mut loaded.trained),
        leaves,
        buffers,
        buckets: RefCell::default(),
        order: RefCell::default(),
        rebuilt: Cell::new(false),
        syncs: Cell::new(true),
        options: options.clone(),
    });
    // One bucket for all until the order is known: `find_unused_parameters` is off.
    let all: Vec<usize> = (0..engine.leaves.len()).collect();
    engine.allocate(torch, &[all]);
    for (index, leaf) in engine.leaves.iter().enumerate() {
        let this: Weak<Replicas> = Rc::downgrade(&engine);
        *leaf.after.0.borrow_mut() = Some(Rc::new(move |_: &mut Torch| {
            if let Some(this) = this.upgrade() {
                this.ready(index);
            }
        }));
    }
    (loaded, engine)
}

/// `_broadcast_coalesced`: tensors are joined to pieces, two of which are in flight.
fn broadcast(torch: &mut Torch, tensors: &[Tensor]) {
    let mut flight: Vec<Tensor> = Vec::new();
    let mut send = |torch: &mut Torch, bytes: u64| {
        if flight.len() == 2 {
            flight.remove(0);
        }
        flight.extend(torch.scratch("broadcast", bytes));
    };
    let mut bytes = 0;
    for tensor in tensors {
        bytes += tensor.elements() * tensor.dtype.size();
        if bytes >= BROADCAST {
            send(torch, std::mem::take(&mut bytes));
        }
    }
    send(torch, bytes);
}

impl Replicas {
    /// New buckets in place of the old.
    fn allocate(&self, torch: &mut Torch, buckets: &[Vec<usize>]) {
        self.buckets.borrow_mut().clear();
        for (bucket, members) in buckets.iter().enumerate() {
            let elements = members.iter().map(|&leaf| self.leaves[leaf].shape.elements()).sum::<u64>();
            let dtype = members.first().map_or(crate::dtype::DType::F32, |&leaf| self.leaves[leaf].dtype);
            let category =
                if self.options.gradient_as_bucket_view { Category::Gradients } else { Category::Communication };
            let flat = torch.in_category(category, |torch| torch.fresh("bucket", Shape::from([elements]), dtype));
            self.buckets.borrow_mut().push(flat);
            members.iter().for_each(|&leaf| self.bucket_of.borrow_mut()[leaf] = bucket);
        }
    }

    /// A gradient is complete: it is copied into its bucket, and replaced by its place there when gradients are views.
    fn ready(&self, index: usize) {
        if !self.syncs.get() {
            return;
        }
        if !self.rebuilt.get() {
            self.order.borrow_mut().push(index);
        }
        if !self.options.gradient_as_bucket_view {
            return;
        }
        let leaf = &self.leaves[index];
        let bucket = self.buckets.borrow()[self.bucket_of.borrow()[index]].clone();
        *leaf.grad.borrow_mut() = Some(bucket.with_layout(leaf.shape, leaf.strides));
    }

    /// Buckets in the order of gradients: the first small, the others of `bucket_cap_mb`; one list per type.
    fn rebuild(&self, torch: &mut Torch) {
        let order = self.order.take();
        let mut buckets: Vec<Vec<usize>> = Vec::new();
        let mut open: Vec<(crate::dtype::DType, Vec<usize>, u64, u64)> = Vec::new();
        for index in order {
            let leaf = &self.leaves[index];
            let at = open.iter().position(|(dtype, ..)| *dtype == leaf.dtype).unwrap_or_else(|| {
                open.push((leaf.dtype, Vec::new(), 0, FIRST_BUCKET));
                open.len() - 1
            });
            let (_, members, bytes, limit) = &mut open[at];
            members.push(index);
            *bytes += leaf.shape.elements() * leaf.dtype.size();
            if *bytes >= *limit {
                buckets.push(std::mem::take(members));
                *bytes = 0;
                *limit = self.options.bucket_cap_mb.saturating_mul(1 << 20);
            }
        }
        buckets.extend(open.into_iter().map(|(_, members, ..)| members).filter(|members| !members.is_empty()));
        self.allocate(torch, &buckets);
        self.rebuilt.set(true);
    }
}

impl Engine for Replicas {
    fn trained(&self) -> &[Trained] {
        &self.trained
    }

    fn before_forward(&self, torch: &mut Torch, syncs: bool) {
        self.syncs.set(syncs);
        if !self.rebuilt.get() && !self.order.borrow().is_empty() {
            self.rebuild(torch);
        }
        // `broadcast_buffers`.
        broadcast(torch, &self.buffers);
    }
}
