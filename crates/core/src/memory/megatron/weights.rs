//! The parameters a rank holds, in the order in which Megatron's modules register them.

use super::architecture::{Architecture, Attention, FeedForward, Layer};
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
        list.whole(hidden);
        // Layers of multi-token prediction embed tokens themselves; their head is the model's.
        if options.mtp_layers > 0 && !chunk.first && !architecture.tied {
            list.weights.push(table);
        }
        for layer in architecture.layers.last().into_iter().cycle().take(options.mtp_layers as usize) {
            list.fp8 = layer.fp8;
            list.whole(hidden);
            list.whole(hidden);
            list.columns(hidden, 2 * hidden);
            list.layer(layer, hidden, mesh);
            list.whole(hidden);
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

    fn layer(&mut self, layer: &Layer, hidden: u64, mesh: &Mesh) {
        self.fp8 = layer.fp8;
        match &layer.attention {
            Attention::Grouped(sizes) => {
                let queries = sizes.heads * sizes.head_dim;
                // Fewer groups than ranks are held several times.
                let keys = sizes.kv_heads.max(self.tp) * sizes.head_dim;
                self.rows(hidden, queries);
                if sizes.qk_norm {
                    self.whole(sizes.head_dim);
                    self.whole(sizes.head_dim);
                }
                self.whole(hidden);
                self.columns(queries + 2 * keys, hidden);
                if sizes.bias {
                    self.push([1, (queries + 2 * keys) / self.tp], self.tp, false);
                }
            }
            Attention::Latent(sizes) => {
                self.whole(hidden);
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
        }
        self.whole(hidden);
        match &layer.feed_forward {
            FeedForward::Dense { width } => {
                self.columns(2 * width, hidden);
                self.rows(hidden, *width);
            }
            FeedForward::Mixture(sizes) => {
                self.whole(sizes.experts.saturating_mul(hidden));
                let parts = mesh.expert_tp();
                let width = sizes.width / parts.max(1);
                for matrix in [[2 * width, hidden], [hidden, width]] {
                    for _ in 0..sizes.experts / mesh.ep.max(1) {
                        let elements = matrix[0].saturating_mul(matrix[1]);
                        let fp8 = self.fp8;
                        self.weights.push(Weight {
                            elements,
                            expert: true,
                            shared_embedding: false,
                            matrix,
                            fp8,
                            parts,
                        });
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
    }
}
