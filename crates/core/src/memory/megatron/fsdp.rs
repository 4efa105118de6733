//! Megatron-FSDP: buckets of parameters and gradients in shards; a layer is gathered when it runs, with layers after it.
//!
//! Sources: megatron/core/distributed/fsdp/src/megatron_fsdp/{megatron_fsdp,param_and_grad_buffer}.py of version 0.20.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;

use super::architecture::Architecture;
use super::chunks::Chunk;
use super::optimizer::{bucket_size, least_common_multiple};
use super::weights::{self, Weight};
use crate::dtype::DType;
use crate::memory::autograd::{Edge, Node};
use crate::memory::log::{Category, Stream};
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;
use crate::plan::parallel::megatron::{Megatron, MegatronFsdp};
use crate::plan::parallel::mesh::Mesh;

/// Parameters that are gathered and reduced together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bucket {
    /// Whose they are: 0 is the embedding, then the layers, then the norm and the head behind them.
    pub owners: BTreeSet<usize>,
    /// Whether it is a layer's, which is let go of when the layer has run.
    pub unit: bool,
    /// Where every parameter lies.
    pub weights: Vec<(u64, u64)>,
    /// Elements with padding.
    pub elements: u64,
    /// Ranks that share it.
    pub ranks: u64,
}

impl Bucket {
    /// Parameters one after the other, each at a multiple of the least common multiple of their rows; what is smaller than
    /// that fills the gaps. The whole is a multiple of that and of the ranks (`build_data_parallel_buffer_index`).
    fn new(owned: &[(usize, Weight)], unit: bool, ranks: u64, shards: bool) -> Self {
        let ranks = ranks.max(1);
        let row = |weight: &Weight| if weight.matrix[0] == 1 { 1 } else { weight.matrix[1].max(1) };
        let factor = owned.iter().map(|(_, weight)| row(weight)).fold(1, least_common_multiple);
        let mut at = 0u64;
        let mut gaps: Vec<(u64, u64)> = Vec::new();
        let mut placed = Vec::new();
        for (_, weight) in owned.iter().filter(|(_, weight)| weight.elements >= factor) {
            placed.push((at, at + weight.elements));
            let next = at + weight.elements.next_multiple_of(factor);
            gaps.push((at + weight.elements, next));
            at = next;
        }
        for (_, weight) in owned.iter().filter(|(_, weight)| weight.elements < factor) {
            let gap = gaps.iter_mut().find(|(from, to)| to - from >= weight.elements);
            let from = gap.map(|gap| {
                gap.0 += weight.elements;
                gap.0 - weight.elements
            });
            placed.push((from.unwrap_or(at), from.unwrap_or(at) + weight.elements));
            at += if from.is_some() { 0 } else { weight.elements };
        }
        let elements = if shards { at.next_multiple_of(ranks.saturating_mul(factor)) } else { at };
        let owners = owned.iter().map(|(owner, _)| *owner).collect();
        Self { owners, unit, weights: placed, elements, ranks }
    }

    /// Elements of a rank's shard.
    pub fn share(&self) -> u64 {
        self.elements / self.ranks
    }

    /// Elements of every parameter that the first rank owns, or all of them.
    pub fn shards(&self, shared: bool) -> Vec<u64> {
        let end = if shared { self.share() } else { self.elements };
        let inside = |(from, to): &(u64, u64)| to.min(&end).saturating_sub(*from);
        self.weights.iter().map(inside).filter(|elements| *elements > 0).collect()
    }
}

/// What parameters of one bucket have in common: the layer, where it is a unit, and whether they are experts.
type Kind = (Option<usize>, bool);

/// The buckets of a model that is not cut into stages: what belongs to no layer first, then layer by layer.
pub fn buckets(architecture: &Architecture, mesh: &Mesh, options: &Megatron, fsdp: MegatronFsdp) -> Vec<Bucket> {
    let count = architecture.layers.len();
    let ends = weights::of_chunk(architecture, &Chunk { layers: 0..0, first: true, last: true }, mesh, options);
    let mut parameters: Vec<(usize, Weight)> = Vec::new();
    let mut ends = ends.into_iter();
    parameters.extend(ends.next().map(|weight| (0, weight)));
    for (index, layer) in architecture.layers.iter().enumerate() {
        let own = weights::of_layer(layer, architecture.hidden, mesh);
        parameters.extend(own.into_iter().map(|weight| (index + 1, weight)));
    }
    parameters.extend(ends.map(|weight| (count + 1, weight)));
    let dense = mesh.dp_shard.saturating_mul(mesh.cp).max(1);
    let size = bucket_size(mesh);
    let shards = fsdp.strategy.shards_states();
    let is_unit = |owner: usize| fsdp.strategy.shards_parameters() && (1..=count).contains(&owner);
    // Groups of one kind, in the order of their first parameter.
    let mut groups: Vec<(Kind, Vec<(usize, Weight)>)> = Vec::new();
    for (owner, weight) in parameters {
        let key = (is_unit(owner).then_some(owner), weight.expert);
        match groups.iter_mut().find(|(known, _)| *known == key) {
            Some((_, list)) => list.push((owner, weight)),
            None => groups.push((key, vec![(owner, weight)])),
        }
    }
    let mut buckets = Vec::new();
    for ((unit, expert), list) in groups {
        let ranks = if expert { mesh.expert_data_parallel() } else { dense };
        let mut open: Vec<(usize, Weight)> = Vec::new();
        for entry in list {
            open.push(entry);
            let filled: u64 = open.iter().map(|(_, weight)| weight.elements).sum();
            if unit.is_none() && filled >= size {
                buckets.push(Bucket::new(&open, false, ranks, shards));
                open.clear();
            }
        }
        if !open.is_empty() {
            buckets.push(Bucket::new(&open, unit.is_some(), ranks, shards));
        }
    }
    buckets
}

/// The least elements that `MegatronFSDP.__init__` takes as `suggested_communication_unit_size` where none is set; above it
/// counts twice an average layer.
const LEAST_UNIT: u64 = 1_000_000_000;

/// What is gathered and what waits to be reduced.
pub(super) struct Sharded {
    buckets: Vec<Bucket>,
    options: MegatronFsdp,
    dtype: DType,
    gradient_dtype: DType,
    /// Elements gathered ahead, and elements of gradients that may wait (`suggested_communication_unit_size`).
    ahead: u64,
    capacity: u64,
    gathered: RefCell<BTreeMap<usize, Tensor>>,
    gradients: RefCell<BTreeMap<usize, Tensor>>,
    reducing: RefCell<VecDeque<(usize, Tensor)>>,
    /// Two buffers for gathered layers and two for their gradients, once they were used.
    pools: RefCell<BTreeMap<(bool, usize), Tensor>>,
    backward: Cell<bool>,
}

impl Sharded {
    /// For a model; absent where Megatron-FSDP is not asked for.
    pub(super) fn of(architecture: &Architecture, mesh: &Mesh, options: &Megatron, dtype: DType) -> Option<Rc<Self>> {
        let fsdp = options.fsdp?;
        let buckets = buckets(architecture, mesh, options, fsdp);
        let units = architecture.layers.len().max(1) as u64;
        let layers = buckets.iter().filter(|bucket| bucket.unit);
        let average = layers.flat_map(|bucket| &bucket.weights).map(|(from, to)| to - from).sum::<u64>() / units;
        let capacity = fsdp.communication_unit.unwrap_or((2 * average).max(LEAST_UNIT));
        Some(Rc::new(Self {
            buckets,
            options: fsdp,
            dtype,
            gradient_dtype: options.main_gradients,
            ahead: capacity / 2,
            capacity,
            gathered: RefCell::default(),
            gradients: RefCell::default(),
            reducing: RefCell::default(),
            pools: RefCell::default(),
            backward: Cell::new(false),
        }))
    }

    /// The buckets that someone else has a part of.
    fn of_owner(&self, owner: usize) -> Vec<usize> {
        let shared = |bucket: &Bucket| bucket.ranks > 1 && bucket.owners.contains(&owner);
        (0..self.buckets.len()).filter(|index| shared(&self.buckets[*index])).collect()
    }

    /// A whole bucket: fresh, or one of two buffers that stay.
    fn whole(&self, torch: &mut Torch, index: usize, gradient: bool) -> Tensor {
        let bucket = &self.buckets[index];
        let (name, category, dtype) = match gradient {
            true => ("gradient bucket", Category::Gradients, self.gradient_dtype),
            false => ("gathered parameters", Category::Communication, self.dtype),
        };
        let make = |torch: &mut Torch| torch.fresh(name, Shape::from([bucket.elements]), dtype);
        let stream = if gradient { Stream::Default } else { Stream::Gather };
        let fresh = |torch: &mut Torch| torch.in_category(category, |torch| torch.on_stream(stream, make));
        if !self.options.double_buffer || !bucket.unit {
            return fresh(torch);
        }
        let turn = bucket.owners.first().copied().unwrap_or(0) % 2;
        let place =
            index - self.of_owner(bucket.owners.first().copied().unwrap_or(0)).first().copied().unwrap_or(index);
        let key = (gradient, 2 * place + turn);
        let known = self.pools.borrow().get(&key).cloned();
        known.unwrap_or_else(|| {
            let made = fresh(torch);
            self.pools.borrow_mut().insert(key, made.clone());
            made
        })
    }

    /// The bucket behind those that are wanted (before them, on the way back), while few enough are gathered ahead.
    fn following(&self, wanted: &[usize], base: u64) -> Option<usize> {
        let sum: u64 = wanted.iter().map(|index| self.buckets[*index].elements).sum();
        let next = match self.backward.get() {
            false => (*wanted.first()?..self.buckets.len()).find(|index| !wanted.contains(index)),
            true => (0..*wanted.last()?).rev().find(|index| !wanted.contains(index)),
        };
        next.filter(|next| self.buckets[*next].ranks > 1 && sum - base < self.ahead)
    }

    /// Gathers what `owner` reads, and in its direction what comes next, up to a limit.
    pub(super) fn gather(&self, torch: &mut Torch, owner: usize, ahead: bool) {
        if !self.options.strategy.shards_parameters() {
            return;
        }
        let mut wanted = self.of_owner(owner);
        let base: u64 = wanted.iter().map(|index| self.buckets[*index].elements).sum();
        let mut units: BTreeSet<usize> = [owner].into();
        while let Some(next) = self.following(&wanted, base).filter(|_| ahead) {
            units.extend(&self.buckets[next].owners);
            if self.options.double_buffer && units.len() > 2 {
                break;
            }
            wanted.push(next);
            wanted.sort_unstable();
        }
        for index in wanted {
            if !self.gathered.borrow().contains_key(&index) {
                let tensor = self.whole(torch, index, false);
                self.gathered.borrow_mut().insert(index, tensor);
            }
        }
    }

    /// Lets go of a layer's parameters; those of no layer stay.
    fn release(&self, owner: usize) {
        self.gathered.borrow_mut().retain(|index, _| {
            let bucket = &self.buckets[*index];
            !(bucket.unit && bucket.owners.contains(&owner))
        });
    }

    /// A layer begins: its parameters are gathered; once the gradient of its input is known they go, and its gradients are
    /// reduced.
    pub(super) fn enter(self: &Rc<Self>, torch: &mut Torch, owner: usize, x: &Tensor) -> Tensor {
        self.gather(torch, owner, !self.backward.get());
        let mut x = x.clone();
        if let Some(edge) = x.edge.take().filter(|_| torch.grad_enabled) {
            let this = Rc::clone(self);
            let work = move |_: &mut Torch, gradients| {
                this.release(owner);
                this.reduce(owner);
                gradients
            };
            let node = Node::new(torch, 1, std::iter::once(Some(edge)).collect(), Box::new(work));
            x.edge = Some(Edge { node, slot: 0 });
        }
        x
    }

    /// A layer ends. What is run again inside backward keeps its parameters for it.
    pub(super) fn leave(self: &Rc<Self>, owner: usize, output: &Tensor) {
        if !self.backward.get() {
            self.release(owner);
        }
        if let Some(edge) = &output.edge {
            let this = Rc::clone(self);
            edge.node.run_before(Rc::new(move |torch: &mut Torch| {
                this.gather(torch, owner, true);
                this.begin_gradients(torch, owner);
            }));
        }
    }

    /// A backward pass begins, with the head.
    pub(super) fn begin_backward(&self, torch: &mut Torch, head: usize) {
        self.backward.set(true);
        self.begin_gradients(torch, head);
        self.reduce(head);
    }

    /// The first gradient of a bucket is written into it.
    pub(super) fn begin_gradients(&self, torch: &mut Torch, owner: usize) {
        if !self.options.strategy.shards_gradients() {
            return;
        }
        for index in self.of_owner(owner) {
            let waits = self.reducing.borrow().iter().any(|(known, _)| *known == index);
            if !waits && !self.gradients.borrow().contains_key(&index) {
                let tensor = self.whole(torch, index, true);
                self.gradients.borrow_mut().insert(index, tensor);
            }
        }
    }

    /// Buckets whose last gradient is there are reduced, beside what runs; those that wait longest go.
    fn reduce(&self, owner: usize) {
        for index in self.of_owner(owner) {
            if self.buckets[index].owners.first() == Some(&owner)
                && let Some(tensor) = self.gradients.borrow_mut().remove(&index)
            {
                self.reducing.borrow_mut().push_back((index, tensor));
            }
        }
        let mut reducing = self.reducing.borrow_mut();
        let waits =
            |list: &VecDeque<(usize, Tensor)>| list.iter().map(|(at, _)| self.buckets[*at].elements).sum::<u64>();
        while waits(&reducing) > self.capacity {
            drop(reducing.pop_front());
        }
    }

    /// A backward pass ends: every reduction is waited for.
    pub(super) fn end_backward(&self) {
        self.backward.set(false);
        self.gradients.borrow_mut().clear();
        self.reducing.borrow_mut().clear();
        self.gathered.borrow_mut().retain(|index, _| !self.buckets[*index].unit);
    }
}
