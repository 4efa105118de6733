//! DeepSpeed ZeRO 1 and 2: one flat buffer of parameters, and this card's partition of fp32 weights and states.
//!
//! Follows deepspeed/runtime/zero/stage_1_and_2.py of DeepSpeed 0.19 in bf16.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};

use super::members::Member;
use super::{host, shares};
use crate::dtype::DType;
use crate::memory::adapters::Loaded;
use crate::memory::autograd::Leaf;
use crate::memory::engine::Engine;
use crate::memory::log::{Category, Stream};
use crate::memory::optimizer::{Optimizer, Trained};
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;
use crate::plan::TrainPlan;
use crate::plan::parallel::{DeepSpeed, ZeroConfig};

/// Partitions begin at multiples of this many elements (`nccl_start_alignment_factor`).
pub(super) const ALIGNMENT: u64 = 2;

/// A parameter's place in the flat buffer.
struct Flattened {
    leaf: Rc<Leaf>,
    start: u64,
    elements: u64,
}

/// The engine (`DeepSpeedZeroOptimizer`).
pub(super) struct Partitioned {
    members: Vec<Flattened>,
    partition: u64,
    config: ZeroConfig,
    /// This card's fp32 weights, which the optimizer steps on.
    master: Vec<Trained>,
    /// The bucket gradients are copied into, two when reductions overlap.
    bucket: RefCell<Vec<Tensor>>,
    bucket_index: Cell<usize>,
    in_bucket: RefCell<Vec<usize>>,
    bucket_elements: Cell<u64>,
    /// Gradients of the parameters that lie in this card's partition, of this micro-batch.
    kept: RefCell<Option<Tensor>>,
    /// Those of the micro-batches before it.
    accumulated: RefCell<Vec<Tensor>>,
    /// Where gradients are accumulated in fp32 instead, whatever they are computed in (`grad_accum_dtype`).
    wide: Option<RefCell<Option<Tensor>>>,
    /// Reduced gradients of others that go before the next reduction.
    reduced: RefCell<Vec<usize>>,
    /// Whether the optimizer is on the host.
    offload: bool,
    _gradient_buffer: Option<Tensor>,
    /// Whether a step follows this micro-batch.
    boundary: Cell<bool>,
    /// Hooks that have not fired in this backward pass.
    remaining: Cell<usize>,
}

/// Flattens a loaded model and makes the fp32 partition.
pub(super) fn wrap(
    torch: &mut Torch,
    loaded: &mut Loaded,
    trained: Vec<Member>,
    (plan, options): (&TrainPlan, &DeepSpeed),
    world: u64,
) -> Rc<dyn Engine> {
    let config = &options.zero;
    loaded.trained.clear();
    let trained: Vec<Member> = trained.into_iter().filter(Member::trains).collect();
    let total: u64 = trained.iter().map(|parameter| parameter.tensor.elements()).sum();
    let largest = trained.iter().map(|parameter| parameter.tensor.elements()).max().unwrap_or(0);
    let partition = shares::of_flat(total, ALIGNMENT, world, 0).total();
    let flat_elements = partition * world;
    let flat = torch.in_category(Category::Weights, |torch| {
        torch.fresh("flat parameters", Shape::from([flat_elements]), DType::BF16)
    });
    let sizes: Vec<u64> = trained.iter().map(|parameter| parameter.tensor.elements()).collect();
    let starts = starts(&sizes, if config.round_robin_gradients { world } else { 1 });
    let mut members = Vec::new();
    for (parameter, start) in trained.into_iter().zip(starts) {
        let Some(leaf) = parameter.leaf.as_ref().map(Rc::clone) else { continue };
        members.push(Flattened { leaf, start, elements: parameter.tensor.elements() });
        // Parameters become views of the flat buffer.
        parameter.replace(loaded, Tensor { storage: Rc::clone(&flat.storage), ..parameter.tensor.clone() });
    }
    let shape = Shape::from([partition]);
    let narrow = torch.fresh("clone", shape, DType::BF16);
    let offload = config.offload_optimizer.as_ref().filter(|offload| offload.is_on());
    let mut master = Vec::new();
    let mut gradient_buffer = None;
    match offload {
        None => {
            let wide = torch.in_category(Category::Weights, |torch| torch.fresh("fp32 partition", shape, DType::F32));
            drop(narrow);
            let (tensor, leaf) = torch.leaf(wide);
            master.push(Trained::new(tensor, leaf));
            drop(torch.fresh("zeros", shape, DType::F32));
        }
        Some(offload) => {
            drop(narrow);
            gradient_buffer = Some(torch.flat("gradient buffer", largest, DType::BF16, Stream::Default));
            let ours = members.iter().filter(|member| member.start < partition).map(|member| member.elements).sum();
            host::partition(torch, plan, offload, partition);
            host::buffers(torch, plan, offload, partition, (largest, ours));
        }
    }
    let engine = Rc::new(Partitioned {
        remaining: Cell::new(members.len()),
        members,
        partition,
        config: config.clone(),
        master,
        offload: offload.is_some(),
        _gradient_buffer: gradient_buffer,
        boundary: Cell::new(true),
        accumulated: RefCell::default(),
        wide: options.accumulates_wide(plan.weights).then(RefCell::default),
        reduced: RefCell::default(),
        bucket: RefCell::default(),
        bucket_index: Cell::new(0),
        in_bucket: RefCell::default(),
        bucket_elements: Cell::new(0),
        kept: RefCell::default(),
    });
    for (index, member) in engine.members.iter().enumerate() {
        let this: Weak<Partitioned> = Rc::downgrade(&engine);
        *member.leaf.after.0.borrow_mut() = Some(Rc::new(move |torch: &mut Torch| {
            if let Some(this) = this.upgrade() {
                this.hook(torch, index);
            }
        }));
    }
    engine
}

/// Where each parameter begins in the flat buffer. With `round_robin_gradients` neighbours go to different cards
/// (`_round_robin_reorder`): every `turn`-th parameter lies side by side.
fn starts(sizes: &[u64], turn: u64) -> Vec<u64> {
    let mut starts = vec![0; sizes.len()];
    let mut at = 0;
    let turn = usize::try_from(turn).unwrap_or(usize::MAX).max(1);
    for first in 0..turn.min(sizes.len()) {
        for index in (first..sizes.len()).step_by(turn) {
            starts[index] = at;
            at += sizes[index];
        }
    }
    starts
}

impl Partitioned {
    /// Whether gradients are copied into a bucket as they come; the host's copies need it.
    fn is_contiguous(&self) -> bool {
        self.config.contiguous_gradients || self.offload
    }

    /// Whether a parameter's gradient ends on this card.
    fn is_ours(&self, index: usize) -> bool {
        self.members[index].start < self.partition
    }

    fn stream(&self) -> Stream {
        if self.overlaps() { Stream::Reduce } else { Stream::Default }
    }

    fn overlaps(&self) -> bool {
        self.config.overlap_comm.unwrap_or(false)
    }

    /// A gradient is complete (`grad_handling_hook`).
    fn hook(&self, torch: &mut Torch, index: usize) {
        self.setup_buckets(torch);
        if self.reduces_early() {
            self.put_in_bucket(torch, index);
        }
        self.remaining.set(self.remaining.get().saturating_sub(1));
        // The last hook runs the epilogue, except where stage 1 has everything still to do.
        if self.remaining.get() == 0 && self.reduces_early() {
            self.epilogue(torch);
        }
    }

    /// Whether gradients are reduced as they come: stage 1 waits for the last micro-batch.
    fn reduces_early(&self) -> bool {
        self.config.stage == 2 || (self.overlaps() && self.boundary.get())
    }

    fn setup_buckets(&self, torch: &mut Torch) {
        if !self.bucket.borrow().is_empty() || !self.is_contiguous() {
            return;
        }
        let count = if self.overlaps() { 2 } else { 1 };
        for _ in 0..count {
            let buffer = torch.flat("gradient bucket", self.config.reduce_bucket_size, DType::BF16, Stream::Default);
            self.bucket.borrow_mut().push(buffer);
        }
        self.bucket_index.set(0);
    }

    /// `reduce_independent_p_g_buckets_and_remove_grads`.
    fn put_in_bucket(&self, torch: &mut Torch, index: usize) {
        let member = &self.members[index];
        if self.bucket_elements.get() + member.elements > self.config.reduce_bucket_size {
            self.reduce(torch);
            if self.overlaps() {
                self.bucket_index.set(1 - self.bucket_index.get());
            }
        }
        if member.elements <= self.config.reduce_bucket_size {
            let bucket = self.bucket.borrow().get(self.bucket_index.get()).cloned();
            if let Some(bucket) = bucket {
                *member.leaf.grad.borrow_mut() = Some(view(&bucket, &member.leaf));
            }
        }
        self.bucket_elements.set(self.bucket_elements.get() + member.elements);
        self.in_bucket.borrow_mut().push(index);
    }

    /// `reduce_ipg_grads`: what is in the bucket is joined, slice by slice, reduced, and kept where it is ours.
    fn reduce(&self, torch: &mut Torch) {
        let members = self.in_bucket.take();
        self.bucket_elements.set(0);
        let ours: Vec<u64> = members.iter().filter(|&&index| self.is_ours(index)).map(|&at| self.here(at)).collect();
        let groups = match self.is_contiguous() {
            true => {
                // Slices are cut with their place in the buffer, so it is made first.
                ours.first().inspect(|_| self.widen(torch));
                self.slices(&members)
            }
            false => {
                self.forget_reduced();
                vec![members.iter().map(|&index| self.members[index].elements).collect()]
            }
        };
        for slices in groups {
            let joined = (slices.len() > 1).then(|| torch.flat("cat", slices.iter().sum(), DType::BF16, self.stream()));
            ours.first().inspect(|_| self.widen(torch));
            // Each of our parts is added in fp32 to those before it.
            for &elements in ours.iter().filter(|_| self.wide.is_some()) {
                drop(torch.flat("_to_copy", elements, DType::F32, self.stream()));
            }
            drop(joined);
        }
        for index in members {
            let leaf = &self.members[index].leaf;
            match (self.is_ours(index), self.config.stage) {
                (true, _) if self.is_contiguous() && self.wide.is_none() => self.keep(torch, index),
                (true, _) | (false, 1) => {}
                (false, _) if self.overlaps() && !self.is_contiguous() => self.reduced.borrow_mut().push(index),
                (false, _) => drop(leaf.grad.take()),
            }
        }
    }

    /// `copy_grads_in_partition`: the bucket is written over, so what is ours is copied out of it.
    fn keep(&self, torch: &mut Torch, index: usize) {
        let leaf = &self.members[index].leaf;
        if self.offload {
            if self.boundary.get() {
                let here = self.here(index);
                drop(torch.scratch("_to_copy", here * 8));
                drop(torch.scratch("_to_copy", here * 4));
                drop(leaf.grad.take());
            }
            return;
        }
        if self.kept.borrow().is_none() {
            let elements = self.members.iter().filter(|member| member.start < self.partition);
            let elements = elements.map(|member| member.elements).sum();
            let make = |torch: &mut Torch| torch.fresh("gradients", Shape::from([elements]), DType::BF16);
            let buffer = torch.in_category(Category::Gradients, |torch| torch.on_stream(self.stream(), make));
            *self.kept.borrow_mut() = Some(buffer);
        }
        if let Some(kept) = &*self.kept.borrow() {
            *leaf.grad.borrow_mut() = Some(view(kept, leaf));
        }
    }

    /// The buffer that gradients are accumulated in, made when the first of them is reduced.
    fn widen(&self, torch: &mut Torch) {
        if let Some(wide) = self.wide.as_ref().filter(|wide| wide.borrow().is_none()) {
            let make = |torch: &mut Torch| torch.fresh("gradients", Shape::from([self.partition]), DType::F32);
            let buffer = torch.in_category(Category::Gradients, |torch| torch.on_stream(self.stream(), make));
            *wide.borrow_mut() = Some(buffer);
        }
    }

    fn forget_reduced(&self) {
        self.reduced.take().into_iter().for_each(|index| drop(self.members[index].leaf.grad.take()));
    }

    /// The elements of a parameter that lie in this card's partition.
    fn here(&self, index: usize) -> u64 {
        let Flattened { start, elements, .. } = self.members[index];
        elements.min(self.partition.saturating_sub(start))
    }

    /// The elements of every slice that goes to one partition, in groups that are reduced at once.
    fn slices(&self, members: &[usize]) -> Vec<Vec<u64>> {
        let mut groups = Vec::new();
        let mut group: Vec<u64> = Vec::new();
        let mut slices: Vec<(u64, u64)> = Vec::new();
        for &index in members {
            let Flattened { start, elements, .. } = self.members[index];
            let mut at = start;
            while at < start + elements {
                let partition = at / self.partition;
                let end = (start + elements).min((partition + 1) * self.partition);
                let apart = partition == 0 && self.wide.is_some();
                match slices.last_mut() {
                    Some((last, size)) if *last == partition && !apart => *size += end - at,
                    _ => slices.push((partition, end - at)),
                }
                at = end;
            }
        }
        for (_, elements) in slices {
            group.push(elements);
            if group.iter().sum::<u64>() > self.config.reduce_bucket_size {
                groups.push(std::mem::take(&mut group));
            }
        }
        if !group.is_empty() {
            groups.push(group);
        }
        groups
    }

    /// `independent_gradient_partition_epilogue`: only the gradients of this partition stay.
    fn epilogue(&self, torch: &mut Torch) {
        self.reduce(torch);
        self.forget_reduced();
        let kept: Vec<Tensor> = match (&self.wide, self.is_contiguous()) {
            (Some(_), _) => {
                if self.boundary.get() {
                    self.widen(torch);
                }
                Vec::new()
            }
            (None, true) => self.kept.take().into_iter().collect(),
            (None, false) => {
                let ours = (0..self.members.len()).filter(|&index| self.is_ours(index));
                ours.filter_map(|index| self.members[index].leaf.grad.take()).collect()
            }
        };
        self.members.iter().for_each(|member| drop(member.leaf.grad.take()));
        // Later micro-batches are added to the first one's gradients.
        let mut accumulated = self.accumulated.borrow_mut();
        if accumulated.is_empty() {
            *accumulated = kept;
        }
        self.bucket.borrow_mut().clear();
        self.remaining.set(self.members.len());
    }

    /// The parts of parameters that make up this card's partition.
    fn parts(&self) -> Vec<u64> {
        (0..self.members.len()).filter(|&index| self.is_ours(index)).map(|index| self.here(index)).collect()
    }
}

fn view(whole: &Tensor, leaf: &Leaf) -> Tensor {
    whole.clone().with_shape(leaf.shape)
}

impl Engine for Partitioned {
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
        if self.config.stage == 1 && !self.boundary.get() {
            self.remaining.set(self.members.len());
        } else if self.config.stage == 1 && !self.overlaps() {
            // Stage 1 reduces when backward is over, in the order of parameters.
            for index in 0..self.members.len() {
                if self.members[index].leaf.grad.borrow().is_some() {
                    self.put_in_bucket(torch, index);
                }
            }
            self.epilogue(torch);
        } else if self.remaining.get() != self.members.len() {
            // Parameters that had no gradient leave the epilogue to the engine.
            self.epilogue(torch);
        }
    }

    fn step(&self, torch: &mut Torch, optimizer: &mut Optimizer) {
        let Some(master) = self.master.first() else { return };
        let parts = self.parts();
        // Norms are taken in fp64, one gradient at a time.
        for &elements in &parts {
            drop(torch.scratch("_to_copy", elements * 8));
        }
        if let Some(wide) = &self.wide {
            *master.leaf.grad.borrow_mut() = wide.take();
            optimizer.step(torch, &self.master);
            drop(master.leaf.grad.take());
            return;
        }
        let flat = (parts.len() > 1 || parts.iter().sum::<u64>() < self.partition)
            .then(|| torch.scratch("cat", self.partition * 2));
        let shape = Shape::from([self.partition]);
        let gradient = torch.in_category(Category::Gradients, |torch| torch.fresh("_to_copy", shape, DType::F32));
        drop(flat);
        *master.leaf.grad.borrow_mut() = Some(gradient);
        drop(self.accumulated.take());
        optimizer.step(torch, &self.master);
        drop(master.leaf.grad.take());
    }
}
