//! A shape-only torch: tensors are made, viewed, saved for backward and freed as the real one does on a CUDA device.
//!
//! | module | operations |
//! |---|---|
//! | `assign` | writing into parts of tensors |
//! | `views` | views, copies, joins and cuts |
//! | `pointwise` | arithmetic, casts, activations, dropout |
//! | `reduce` | sums, means, softmax, norms |
//! | `matmul` | products and linears |
//! | `index` | embeddings, gathers, sorts |
//! | `attention`, `attention_scratch` | scaled dot product attention and its kernels |
//! | `flash_attn` | the flash-attn package |
//! | `gated_delta` | flash-linear-attention's gated delta rule |
//! | [`ring`] | attention over a sequence that is split over cards |
//! | `loss` | cross entropy |
//! | `convolution` | convolutions |
//! | `quantised`, `gemm_4bit` | weights in few bits and linears over them |
//! | `stored` | the same for checkpoints of other libraries |

mod activation;
pub mod assign;
pub mod attention;
mod attention_scratch;
pub mod collective;
pub mod convolution;
mod cudnn;
pub mod flash_attn;
mod gated_delta;
mod gemm_4bit;
pub mod index;
pub mod loss;
pub mod matmul;
pub mod pointwise;
pub mod quantised;
pub mod reduce;
pub mod ring;
pub mod stored;
pub mod views;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use super::autograd::{Edge, Frame, Gradients, Leaf, Node, Saved};
use super::device::Device;
use super::effort::Effort;
use super::fold::Fold;
use super::log::{Category, Log, SharedLog, Storage, StorageId, Stream};
use super::saved::{Stash, ToHost};
use super::tensor::{Layout, Layouts, Strides, Tensor, contiguous_strides, pointwise_strides};
use crate::dtype::DType;
use crate::model::Shape;
use crate::plan::PlanError;

/// The state of the library: what it records, and what is switched on.
pub struct Torch {
    /// What happened to memory.
    pub log: SharedLog,
    /// The card.
    pub device: Device,
    /// Whether graphs are built.
    pub grad_enabled: bool,
    /// The type autocast computes in, when it is on.
    pub autocast: Option<DType>,
    /// Whether the model is in training mode.
    pub training: bool,
    /// Whether no graph is built whatever the model's code says (`torch.no_grad()` around it).
    pub no_graph: bool,
    /// Whether dropout drops anything (TRL's `disable_dropout_in_model` sets its probability to 0).
    pub drops: bool,
    /// Casts of weights that autocast keeps until its region ends.
    pub cast_cache: BTreeMap<StorageId, Tensor>,
    pub(super) sequence: u64,
    pub(super) visit: u64,
    /// The checkpoint whose first run is on.
    pub recording: Option<Rc<Frame>>,
    /// The checkpoint whose second run is on.
    pub recomputing: Option<Rc<Frame>>,
    /// What of that which is saved for backward waits on the host.
    pub saves_on_host: Option<ToHost>,
    /// What of it is still on the card.
    pub(super) stash: Stash,
    /// The kernel of scaled dot product attention that is asked for (`sdpa_kernel`).
    pub forced_kernel: Option<attention::Kernel>,
    /// The cards that attention goes round over (`context_parallel`).
    pub ring: Option<ring::Ring>,
    /// The second run has made all that is needed: nothing more is really computed.
    pub stopped: bool,
    /// What nodes hold as plain attributes: it lives until the graph does, whatever backward frees.
    kept_with_graph: Vec<(Tensor, Option<Rc<Leaf>>)>,
    /// What a loop's names hold of the last micro-batch, and where its graph ends.
    pub last: Option<(Vec<Tensor>, usize)>,
    /// What the node whose backward runs saved.
    pub(super) retained: Vec<Saved>,
    /// Whether linears are functions of DeepSpeed's (ZeRO 3), which keep other things than torch's.
    pub linears_are_functions: bool,
    /// What has been computed and moved so far.
    pub(in crate::memory) effort: Effort,
    /// Whether layers that are alike may be run in part, and the stack of which that is so now.
    pub(super) folds: bool,
    pub(super) fold: Option<Box<Fold>>,
    in_backward: bool,
    workspaces: [Option<Tensor>; 2],
    lt_workspaces: [Option<Tensor>; 2],
    phantoms: SharedLog,
    pub(super) layouts: Layouts,
}

/// What was in force around a backward pass.
pub struct BeforeBackward {
    grad: bool,
    autocast: Option<DType>,
    category: Category,
    module: u32,
    nested: bool,
}

/// What was in force around a recomputation.
pub struct BeforeRecompute {
    recomputing: Option<Rc<Frame>>,
    recording: Option<Rc<Frame>>,
    stopped: bool,
    grad: bool,
    category: Category,
    module: u32,
}

impl Torch {
    /// A fresh library on a card.
    pub fn new(device: Device) -> Self {
        Self {
            log: SharedLog::default(),
            device,
            grad_enabled: true,
            autocast: None,
            training: true,
            no_graph: false,
            drops: true,
            cast_cache: BTreeMap::new(),
            sequence: 0,
            visit: 0,
            recording: None,
            recomputing: None,
            saves_on_host: None,
            stash: Stash::default(),
            forced_kernel: None,
            ring: None,
            stopped: false,
            kept_with_graph: Vec::new(),
            last: None,
            retained: Vec::new(),
            linears_are_functions: false,
            effort: Effort::default(),
            folds: false,
            fold: None,
            in_backward: false,
            workspaces: [None, None],
            lt_workspaces: [None, None],
            phantoms: SharedLog::default(),
            layouts: Layouts::default(),
        }
    }

    /// What happened, once all that writes to the log is gone; `holders` are what the run still has.
    pub fn finish<T>(self, holders: T) -> Result<Log, PlanError> {
        let log = Rc::clone(&self.log);
        drop((holders, self));
        let held = || PlanError::Internal { what: "memory is held beyond the end of the run".into() };
        Rc::try_unwrap(log).map(RefCell::into_inner).map_err(|_| held())
    }

    // ---- making tensors ------------------------------------------------------------------------------------------

    /// A fresh dense tensor.
    pub fn fresh(&mut self, operation: &'static str, shape: Shape, dtype: DType) -> Tensor {
        let strides = contiguous_strides(&shape);
        self.fresh_strided(operation, shape, strides, dtype)
    }

    /// A fresh dense tensor in a given order of dimensions.
    pub fn fresh_strided(&mut self, operation: &'static str, shape: Shape, strides: Strides, dtype: DType) -> Tensor {
        let layout = self.layouts.of(&shape, &strides);
        self.fresh_laid_out(operation, layout, dtype)
    }

    fn fresh_laid_out(&mut self, operation: &'static str, layout: Rc<Layout>, dtype: DType) -> Tensor {
        if !self.stopped {
            self.effort.write(&layout.shape, dtype);
        }
        let log = if self.stopped { &self.phantoms } else { &self.log };
        Tensor::new(Storage::new(log, operation, layout.shape, dtype), layout, dtype)
    }

    /// A fresh tensor like another.
    pub fn fresh_like(&mut self, operation: &'static str, like: &Tensor, dtype: DType) -> Tensor {
        self.read(&[like]);
        let strides = pointwise_strides(&like.shape, &[like]);
        if strides == like.strides {
            return self.fresh_laid_out(operation, Rc::clone(&like.layout), dtype);
        }
        self.fresh_strided(operation, like.shape, strides, dtype)
    }

    /// A kernel reads these.
    pub(in crate::memory) fn read(&mut self, tensors: &[&Tensor]) {
        if !self.stopped {
            let bytes = |tensor: &&Tensor| tensor.elements().saturating_mul(tensor.dtype.size());
            tensors.iter().map(bytes).for_each(|bytes| self.effort.touch(bytes));
        }
    }

    /// `count` products of `rows × inner` by `inner × columns` run.
    pub(in crate::memory) fn multiply(&mut self, dtype: DType, count: u64, sizes: [u64; 3]) {
        if !self.stopped {
            self.effort.multiply(dtype, count, sizes);
        }
    }

    /// A tensor that takes no memory: a stand-in where nothing is really computed.
    pub fn phantom(&mut self, shape: Shape, dtype: DType) -> Tensor {
        let storage = Storage::new(&self.phantoms, "phantom", shape, dtype);
        Tensor::new(storage, self.layouts.of(&shape, &contiguous_strides(&shape)), dtype)
    }

    /// Bytes that live only inside an operation.
    pub fn scratch(&mut self, operation: &'static str, bytes: u64) -> Option<Tensor> {
        if bytes == 0 {
            return None;
        }
        let before = self.log.borrow_mut().set_category(Category::Temporaries);
        let tensor = self.fresh(operation, Shape::from([bytes]), DType::U8);
        self.log.borrow_mut().set_category(before);
        Some(tensor)
    }

    /// A trainable tensor: a parameter with a place for its gradient.
    pub fn leaf(&mut self, tensor: Tensor) -> (Tensor, Rc<Leaf>) {
        let leaf = Rc::new(Leaf {
            grad: Default::default(),
            strides: tensor.strides,
            shape: tensor.shape,
            dtype: tensor.dtype,
            grad_dtype: Default::default(),
            after: Default::default(),
            stream: Default::default(),
        });
        let node = Node::leaf(Rc::clone(&leaf));
        (Tensor { edge: Some(Edge { node, slot: 0 }), ..tensor }, leaf)
    }

    /// The output of a pointwise kernel, without a graph.
    pub fn pointwise(&mut self, operation: &'static str, inputs: &[&Tensor], dtype: DType) -> Tensor {
        let mut shape = inputs.first().map_or(Shape::new(&[]), |t| t.shape);
        for input in inputs.iter().skip(1) {
            shape = shape.broadcast(&input.shape).unwrap_or(shape);
        }
        let strides = pointwise_strides(&shape, inputs);
        self.read(inputs);
        self.fresh_strided(operation, shape, strides, dtype)
    }

    // ---- the graph -----------------------------------------------------------------------------------------------

    /// Whether an operation on these inputs goes into the graph.
    pub fn records(&self, inputs: &[&Tensor]) -> bool {
        self.grad_enabled && inputs.iter().any(|t| t.needs_grad())
    }

    /// Hangs one output into the graph.
    pub fn attach(
        &mut self,
        output: Tensor,
        inputs: &[&Tensor],
        backward: impl FnOnce(&mut Torch, Tensor) -> Gradients + 'static,
    ) -> Tensor {
        let next = inputs.iter().map(|t| t.edge.clone()).collect();
        let work = move |torch: &mut Torch, mut gradients: Gradients| match gradients.pop().flatten() {
            Some(gradient) => backward(torch, gradient),
            None => Gradients::new(),
        };
        let node = Node::new(self, 1, next, Box::new(work));
        Tensor { edge: Some(Edge { node, slot: 0 }), ..output }
    }

    /// Hangs several outputs of one operation into the graph.
    pub fn attach_many(
        &mut self,
        outputs: &mut [Tensor],
        inputs: &[&Tensor],
        backward: impl FnOnce(&mut Torch, Gradients) -> Gradients + 'static,
    ) {
        let next = inputs.iter().map(|t| t.edge.clone()).collect();
        let node = Node::new(self, outputs.len(), next, Box::new(backward));
        for (slot, output) in outputs.iter_mut().enumerate() {
            output.edge = Some(Edge { node: Rc::clone(&node), slot: slot as u8 });
        }
    }

    /// The newest node.
    pub(super) fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Holds a tensor until the graph dies: what a Python function keeps as an attribute of its context.
    pub fn keep_with_graph(&mut self, tensor: Tensor) {
        self.kept_with_graph.push((tensor, None));
    }

    /// A tensor that is made to require a gradient on the way: with its gradient it lives as long as the graph.
    pub fn leaf_in_graph(&mut self, tensor: Tensor) -> Tensor {
        let (tensor, leaf) = self.leaf(tensor);
        self.kept_with_graph.push((tensor.detached(), Some(leaf)));
        tensor
    }

    /// How much is held with the graph: a mark to return to.
    pub fn graph_mark(&self) -> usize {
        self.kept_with_graph.len()
    }

    /// The part of the graph that was made before a mark dies.
    pub fn drop_graph_before(&mut self, mark: usize) {
        drop(self.kept_with_graph.drain(..mark));
    }

    /// The names that a loop had for the last micro-batch go, and with them its graph.
    pub fn let_go_of_last(&mut self) {
        if let Some((held, mark)) = self.last.take() {
            drop(held);
            self.drop_graph_before(mark);
        }
    }

    /// The part of the graph that was made since a mark dies.
    pub fn drop_graph(&mut self, mark: usize) {
        self.kept_with_graph.truncate(mark);
    }

    // ---- modes ---------------------------------------------------------------------------------------------------

    /// Whose code runs now.
    pub fn module(&self) -> u32 {
        self.log.borrow().module()
    }

    /// Sets whose code runs.
    pub fn set_module(&mut self, module: u32) {
        self.log.borrow_mut().set_module(module);
    }

    /// Goes on in the name of the module that a tensor was made for; returns whose code ran.
    pub fn enter_module_of(&mut self, tensor: &Tensor) -> u32 {
        let mut log = self.log.borrow_mut();
        let module = log.storages.get(tensor.storage.id().0 as usize).map_or(0, |storage| storage.module);
        log.set_module(module)
    }

    /// Notes why the run would stop here; the first reason counts.
    pub fn refuse(&self, why: &str) {
        self.log.borrow_mut().refused.get_or_insert_with(|| why.to_owned());
    }

    /// Runs something on another stream.
    pub fn on_stream<T>(&mut self, stream: Stream, body: impl FnOnce(&mut Self) -> T) -> T {
        let before = self.log.borrow_mut().set_stream(stream);
        let result = body(self);
        self.log.borrow_mut().set_stream(before);
        result
    }

    /// Runs something that becomes a CUDA graph (torch/_inductor/cudagraph_trees.py): in a pool of its own, and without
    /// workspaces of cuBLAS that outlive it (`clear_cublas_manager`).
    pub fn recorded<T>(&mut self, body: impl FnOnce(&mut Self) -> T) -> T {
        let forget = |torch: &mut Self| (torch.workspaces, torch.lt_workspaces) = Default::default();
        forget(self);
        let result = self.on_stream(Stream::Recording, body);
        forget(self);
        result
    }

    /// Runs something whose new storages are for `category`.
    pub fn in_category<T>(&mut self, category: Category, body: impl FnOnce(&mut Self) -> T) -> T {
        let before = self.log.borrow_mut().set_category(category);
        let result = body(self);
        self.log.borrow_mut().set_category(before);
        result
    }

    pub(super) fn enter_backward(&mut self) -> BeforeBackward {
        let module = self.module();
        let category = self.log.borrow_mut().set_category(Category::Temporaries);
        let (grad, nested) = (self.grad_enabled, self.in_backward);
        let before = BeforeBackward { grad, autocast: self.autocast.take(), category, module, nested };
        self.grad_enabled = false;
        self.in_backward = true;
        before
    }

    pub(super) fn leave_backward(&mut self, before: BeforeBackward) {
        self.grad_enabled = before.grad;
        self.autocast = before.autocast;
        self.in_backward = before.nested;
        self.log.borrow_mut().set_category(before.category);
        self.set_module(before.module);
    }

    pub(super) fn begin_recompute(&mut self, frame: &Rc<Frame>) -> BeforeRecompute {
        let module = self.module();
        let category = self.log.borrow_mut().set_category(Category::Activations);
        BeforeRecompute {
            recomputing: self.recomputing.replace(Rc::clone(frame)),
            recording: self.recording.take(),
            stopped: std::mem::replace(&mut self.stopped, false),
            grad: std::mem::replace(&mut self.grad_enabled, true),
            category,
            module,
        }
    }

    pub(super) fn end_recompute(&mut self, before: BeforeRecompute) {
        self.recomputing = before.recomputing;
        self.recording = before.recording;
        self.stopped = before.stopped;
        self.grad_enabled = before.grad;
        self.log.borrow_mut().set_category(before.category);
        self.set_module(before.module);
    }

    /// The workspace that cuBLAS takes at the first product, one per thread that multiplies: forward and backward.
    pub fn use_blas(&mut self) {
        let thread = usize::from(self.in_backward);
        if self.workspaces[thread].is_none() && !self.stopped {
            let bytes = self.device.blas_workspace();
            let make = |torch: &mut Self| torch.fresh("cublas workspace", Shape::from([bytes]), DType::U8);
            self.workspaces[thread] = Some(self.in_category(Category::Workspace, make));
        }
    }

    /// The workspaces of cuBLAS of both threads: an earlier run left them.
    pub fn use_blas_everywhere(&mut self) {
        for backward in [true, false] {
            self.in_backward = backward;
            self.use_blas();
        }
    }

    /// The workspace of cuBLASLt, which adds biases in its epilogue: 1 MiB at the first such product of a thread (its
    /// handle is the thread's cuBLAS handle). The backward thread has such products when it recomputes a layer.
    pub fn use_blas_lt(&mut self) {
        let thread = usize::from(self.in_backward);
        if self.lt_workspaces[thread].is_none() && !self.stopped {
            let make = |torch: &mut Self| torch.fresh("cublasLt workspace", Shape::from([1 << 20]), DType::U8);
            self.lt_workspaces[thread] = Some(self.in_category(Category::Workspace, make));
        }
    }
}

/// The type two operands meet in; integers give way to floats.
pub fn promote(a: DType, b: DType) -> DType {
    let rank = |dtype: DType| match dtype {
        DType::Bool => 0,
        DType::U8 | DType::I8 => 1,
        DType::I16 => 2,
        DType::I32 => 3,
        DType::I64 => 4,
        DType::F16 | DType::BF16 => 6,
        DType::F32 => 7,
        DType::F64 => 8,
        DType::C64 => 9,
        _ => 5,
    };
    match (a, b) {
        (DType::F16, DType::BF16) | (DType::BF16, DType::F16) => DType::F32,
        _ if rank(a) >= rank(b) => a,
        _ => b,
    }
}
