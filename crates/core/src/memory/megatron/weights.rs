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
    /// Over how many ranks one copy of it is split (tensor-parallel ones; expert ones for experts).
    pub parts: u64,
}

/// The parameters of a chunk on one tensor-parallel rank.
pub fn of_chunk(architecture: &Architecture, chunk: &Chunk, mesh: &Mesh, options: &Megatron) -> Vec<Weight> {
    let tp = mesh.tp.max(1);
    let hidden = architecture.hidden;
    let rows = options.padded_vocabulary(architecture.vocabulary, tp) / tp;
    let mut list = List { weights: Vec::new(), tp };
    let table = Weight {
        elements: rows.saturating_mul(hidden),
        expert: false,
        shared_embedding: architecture.tied && mesh.pp > 1,
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
        if !architecture.tied || !chunk.first {
            list.weights.push(table);
        }
    }
    list.weights
}

struct List {
    weights: Vec<Weight>,
    tp: u64,
}

impl List {
    fn push(&mut self, elements: u64, parts: u64) {
        self.weights.push(Weight { elements: elements / parts.max(1), expert: false, shared_embedding: false, parts });
    }

    /// Held by every tensor-parallel rank.
    fn whole(&mut self, elements: u64) {
        self.push(elements, 1);
    }

    /// Split over them.
    fn split(&mut self, rows: u64, columns: u64) {
        let tp = self.tp;
        self.push(rows.saturating_mul(columns), tp);
    }

    fn layer(&mut self, layer: &Layer, hidden: u64, mesh: &Mesh) {
        match &layer.attention {
            Attention::Grouped(sizes) => {
                let queries = sizes.heads * sizes.head_dim;
                // Fewer groups than ranks are held several times.
                let keys = sizes.kv_heads.max(self.tp) * sizes.head_dim;
                self.split(queries, hidden);
                if sizes.qk_norm {
                    self.whole(sizes.head_dim);
                    self.whole(sizes.head_dim);
                }
                self.whole(hidden);
                self.split(queries + 2 * keys, hidden);
                if sizes.bias {
                    self.split(queries + 2 * keys, 1);
                }
            }
            Attention::Latent(sizes) => {
                self.whole(hidden);
                self.split(sizes.heads * sizes.value_dim, hidden);
                match sizes.query_rank {
                    Some(rank) => {
                        self.whole(rank.saturating_mul(hidden));
                        self.whole(rank);
                        self.split(sizes.heads * sizes.query_dim(), rank);
                    }
                    None => self.split(sizes.heads * sizes.query_dim(), hidden),
                }
                self.whole((sizes.key_rank + sizes.rotary_dim).saturating_mul(hidden));
                self.whole(sizes.key_rank);
                self.split(sizes.heads * (sizes.plain_dim + sizes.value_dim), sizes.key_rank);
            }
        }
        self.whole(hidden);
        match &layer.feed_forward {
            FeedForward::Dense { width } => {
                self.split(2 * width, hidden);
                self.split(hidden, *width);
            }
            FeedForward::Mixture(sizes) => {
                self.whole(sizes.experts.saturating_mul(hidden));
                let parts = mesh.expert_tp();
                for elements in [2 * sizes.width * hidden, sizes.width * hidden] {
                    for _ in 0..sizes.experts / mesh.ep.max(1) {
                        let elements = elements / parts.max(1);
                        self.weights.push(Weight { elements, expert: true, shared_embedding: false, parts });
                    }
                }
                if sizes.shared > 0 {
                    self.split(2 * sizes.shared, hidden);
                    self.split(hidden, sizes.shared);
                }
                if sizes.shared_gate {
                    self.whole(hidden);
                }
            }
        }
    }
}
