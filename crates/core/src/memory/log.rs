//! What happened to memory, in order: the one thing a simulation leaves behind.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};

use super::effort::Effort;
use super::phase::Phase;
use crate::dtype::DType;
use crate::model::Shape;

/// A storage, by its place in [`Log::storages`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct StorageId(pub u32);

/// One event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// A storage comes to life (once in every step that is written down again).
    Allocate(StorageId),
    /// A storage dies.
    Free(StorageId),
    /// A phase begins, by its place in [`Log::phases`].
    Phase(u32),
    /// The phase that is on ends; what happens until the next begins belongs to none.
    PhaseEnd,
    /// The allocator gives cached memory back to the driver (`empty_cache`).
    EmptyCache,
}

/// What a storage is and who made it.
#[derive(Debug, Clone, Copy)]
pub struct StorageInfo {
    /// Bytes asked for.
    pub bytes: u64,
    /// What it is for.
    pub category: Category,
    /// The operation that made it.
    pub operation: &'static str,
    /// The module whose code ran, by its place in the program's modules.
    pub module: u32,
    /// Sizes of the tensor it was made for.
    pub shape: Noted,
    /// Element type of that tensor.
    pub dtype: DType,
    /// The stream it was made on: the allocator keeps free blocks of one apart from those of another.
    pub stream: Stream,
    /// The card it is on, where a model is spread over several by modules.
    pub card: u8,
}

impl StorageInfo {
    /// Whether another is the same, whoever's code made it.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        (self.bytes, self.category, self.operation, self.dtype, self.stream)
            == (other.bytes, other.category, other.operation, other.dtype, other.stream)
            && self.shape == other.shape
    }
}

/// The sizes of a tensor, for people to read. A long run notes millions: a quarter of what a [`Shape`] takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Noted {
    len: u8,
    sizes: [u32; Self::DIMS],
}

impl Noted {
    const DIMS: usize = 6;

    /// The sizes; those past the sixth are in it.
    pub fn sizes(&self) -> Vec<u64> {
        self.sizes[..self.len as usize].iter().map(|size| u64::from(*size)).collect()
    }
}

impl From<Shape> for Noted {
    fn from(shape: Shape) -> Self {
        let all = shape.sizes();
        let mut noted = Self { len: all.len().min(Self::DIMS) as u8, sizes: [1; Self::DIMS] };
        for (at, size) in all.iter().enumerate() {
            let place = &mut noted.sizes[at.min(Self::DIMS - 1)];
            *place = u32::try_from(u64::from(*place).saturating_mul(*size)).unwrap_or(u32::MAX);
        }
        noted
    }
}

/// A stream, as far as the allocator cares.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Stream {
    /// The one everything runs on.
    #[default]
    Default,
    /// What is gathered is copied in on it.
    Gather,
    /// Gradients are reduced on it.
    Reduce,
    /// Shards are cast on it before they are gathered.
    Cast,
    /// Gradients are reduced on it over copies of the model.
    AllReduce,
    /// CUDA graphs are recorded on it, in a pool of their own.
    Recording,
    /// One of those of a further stage of a pipeline rank.
    OfStage(u8),
}

/// What memory is used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Category {
    /// Parameters of the model.
    Weights,
    /// Parameters of the reference model of a task.
    Reference,
    /// Parameters of a reward model.
    Reward,
    /// Parameters of a teacher.
    Teacher,
    /// Parameters of a value model, which is trained too.
    Value,
    /// Tensors of the model that are no parameters.
    Buffers,
    /// Trainable adapter parameters.
    Adapters,
    /// The batch.
    Batch,
    /// Gradients of parameters.
    Gradients,
    /// State of the optimizer.
    OptimizerState,
    /// What forward makes and keeps.
    Activations,
    /// Logits, the loss and their gradients.
    Logits,
    /// Keys and values of generation.
    Cache,
    /// What lives for a moment inside an operation, a backward pass or a step.
    Temporaries,
    /// What several cards exchange: gathered parameters, buckets, reduction buffers.
    Communication,
    /// Library workspaces.
    Workspace,
}

/// The events of a run.
#[derive(Debug, Default)]
pub struct Log {
    /// In order.
    pub events: Vec<Event>,
    /// Every storage that ever lived.
    pub storages: Vec<StorageInfo>,
    /// The phases, in order.
    pub phases: Vec<Phase>,
    /// What engines keep in the host's memory instead of the card's, for the whole run.
    pub host_parts: Vec<HostPart>,
    /// What tensors hold in pinned host memory.
    pub host: HostBytes,
    /// What one step computes and moves.
    pub effort: Effort,
    /// Whether cuDNN's attention ran.
    pub ran_cudnn: bool,
    /// Why the run would have stopped, where it cannot run as asked.
    pub refused: Option<String>,
    /// Units of layers, turns of a pipeline, and steps that a model of few layers ran, that were written down, not run.
    pub folded: usize,
    /// Whether layers that were taken to be alike were not: then nothing of this is so.
    pub(super) misfolded: bool,
    /// Ranges of events that are like one before them, in order.
    pub likes: Vec<Like>,
    /// Who is running now: stamped on new storages.
    context: Context,
}

/// Events that are those of an earlier range, but for the numbers of phases and of some storages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Like {
    /// The first event.
    pub start: usize,
    /// How many there are.
    pub events: usize,
    /// Where the earlier range begins.
    pub of: usize,
    /// Storages that stand in the place of others there; where there are none, the range frees all that it makes, and nothing else.
    pub others: Vec<(StorageId, StorageId)>,
}

impl Like {
    /// Whether it frees all that it makes, and nothing else.
    pub(super) fn is_step(&self) -> bool {
        self.others.is_empty()
    }
}

/// Weights that a device map puts on the host, once for all cards.
pub const OFFLOADED: &str = "weights that the cards have no room for";

/// What is on the host of one rank alone.
pub const ON_RANK_0: &str = "full state dict while saving, on rank 0";

/// Memory of the host that a run keeps.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, schemars::JsonSchema)]
pub struct HostPart {
    /// What it is.
    pub name: &'static str,
    /// Bytes.
    pub bytes: u64,
    /// Whether its pages are pinned.
    pub pinned: bool,
}

/// Bytes on the host: now, and at most.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HostBytes {
    now: u64,
    /// The most there ever was.
    pub peak: u64,
}

impl HostBytes {
    /// What there is.
    pub fn now(&self) -> u64 {
        self.now
    }

    /// Some come to life.
    pub fn take(&mut self, bytes: u64) {
        self.now = self.now.saturating_add(bytes);
        self.peak = self.peak.max(self.now);
    }

    /// Some die.
    pub fn give_back(&mut self, bytes: u64) {
        self.now = self.now.saturating_sub(bytes);
    }
}

#[derive(Debug, Clone, Copy)]
struct Context {
    category: Category,
    module: u32,
    stream: Stream,
    card: u8,
}

impl Default for Context {
    fn default() -> Self {
        Self { category: Category::Weights, module: 0, stream: Stream::Default, card: 0 }
    }
}

/// The log, shared by every storage so that its end is written down.
pub type SharedLog = Rc<RefCell<Log>>;

/// Bytes on the device that tensors share; dropping the last owner frees them.
#[derive(Debug)]
pub struct Storage {
    id: StorageId,
    /// The life it is in now: a storage can be emptied and filled again (`resize_`) while tensors look at it.
    alive: Cell<Option<StorageId>>,
    log: SharedLog,
}

thread_local! {
    static WATCHED: RefCell<Option<Vec<Watched>>> = const { RefCell::new(None) };
}

/// A storage in one of its lives.
pub(super) type Watched = (StorageId, Weak<Storage>);

/// While it lives, storages that are made are remembered, so that they can be given other names.
pub(super) struct Watch;

impl Watch {
    /// From now on.
    pub(super) fn begin() -> Self {
        WATCHED.set(Some(Vec::new()));
        Self
    }

    /// Those that came to life since.
    pub(super) fn end(&self) -> Vec<Watched> {
        WATCHED.take().unwrap_or_default()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        WATCHED.set(None);
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        self.empty();
    }
}

impl Storage {
    /// A new storage of `shape` elements of `dtype`, made by `operation`.
    pub fn new(log: &SharedLog, operation: &'static str, shape: Shape, dtype: DType) -> Rc<Self> {
        Self::of_bytes(log, operation, shape.elements().saturating_mul(dtype.size()), shape, dtype)
    }

    /// A new storage of a size of its own.
    pub fn of_bytes(log: &SharedLog, operation: &'static str, bytes: u64, shape: Shape, dtype: DType) -> Rc<Self> {
        crate::work::record();
        crate::work::check_size(bytes);
        let mut inner = log.borrow_mut();
        let id = StorageId(inner.storages.len() as u32);
        let Context { category, module, stream, card } = inner.context;
        let shape = shape.into();
        inner.storages.push(StorageInfo { bytes, category, operation, module, shape, dtype, stream, card });
        inner.events.push(Event::Allocate(id));
        drop(inner);
        let storage = Rc::new(Self { id, alive: Cell::new(Some(id)), log: Rc::clone(log) });
        storage.watch(id);
        storage
    }

    /// A storage that takes no bytes until it is filled.
    pub fn hollow(log: &SharedLog, operation: &'static str, bytes: u64, shape: Shape, dtype: DType) -> Rc<Self> {
        let mut inner = log.borrow_mut();
        let id = StorageId(inner.storages.len() as u32);
        let Context { category, module, stream, card } = inner.context;
        let shape = shape.into();
        inner.storages.push(StorageInfo { bytes, category, operation, module, shape, dtype, stream, card });
        drop(inner);
        Rc::new(Self { id, alive: Cell::new(None), log: Rc::clone(log) })
    }

    /// A storage that is in the log already: one of a layer that was written down, not run.
    pub(super) fn known(log: &SharedLog, id: StorageId) -> Rc<Self> {
        Rc::new(Self { id, alive: Cell::new(Some(id)), log: Rc::clone(log) })
    }

    /// Whether its life is written to this log: what takes no memory has one of its own.
    pub(super) fn is_in(&self, log: &SharedLog) -> bool {
        Rc::ptr_eq(&self.log, log)
    }

    fn watch(self: &Rc<Self>, id: StorageId) {
        WATCHED.with_borrow_mut(|watched| watched.iter_mut().for_each(|all| all.push((id, Rc::downgrade(self)))));
    }

    /// Where it is in a life, that life takes another name in the log, and ends by it.
    pub(super) fn rename(&self, life: StorageId, name: StorageId) {
        if self.alive.get() == Some(life) {
            self.alive.set(Some(name));
        }
    }

    /// Its end is in the log already.
    pub(super) fn forget(&self) {
        self.alive.set(None);
    }

    /// Gives its bytes back while tensors still look at it (`untyped_storage().resize_(0)`).
    pub fn empty(&self) {
        if let Some(id) = self.alive.take() {
            self.log.borrow_mut().events.push(Event::Free(id));
        }
    }

    /// Whether it has its bytes.
    pub fn is_alive(&self) -> bool {
        self.alive.get().is_some()
    }

    /// Takes the bytes again that it was made with.
    pub fn fill(self: &Rc<Self>) {
        if self.alive.get().is_some() {
            return;
        }
        crate::work::record();
        let mut log = self.log.borrow_mut();
        let id = StorageId(log.storages.len() as u32);
        if let Some(info) = log.storages.get(self.id.0 as usize).copied() {
            let stream = log.context.stream;
            log.storages.push(StorageInfo { stream, ..info });
            log.events.push(Event::Allocate(id));
            self.alive.set(Some(id));
            self.watch(id);
        }
    }

    /// Its name in the log.
    pub fn id(&self) -> StorageId {
        self.id
    }
}

impl Log {
    /// What new storages are for; returns what they were for.
    pub fn set_category(&mut self, category: Category) -> Category {
        std::mem::replace(&mut self.context.category, category)
    }

    /// What new storages are for.
    pub fn category(&self) -> Category {
        self.context.category
    }

    /// Whose code runs.
    pub fn module(&self) -> u32 {
        self.context.module
    }

    /// Whose code runs from now on; returns whose ran.
    pub fn set_module(&mut self, module: u32) -> u32 {
        std::mem::replace(&mut self.context.module, module)
    }

    /// The stream new storages are made on; returns which it was.
    pub fn set_stream(&mut self, stream: Stream) -> Stream {
        std::mem::replace(&mut self.context.stream, stream)
    }

    /// The card new storages are on; returns which it was.
    pub fn set_card(&mut self, card: u8) -> u8 {
        std::mem::replace(&mut self.context.card, card)
    }

    /// What a storage turns out to be for (a gradient is known as one only when it is kept).
    pub fn reclassify(&mut self, id: StorageId, category: Category) {
        if let Some(info) = self.storages.get_mut(id.0 as usize) {
            info.category = category;
        }
    }

    /// A tensor is kept on the host. torch rounds pinned ones up to a power of two (CachingHostAllocatorImpl.h).
    pub fn on_host(&mut self, name: &'static str, bytes: u64, pinned: bool) {
        let bytes = if pinned { bytes.checked_next_power_of_two().unwrap_or(bytes) } else { bytes };
        match self.host_parts.iter_mut().find(|part| part.name == name && part.pinned == pinned) {
            Some(part) => part.bytes = part.bytes.saturating_add(bytes),
            None => self.host_parts.push(HostPart { name, bytes, pinned }),
        }
    }

    /// Something is on the host for a moment, now and then.
    pub fn once_on_host(&mut self, name: &'static str, bytes: u64) {
        if bytes > 0 && self.host_parts.iter().all(|part| part.name != name) {
            self.on_host(name, bytes, false);
        }
    }

    /// What one of several cards sees: its own storages, and a library workspace of its own.
    pub(super) fn of_card(&self, card: u8, nowhere: u8) -> Self {
        let used = self.storages.iter().any(|info| info.card == card && info.category != Category::Workspace);
        let shared = |info: &StorageInfo| info.category == Category::Workspace && info.card != nowhere;
        let own = |info: &StorageInfo| used && (info.card == card || shared(info));
        let seen = |event: &&Event| match event {
            Event::Allocate(id) | Event::Free(id) => self.storages.get(id.0 as usize).is_some_and(own),
            Event::Phase(_) | Event::PhaseEnd | Event::EmptyCache => true,
        };
        Self {
            events: self.events.iter().filter(seen).copied().collect(),
            storages: self.storages.clone(),
            phases: self.phases.clone(),
            host_parts: self.host_parts.clone(),
            host: self.host,
            effort: self.effort,
            ran_cudnn: self.ran_cudnn,
            ..Self::default()
        }
    }

    /// Makes room for a run of so many operations: one makes two or three storages on the way there and back. Room that is not used
    /// costs nothing, and a row that outgrows its room is copied to a new one; beyond what any answer may take none is made.
    pub fn reserve(&mut self, operations: u64) {
        let operations = operations.min(1 << 20) as usize;
        self.storages.reserve(operations * 3);
        self.events.reserve(operations * 16);
    }

    /// Begins a phase.
    pub fn phase(&mut self, phase: Phase) {
        let index = self.phases.len() as u32;
        self.phases.push(phase);
        self.events.push(Event::Phase(index));
    }

    /// Ends the phase that is on.
    pub fn end_phase(&mut self) {
        self.events.push(Event::PhaseEnd);
    }
}
