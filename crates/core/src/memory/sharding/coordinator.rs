//! Which parameters ZeRO 3 has gathered when: fetching, prefetching and releasing along the recorded order of modules.
//!
//! Follows deepspeed/runtime/zero/partitioned_param_coordinator.py of DeepSpeed 0.19.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;

use super::leaf_modules::{LeafModules, Part};
use crate::dtype::DType;
use crate::memory::log::{Category, Stream};
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;
use crate::plan::parallel::ZeroConfig;

/// Where a parameter is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Status {
    Sharded,
    InFlight,
    Available,
}

/// A sharded parameter.
pub(super) struct Sharded {
    /// The whole of it: a storage that is filled while it is gathered.
    pub(super) whole: Tensor,
    /// Its elements.
    pub(super) elements: u64,
    /// Whether it is too small to be sharded.
    pub(super) persistent: bool,
    /// Whether a step changes it.
    trains: bool,
    /// The node's own part of it (`zero_hpz_partition_size`), from when it is first released until a step changes it.
    secondary: RefCell<Option<Tensor>>,
    status: Cell<Status>,
    /// Whether what was gathered for a layer that ran again outlives its release: the layer's saved tensors hold it until
    /// they are used.
    lingers: Cell<bool>,
    /// Whether it is gathered for a reader outside its module.
    lent: Cell<bool>,
    /// What it was gathered into beside what lingers.
    anew: RefCell<Option<Tensor>>,
    active: RefCell<BTreeSet<Part>>,
    /// The last step of the order it was fetched for.
    fetched_for: Cell<i64>,
}

impl Sharded {
    /// A parameter that is sharded: what is persistent is gathered for good after the first step.
    pub(super) fn new(whole: Tensor, persistent: bool, trains: bool) -> Self {
        let elements = whole.elements();
        Self {
            whole,
            elements,
            persistent,
            trains,
            secondary: RefCell::default(),
            status: Cell::new(Status::Sharded),
            lingers: Cell::new(false),
            lent: Cell::new(false),
            anew: RefCell::default(),
            active: RefCell::default(),
            fetched_for: Cell::new(i64::MIN),
        }
    }

    /// Memory for the whole of it.
    fn fill(&self, torch: &mut Torch) {
        if self.lingers.get() {
            let anew = torch.fresh("gathered parameter", self.whole.shape, self.whole.dtype);
            *self.anew.borrow_mut() = Some(anew);
        } else {
            self.whole.storage.fill();
        }
    }

    /// The memory goes, unless a layer that is running again has saved it.
    fn empty(&self, torch: &Torch) {
        if torch.recomputing.is_some() && self.anew.borrow().is_none() {
            return self.lingers.set(true);
        }
        self.lingers.set(false);
        drop(self.anew.take());
        self.whole.storage.empty();
    }
}

/// One gather of one or more parameters.
struct Gather {
    parameters: Vec<usize>,
    /// What several parameters are gathered into, before each gets a tensor of its own.
    flat: Option<Tensor>,
    complete: Cell<bool>,
}

/// How far the order of modules is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trace {
    Unknown,
    Recording,
    Complete,
}

/// A module in the recorded order.
struct Turn {
    module: Part,
    /// What is fetched for it.
    parameters: Rc<[usize]>,
}

/// The coordinator.
pub(super) struct Coordinator {
    /// The parameters, in order of creation.
    pub(super) parameters: Vec<Sharded>,
    config: ZeroConfig,
    world: u64,
    stream: Stream,
    trace: Cell<Trace>,
    order: RefCell<Vec<Turn>>,
    /// Which modules are gathered whole.
    pub(super) leaf_modules: LeafModules,
    queue: RefCell<VecDeque<(usize, i64)>>,
    step: Cell<usize>,
    available: Cell<u64>,
    in_flight: RefCell<BTreeMap<usize, Rc<Gather>>>,
}

impl Coordinator {
    /// A coordinator that knows nothing yet.
    pub(super) fn new(parameters: Vec<Sharded>, leaf_modules: LeafModules, config: &ZeroConfig, world: u64) -> Self {
        Self {
            parameters,
            leaf_modules,
            config: config.clone(),
            world,
            stream: if config.overlap_comm.unwrap_or(true) { Stream::Gather } else { Stream::Default },
            trace: Cell::new(Trace::Unknown),
            order: RefCell::default(),
            queue: RefCell::default(),
            step: Cell::new(0),
            available: Cell::new(0),
            in_flight: RefCell::default(),
        }
    }

    /// A pass over the model begins or ends (`reset_step`).
    pub(super) fn reset(&self, torch: &mut Torch) {
        let in_flight = self.in_flight.take();
        for (parameter, gather) in in_flight {
            self.wait(torch, &gather);
            self.free(torch, parameter);
        }
        match self.trace.get() {
            Trace::Unknown => self.trace.set(Trace::Recording),
            Trace::Recording if !self.order.borrow().is_empty() => self.trace.set(Trace::Complete),
            _ => {}
        }
        let order = self.order.borrow();
        let uses =
            order.iter().enumerate().flat_map(|(step, turn)| turn.parameters.iter().map(move |&p| (p, step as i64)));
        *self.queue.borrow_mut() = uses.collect();
        self.parameters.iter().for_each(|parameter| parameter.fetched_for.set(i64::MIN));
        self.step.set(0);
        self.available.set(0);
    }

    /// A module is about to run, forward or backward (`fetch_sub_module`).
    pub(super) fn fetch(&self, torch: &mut Torch, module: Part, parameters: &Rc<[usize]>) {
        if self.trace.get() == Trace::Recording {
            self.order.borrow_mut().push(Turn { module, parameters: Rc::clone(parameters) });
        }
        self.gather(torch, parameters.iter().copied().collect());
        for &parameter in parameters.iter() {
            self.parameters[parameter].active.borrow_mut().insert(module);
            let gather = self.in_flight.borrow_mut().remove(&parameter);
            if let Some(gather) = gather {
                self.wait(torch, &gather);
            }
        }
        if self.trace.get() == Trace::Complete {
            self.prefetch(torch, parameters);
        }
        self.step.set(self.step.get() + 1);
    }

    fn prefetch(&self, torch: &mut Torch, needed: &[usize]) {
        let step = self.step.get() as i64;
        let missing = needed.iter().filter(|&&p| self.parameters[p].fetched_for.get() < step).count();
        for _ in 0..missing {
            let Some((parameter, used_at)) = self.queue.borrow_mut().pop_front() else { break };
            self.parameters[parameter].fetched_for.set(used_at);
        }
        let room = self.config.stage3_max_live_parameters.saturating_sub(self.available.get());
        let limit = room.min(self.config.stage3_prefetch_bucket_size);
        let mut chosen = BTreeSet::new();
        let mut elements = 0;
        while elements < limit {
            let Some((index, used_at)) = self.queue.borrow_mut().pop_front() else { break };
            let parameter = &self.parameters[index];
            parameter.fetched_for.set(parameter.fetched_for.get().max(used_at));
            if parameter.status.get() == Status::Sharded && chosen.insert(index) {
                elements += parameter.elements;
            }
        }
        self.gather(torch, chosen);
    }

    /// Begins to gather those of some parameters that are not here: first those that the node has, then the others.
    fn gather(&self, torch: &mut Torch, parameters: BTreeSet<usize>) {
        let missing = parameters.into_iter().filter(|&p| self.parameters[p].status.get() == Status::Sharded);
        let (near, far): (Vec<usize>, Vec<usize>) =
            missing.partition(|&p| self.parameters[p].secondary.borrow().is_some());
        [near, far]
            .into_iter()
            .filter(|missing| !missing.is_empty())
            .for_each(|missing| self.all_gather(torch, missing));
    }

    /// `all_gather_coalesced`.
    fn all_gather(&self, torch: &mut Torch, missing: Vec<usize>) {
        let elements: u64 = missing.iter().map(|&p| self.parameters[p].elements).sum();
        self.available.set(self.available.get() + elements);
        let share = |p: usize| self.parameters[p].elements.div_ceil(self.world);
        let flat = match missing.as_slice() {
            [one] => {
                torch.on_stream(self.stream, |torch| self.parameters[*one].fill(torch));
                None
            }
            // MiCS gathers every parameter where it will be (deepspeed/runtime/zero/mics.py of DeepSpeed 0.17).
            many if self.config.mics_ranks().is_some() => {
                let fill = |&p: &usize| torch.on_stream(self.stream, |_| self.parameters[p].whole.storage.fill());
                many.iter().for_each(fill);
                None
            }
            many => {
                let padded = many.iter().map(|&p| share(p) * self.world);
                Some(torch.flat("all-gather output", padded.sum(), DType::BF16, self.stream))
            }
        };
        if self.config.offload_param.as_ref().is_some_and(|offload| offload.is_on()) {
            // Shards come up from the host for the gather.
            let shards: Vec<Tensor> =
                missing.iter().map(|&p| torch.flat("_to_copy", share(p), DType::BF16, self.stream)).collect();
            drop(shards);
        }
        missing.iter().for_each(|&p| self.parameters[p].status.set(Status::InFlight));
        let gather = Rc::new(Gather { parameters: missing, flat, complete: Cell::new(false) });
        for &parameter in &gather.parameters {
            self.in_flight.borrow_mut().insert(parameter, Rc::clone(&gather));
        }
    }

    /// What was gathered together is copied apart; the flat buffer goes when the last of its parameters was asked for.
    fn wait(&self, torch: &mut Torch, gather: &Gather) {
        if gather.complete.replace(true) {
            return;
        }
        for &parameter in &gather.parameters {
            if gather.flat.is_some() {
                torch.on_stream(self.stream, |torch| self.parameters[parameter].fill(torch));
            }
            self.parameters[parameter].status.set(Status::Available);
        }
    }

    /// A module has run, forward or backward (`release_sub_module`).
    pub(super) fn release(&self, torch: &mut Torch, module: Part, parameters: &[usize]) {
        let mut going: BTreeSet<usize> = parameters.iter().copied().collect();
        if self.trace.get() == Trace::Complete {
            let step = self.step.get();
            going.retain(|&p| !self.parameters[p].persistent && self.parameters[p].fetched_for.get() <= step as i64);
            // What is used again soon stays.
            let mut passed = 0;
            for turn in self.order.borrow().iter().skip(step) {
                let used = self.leaf_modules.seen(module, turn.module).unwrap_or(&turn.parameters);
                if passed >= self.config.stage3_max_reuse_distance || going.is_empty() {
                    break;
                }
                for parameter in used.iter() {
                    going.remove(parameter);
                    passed += self.parameters[*parameter].elements;
                }
            }
        }
        for &parameter in parameters {
            self.parameters[parameter].active.borrow_mut().remove(&module);
            if going.contains(&parameter) {
                self.free(torch, parameter);
            }
        }
    }

    fn free(&self, torch: &mut Torch, index: usize) {
        let parameter = &self.parameters[index];
        let idle = parameter.active.borrow().is_empty();
        if !idle || parameter.status.get() != Status::Available {
            return;
        }
        self.keep_secondary(torch, parameter);
        parameter.status.set(Status::Sharded);
        parameter.empty(torch);
        self.available.set(self.available.get().saturating_sub(parameter.elements));
    }

    /// Modules whose turn in backward never came (an embedding) let go at its end.
    pub(super) fn release_leftovers(&self, torch: &mut Torch) {
        let sharded = (0..self.parameters.len()).filter(|&index| !self.parameters[index].persistent);
        sharded.for_each(|index| self.release_all_uses(torch, index));
    }

    fn release_all_uses(&self, torch: &mut Torch, index: usize) {
        let parameter = &self.parameters[index];
        parameter.active.borrow_mut().clear();
        // What was saved and never used goes with the graph.
        if parameter.status.get() == Status::Sharded && parameter.lingers.replace(false) {
            parameter.whole.storage.empty();
        }
        self.free(torch, index);
    }

    /// One parameter is read outside its module (`GatheredParameters`): gathered flat, then copied into its shape
    /// (`_allgather_params`).
    pub(super) fn lend(&self, torch: &mut Torch, weight: &Tensor) {
        let Some(parameter) = self.of_storage(weight).filter(|one| one.status.get() == Status::Sharded) else { return };
        let padded = parameter.elements.div_ceil(self.world) * self.world;
        let flat = torch.flat("all_gather", padded, DType::BF16, Stream::Default);
        parameter.whole.storage.fill();
        drop(flat);
        parameter.lent.set(true);
    }

    /// It goes back to shards.
    pub(super) fn take_back(&self, _torch: &mut Torch, weight: &Tensor) {
        if let Some(parameter) = self.of_storage(weight).filter(|one| one.lent.replace(false)) {
            parameter.whole.storage.empty();
        }
    }

    fn of_storage(&self, weight: &Tensor) -> Option<&Sharded> {
        self.parameters.iter().find(|one| Rc::ptr_eq(&one.whole.storage, &weight.storage))
    }

    /// All parameters at once, each where it will be (`_allgather_params_coalesced`).
    pub(super) fn gather_all(&self) {
        for parameter in self.parameters.iter().filter(|one| one.status.get() == Status::Sharded) {
            parameter.whole.storage.fill();
            parameter.status.set(Status::Available);
        }
    }

    /// The order of modules is recorded anew (`_invalidate_trace`).
    pub(super) fn forget(&self) {
        self.trace.set(Trace::Unknown);
        self.order.borrow_mut().clear();
    }

    /// A step begins: everything is sharded, what is persistent too (`release_and_reset_all`).
    pub(super) fn release_everything(&self, torch: &mut Torch) {
        (0..self.parameters.len()).for_each(|index| self.release_all_uses(torch, index));
    }

    /// A parameter that goes back to shards leaves the node's part of it behind (`_partition_param_sec`).
    fn keep_secondary(&self, torch: &mut Torch, parameter: &Sharded) {
        let ranks = self.config.zero_hpz_partition_size;
        if ranks < 2 || parameter.secondary.borrow().is_some() {
            return;
        }
        let elements = parameter.elements.div_ceil(self.world) * self.world / ranks;
        let make = |torch: &mut Torch| torch.fresh("second partition", Shape::from([elements]), DType::BF16);
        *parameter.secondary.borrow_mut() = Some(torch.in_category(Category::Weights, make));
    }

    /// Everything is sharded for the first time.
    pub(super) fn partition(&self, torch: &mut Torch) {
        self.parameters.iter().for_each(|parameter| self.keep_secondary(torch, parameter));
    }

    /// A step ends: what is persistent is gathered anew, and the node's parts of what was trained are stale.
    pub(super) fn stepped(&self) {
        for parameter in self.parameters.iter().filter(|parameter| parameter.persistent) {
            parameter.whole.storage.fill();
            parameter.lingers.set(false);
            parameter.status.set(Status::Available);
        }
        for parameter in self.parameters.iter().filter(|parameter| parameter.trains) {
            drop(parameter.secondary.take());
        }
    }
}
