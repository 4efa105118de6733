//! One rank: its sizes, its place in the mesh, and what Transformer Engine and Megatron keep for all layers of it.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;

use super::architecture::{Architecture, Layer};
use super::fsdp::Sharded;
use super::{fp8, weights};
use crate::dtype::DType;
use crate::memory::log::Category;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;
use crate::plan::parallel::megatron::{Megatron, Recompute, RecomputeModule};
use crate::plan::parallel::mesh::Mesh;
use crate::plan::{Batch, Package, Stack, TrainPlan};

/// What the layers of a rank share.
pub(super) struct Rank {
    /// The mesh.
    pub mesh: Mesh,
    /// Megatron's options.
    pub options: Megatron,
    /// Versions of the software.
    pub stack: Stack,
    /// The type of weights and activations.
    pub dtype: DType,
    /// Samples of a micro-batch.
    pub samples: u64,
    /// Tokens of a sample, over all context-parallel ranks.
    pub sequence: u64,
    /// Modules of the layers whose products are in fp8.
    pub fp8_layers: BTreeSet<u32>,
    /// Shards of Megatron-FSDP, where it runs.
    pub fsdp: Option<Rc<Sharded>>,
    kept: RefCell<Kept>,
}

/// Tensors that are made once and stay.
#[derive(Default)]
struct Kept {
    dummies: BTreeMap<(u64, u64), Tensor>,
    tables: BTreeMap<&'static str, Tensor>,
    workspaces: Vec<Tensor>,
    dispatched: BTreeMap<u32, Vec<Tensor>>,
    fp8_weights: BTreeMap<u32, Vec<Tensor>>,
    defers: bool,
    deferred: Vec<Deferred>,
    waiting: VecDeque<Vec<Deferred>>,
    under_way: Option<Tensor>,
    offloaded: u64,
}

/// A weight gradient that waits for its turn, with what its product reads (Transformer Engine's `WeightGradStore`).
struct Deferred {
    matrix: [u64; 2],
    _reads: Vec<Tensor>,
}

/// How a linear is split over the tensor-parallel ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Split {
    /// By its outputs: the input is gathered along the sequence.
    Column,
    /// By its inputs: the output is summed and scattered along the sequence.
    Row,
    /// Not at all.
    Duplicated,
}

/// The rows a split linear sees on the way through.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rows {
    /// Whether the input is gathered along the sequence.
    pub gathers: bool,
    /// Whether the output is scattered along it.
    pub scatters: bool,
    /// Rows of the product.
    pub total: u64,
    /// Rows of the output.
    pub output: u64,
}

impl Rank {
    /// A rank with nothing kept yet.
    pub(super) fn new(mesh: Mesh, options: Megatron, plan: &TrainPlan, architecture: &Architecture) -> Rc<Self> {
        let fp8_layers = architecture.layers.iter().filter(|layer| layer.fp8).map(|layer| layer.module).collect();
        let Batch { batch_size: samples, seq_len: sequence, .. } = plan.batch;
        let dtype = plan.weights;
        let fsdp = Sharded::of(architecture, &mesh, &options, dtype);
        let stack = plan.versions();
        Rc::new(Self { mesh, options, stack, dtype, samples, sequence, fp8_layers, fsdp, kept: RefCell::default() })
    }

    /// Whether activations between the tensor-parallel parts are split along the sequence.
    pub(super) fn scattered(&self) -> bool {
        self.mesh.sequence_parallel && self.mesh.tp > 1
    }

    /// Tokens a rank sees inside the tensor-parallel parts.
    pub(super) fn tokens(&self) -> u64 {
        self.samples.saturating_mul(self.sequence) / self.mesh.cp.max(1)
    }

    /// Tokens a rank holds between them.
    pub(super) fn own_tokens(&self) -> u64 {
        if self.scattered() { self.tokens() / self.mesh.tp } else { self.tokens() }
    }

    /// The rows of a linear whose input has so many.
    pub(super) fn rows(&self, split: Split, rows: u64) -> Rows {
        let (gathers, scatters) = (split == Split::Column && self.scattered(), split == Split::Row && self.scattered());
        let total = if gathers { rows.saturating_mul(self.mesh.tp) } else { rows };
        let output = if scatters { total / self.mesh.tp.max(1) } else { total };
        Rows { gathers, scatters, total, output }
    }

    /// Whether a part of every layer is computed again.
    pub(super) fn recomputes(&self, module: RecomputeModule) -> bool {
        matches!(&self.options.recompute, Recompute::Selective(modules) if modules.contains(&module))
    }

    /// A matrix of activations.
    pub(super) fn matrix(&self, torch: &mut Torch, name: &'static str, rows: u64, columns: u64) -> Tensor {
        torch.fresh(name, Shape::from([rows, columns]), self.dtype)
    }

    /// A matrix that ranks exchange.
    pub(super) fn exchanged(&self, torch: &mut Torch, name: &'static str, rows: u64, columns: u64) -> Tensor {
        torch.in_category(Category::Communication, |torch| self.matrix(torch, name, rows, columns))
    }

    /// The workspace that Transformer Engine hands cuBLAS: 32 MiB and 1 KiB on Hopper and later, else 4 MiB
    /// (`get_cublas_workspace_size_bytes`), one for plain products and four for grouped ones.
    pub(super) fn use_workspace(&self, torch: &mut Torch, grouped: bool) {
        let key = if grouped { "grouped" } else { "plain" };
        if self.kept.borrow().tables.contains_key(key) {
            return;
        }
        let bytes = if torch.device.capability >= 90 { (32 << 20) + 1024 } else { 4 << 20 };
        for index in 0..if grouped { 4 } else { 1 } {
            let make = |torch: &mut Torch| torch.fresh("Transformer Engine workspace", Shape::from([bytes]), DType::U8);
            let tensor = torch.in_category(Category::Workspace, make);
            if index == 0 {
                self.kept.borrow_mut().tables.insert(key, tensor);
            } else {
                self.kept.borrow_mut().workspaces.push(tensor);
            }
        }
    }

    /// The workspace of torch's own products, one for the thread of forward and one for that of backward
    /// (`parseChosenWorkspaceSize` of ATen/cuda/CublasHandlePool.cpp: Blackwell counts as Hopper since 2.11).
    pub(super) fn use_torch_workspace(&self, torch: &mut Torch, backward: bool) {
        let small = self.stack.before(Package::Torch, 2, 11, 0) && torch.device.capability >= 100;
        let bytes = if small { 8_519_680 } else { torch.device.blas_workspace() };
        let name = if backward { "cublas workspace of backward" } else { "cublas workspace" };
        self.table(torch, name, Category::Workspace, Shape::from([bytes]), DType::U8);
    }

    /// The tensor that is handed to autograd as the gradient of a weight whose true gradient went into the main
    /// gradients already: one for every shape of a weight, kept for good (`get_dummy_wgrad`). Without the fusion it is a
    /// gradient, and gone once it was added.
    ///
    /// Where weight gradients wait for a turn of their own, the product's operands `reads` wait with them.
    pub(super) fn weight_gradient(&self, torch: &mut Torch, rows: u64, columns: u64, reads: Vec<Tensor>) {
        if self.defers() {
            self.kept.borrow_mut().deferred.push(Deferred { matrix: [rows, columns], _reads: reads });
            return;
        }
        drop(reads);
        if !self.options.gradient_accumulation_fusion {
            drop(self.matrix(torch, "weight gradient", rows, columns));
            return;
        }
        let known = self.kept.borrow().dummies.contains_key(&(rows, columns));
        if !known {
            let make = |torch: &mut Torch| self.matrix(torch, "dummy weight gradient", rows, columns);
            let dummy = torch.in_category(Category::Workspace, make);
            self.kept.borrow_mut().dummies.insert((rows, columns), dummy);
        }
    }

    /// The fp8 copies of a layer's bf16 weights, where they live on: made when it first runs.
    pub(super) fn cache_fp8_weights(&self, torch: &mut Torch, layer: &Layer, hidden: u64) {
        let Some(fp8) = self.fp8_here(torch).filter(|fp8| fp8.weight_cache && !fp8.param_gather) else { return };
        if self.kept.borrow().fp8_weights.contains_key(&layer.module) {
            return;
        }
        let own = weights::of_layer(layer, hidden, &self.mesh).into_iter().filter(|weight| weight.fp8);
        let copies = torch.in_category(Category::Weights, |torch| {
            own.flat_map(|weight| fp8::quantise(torch, fp8.recipe, "fp8 weight", weight.matrix, fp8::BOTH).all())
                .collect()
        });
        self.kept.borrow_mut().fp8_weights.insert(layer.module, copies);
    }

    /// What is on its way to or from the host takes the place of what was.
    pub(super) fn under_way(&self, tensor: Option<Tensor>) {
        let before = std::mem::replace(&mut self.kept.borrow_mut().under_way, tensor);
        drop(before);
    }

    /// Notes what a layer sent to the host, and returns what the one before it did.
    pub(super) fn offloaded(&self, bytes: u64) -> u64 {
        std::mem::replace(&mut self.kept.borrow_mut().offloaded, bytes)
    }

    /// Gathers what lies outside of the layers, where parameters are in shards: the embedding (0), or the norm and the head.
    pub(super) fn gather(&self, torch: &mut Torch, owner: usize) {
        if let Some(fsdp) = &self.fsdp {
            fsdp.gather(torch, owner, true);
        }
    }

    /// Whether weight gradients wait for a turn of their own.
    pub(super) fn defers(&self) -> bool {
        self.kept.borrow().defers
    }

    /// Lets weight gradients wait, or closes the list of those that do: one for every micro-batch.
    pub(super) fn defer(&self, defers: bool) {
        let mut kept = self.kept.borrow_mut();
        kept.defers = defers;
        if !defers {
            let list = std::mem::take(&mut kept.deferred);
            kept.waiting.push_back(list);
        }
    }

    /// The weight gradients of the micro-batch that waits longest.
    pub(super) fn weight_pass(&self, torch: &mut Torch) {
        let list = self.kept.borrow_mut().waiting.pop_front().unwrap_or_default();
        for Deferred { matrix: [rows, columns], _reads } in list {
            self.weight_gradient(torch, rows, columns, Vec::new());
        }
    }

    /// What the dispatcher of a layer remembers of the last micro-batch it routed.
    pub(super) fn remember(&self, layer: u32, tensors: Vec<Tensor>) {
        let before = self.kept.borrow_mut().dispatched.insert(layer, tensors);
        drop(before);
    }

    /// A tensor that is made at first use and kept: tables of frequencies, buffers of gathers.
    pub(super) fn table(
        &self,
        torch: &mut Torch,
        name: &'static str,
        category: Category,
        shape: Shape,
        dtype: DType,
    ) -> Tensor {
        let known = self.kept.borrow().tables.get(name).filter(|known| known.elements() >= shape.elements()).cloned();
        if let Some(known) = known {
            return known;
        }
        let made = torch.in_category(category, |torch| torch.fresh(name, shape, dtype));
        self.kept.borrow_mut().tables.insert(name, made.clone());
        made
    }
}
