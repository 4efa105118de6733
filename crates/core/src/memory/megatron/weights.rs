//! The parameters a rank holds, in the order in which Megatron's modules register them.

use super::architecture::{Architecture, Branch, Latent, Layer, Mixture, Norm, Op};
use super::chunks::Chunk;
use crate::plan::parallel::megatron::Megatron;
use crate::plan::parallel::mesh::Mesh;

/// One parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Weight {
    /// Its elements on this rank.
    pub elements: u64,
    /// Whether it belongs to a routed expert, whose copies are counted over other ranks.
    pub expert: bool,
    /// Whether first and last pipeline stage share it.
    pub shared_embedding: bool,
    /// Its rows and columns on this rank.
    pub matrix: [u64; 2],
    /// Whether its products are in fp8.
    pub fp8: bool,
    /// Over how many ranks one copy of it is split (tensor-parallel ones; expert ones for experts).
    pub parts: u64,
}

/// The parameters of a chunk on one tensor-parallel rank.
pub fn of_chunk(architecture: &Architecture, chunk: &Chunk, mesh: &Mesh, options: &Megatron) -> Vec<Weight> {
    let tp = mesh.tp.max(1);
    let hidden = architecture.hidden;
    let rows = options.padded_vocabulary(architecture.vocabulary, tp) / tp;
    let mut list = List { weights: Vec::new(), tp, fp8: false };
    let table = Weight {
        elements: rows.saturating_mul(hidden),
        matrix: [rows, hidden],
        fp8: false,
        expert: false,
        shared_embedding: (architecture.tied || options.mtp_layers > 0) && mesh.pp > 1,
        parts: tp,
    };
    if chunk.first {
        list.weights.push(table);
    }
    for layer in &architecture.layers[chunk.layers.clone()] {
        list.layer(layer, hidden, mesh);
    }
    if chunk.last {
        list.norm(architecture.norm, hidden);
        // Layers of multi-token prediction embed tokens themselves; their head is the model's.
        if options.mtp_layers > 0 && !chunk.first && !architecture.tied {
            list.weights.push(table);
        }
        for layer in architecture.layers.last().into_iter().cycle().take(options.mtp_layers as usize) {
            list.fp8 = layer.fp8;
            list.norm(architecture.norm, hidden);
            list.norm(architecture.norm, hidden);
            list.columns(hidden, 2 * hidden);
            list.layer(layer, hidden, mesh);
            list.norm(architecture.norm, hidden);
        }
        if !architecture.tied || !chunk.first {
            list.weights.push(Weight { shared_embedding: architecture.tied && mesh.pp > 1, ..table });
        }
    }
    list.weights
}

/// The parameters of one layer.
pub fn of_layer(layer: &Layer, hidden: u64, mesh: &Mesh) -> Vec<Weight> {
    let mut list = List { weights: Vec::new(), tp: mesh.tp.max(1), fp8: false };
    list.layer(layer, hidden, mesh);
    list.weights
}

/// The parameters of one operation, in the order in which it uses them.
pub(super) fn of_operation(op: &Op, hidden: u64, mesh: &Mesh) -> Vec<Weight> {
    let mut list = List { weights: Vec::new(), tp: mesh.tp.max(1), fp8: false };
    list.operation(op, hidden, mesh);
    list.weights
}

struct List {
    weights: Vec<Weight>,
    tp: u64,
    fp8: bool,
}

impl List {
    fn push(&mut self, matrix: [u64; 2], parts: u64, fp8: bool) {
        let elements = matrix[0].saturating_mul(matrix[1]);
        self.weights.push(Weight { elements, expert: false, shared_embedding: false, matrix, fp8, parts });
    }

    /// Held by every tensor-parallel rank: norms, routers and gates.
    fn whole(&mut self, elements: u64) {
        self.push([1, elements], 1, false);
    }

    /// A linear that is not split.
    fn duplicated(&mut self, rows: u64, columns: u64) {
        self.push([rows, columns], 1, self.fp8);
    }

    /// A linear that is split by its rows.
    fn columns(&mut self, rows: u64, columns: u64) {
        self.push([rows / self.tp, columns], self.tp, self.fp8);
    }

    /// A linear that is split by its columns.
    fn rows(&mut self, rows: u64, columns: u64) {
        self.push([rows, columns / self.tp], self.tp, self.fp8);
    }

    fn norm(&mut self, norm: Norm, width: u64) {
        (0..norm.vectors()).for_each(|_| self.whole(width));
    }

    fn layer(&mut self, layer: &Layer, hidden: u64, mesh: &Mesh) {
        self.fp8 = layer.fp8;
        for op in layer.branches.iter().flat_map(Branch::registered) {
            self.operation(op, hidden, mesh);
        }
    }

    fn operation(&mut self, op: &Op, hidden: u64, mesh: &Mesh) {
        match op {
            Op::Norm(norm) => self.norm(*norm, hidden),
            Op::HeadNorms(widths) => widths.iter().for_each(|width| self.whole(*width)),
            Op::Column(own) => {
                if let Some(norm) = own.norm {
                    self.norm(norm, hidden);
                }
                let outputs = own.makes.outputs(self.tp);
                self.columns(outputs, hidden);
                if own.bias {
                    self.push([1, outputs / self.tp], self.tp, false);
                }
            }
            Op::Row(own) => {
                self.rows(hidden, own.inputs);
                if own.bias {
                    self.whole(hidden);
                }
            }
            Op::Latent(sizes) => self.latent(sizes, hidden),
            Op::Mixture(sizes) => self.mixture(sizes, hidden, mesh),
            Op::Rotary(_) | Op::Attention(_) | Op::Activation { .. } | Op::Scale | Op::Dropout => {}
        }
    }

    fn latent(&mut self, sizes: &Latent, hidden: u64) {
        self.rows(hidden, sizes.heads * sizes.value_dim);
        match sizes.query_rank {
            Some(rank) => {
                self.duplicated(rank, hidden);
                self.whole(rank);
                self.columns(sizes.heads * sizes.query_dim(), rank);
            }
            None => self.columns(sizes.heads * sizes.query_dim(), hidden),
        }
        self.duplicated(sizes.key_rank + sizes.rotary_dim, hidden);
        self.whole(sizes.key_rank);
        self.columns(sizes.heads * (sizes.plain_dim + sizes.value_dim), sizes.key_rank);
    }

    fn mixture(&mut self, sizes: &Mixture, hidden: u64, mesh: &Mesh) {
        self.whole(sizes.experts.saturating_mul(hidden));
        let parts = mesh.expert_tp();
        let width = sizes.width / parts.max(1);
        for matrix in [[2 * width, hidden], [hidden, width]] {
            for _ in 0..sizes.experts / mesh.ep.max(1) {
                self.push(matrix, parts, self.fp8);
                self.weights.last_mut().into_iter().for_each(|weight| weight.expert = true);
            }
        }
        if sizes.shared > 0 {
            self.columns(2 * sizes.shared, hidden);
            self.rows(hidden, sizes.shared);
        }
        if sizes.shared_gate {
            self.whole(hidden);
        }
    }
}
