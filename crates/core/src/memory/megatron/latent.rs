//! Multi-head latent attention: down-projections, norms fused into the up-projections, and the fused rotary kernels.
//!
//! Sources: megatron/core/transformer/multi_latent_attention.py, fusions/fused_mla_yarn_rope_apply.py.

use std::rc::Rc;

use super::architecture::{Latent, Norm};
use super::attention::{Kernel, core, split};
use super::kernels::fresh_back;
use super::rank::{Rank, Split};
use super::recompute;
use crate::dtype::DType;
use crate::memory::log::Category;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;
use crate::plan::parallel::megatron::RecomputeModule;

/// Attention on a normed input.
pub(super) fn latent(rank: &Rc<Rank>, torch: &mut Torch, x: &Tensor, sizes: &Latent) -> Tensor {
    let heads = sizes.heads / rank.mesh.tp.max(1);
    let kernel = Kernel { heads, kv_heads: heads, key_dim: sizes.query_dim(), value_dim: sizes.value_dim };
    tables(rank, torch, sizes);
    let query = match sizes.query_rank {
        Some(width) => down(rank, torch, x, width),
        None => x.clone(),
    };
    let combined = down(rank, torch, x, sizes.key_rank + sizes.rotary_dim);
    let [keys, rotary] = split(rank, torch, &combined, [sizes.key_rank, sizes.rotary_dim]);
    drop(combined);
    let rotary = gathered(rank, torch, &rotary);
    let compressed = [query, keys, rotary];
    let output = if rank.recomputes(RecomputeModule::MlaUpProj) {
        // Queries, keys and values are made again together, just before the kernel's backward needs them.
        let (rank, sizes) = (Rc::clone(rank), *sizes);
        let part = move |torch: &mut Torch, inputs: &[Tensor]| {
            let [q, k, v] = up(&rank, torch, inputs, &sizes, heads);
            core(&rank, torch, [&q, &k, &v], kernel)
        };
        recompute::checkpoint(torch, &compressed, part)
    } else {
        let [q, k, v] = up(rank, torch, &compressed, sizes, heads);
        if rank.recomputes(RecomputeModule::CoreAttn) {
            let shared = Rc::clone(rank);
            recompute::checkpoint(torch, &[q, k, v], move |torch, inputs| {
                core(&shared, torch, [&inputs[0], &inputs[1], &inputs[2]], kernel)
            })
        } else {
            core(rank, torch, [&q, &k, &v], kernel)
        }
    };
    drop(compressed);
    rank.linear_of_kept(torch, &output, x.shape.last(), Split::Row)
}

/// A down-projection. Where the norm before it is made again, it keeps the input as it is.
fn down(rank: &Rc<Rank>, torch: &mut Torch, x: &Tensor, width: u64) -> Tensor {
    match rank.recomputes(RecomputeModule::Layernorm) {
        true => rank.linear_of_kept(torch, x, width, Split::Duplicated),
        false => rank.linear(torch, x, width, Split::Duplicated),
    }
}

/// The up-projections and the rotary kernels: queries are rotated in place, keys and values are written anew.
fn up(rank: &Rc<Rank>, torch: &mut Torch, compressed: &[Tensor], sizes: &Latent, heads: u64) -> [Tensor; 3] {
    let width = heads * sizes.query_dim();
    let query = match sizes.query_rank {
        Some(_) => rank.norm_linear(torch, &compressed[0], Norm::Rms, width),
        None => rank.linear(torch, &compressed[0], width, Split::Column),
    };
    let both = rank.norm_linear(torch, &compressed[1], Norm::Rms, heads * (sizes.plain_dim + sizes.value_dim));
    let rotary = &compressed[2];
    let rows = both.shape.size(0);
    let mut outputs = [
        rank.matrix(torch, "fused mla rope", rows, heads * sizes.query_dim()),
        rank.matrix(torch, "fused mla rope", rows, heads * sizes.value_dim),
    ];
    if torch.records(&[&both, rotary]) {
        let (shape, angles, dtype) = (both.shape, rotary.shape, rank.dtype);
        torch.attach_many(&mut outputs, &[&both, rotary], move |torch, gradients| {
            let results = [shape, angles].map(|shape| Some(torch.fresh("fused mla rope backward", shape, dtype)));
            drop(gradients);
            results.into()
        });
    }
    let [key, value] = outputs;
    [query, key, value]
}

/// The rotary part of the keys, gathered along the sequence.
fn gathered(rank: &Rc<Rank>, torch: &mut Torch, x: &Tensor) -> Tensor {
    if !rank.scattered() {
        return x.clone();
    }
    let (rows, width) = (x.shape.size(0), x.shape.last());
    let output = rank.exchanged(torch, "all_gather", rows * rank.mesh.tp, width);
    fresh_back(torch, output, x, "reduce_scatter", Some(Category::Communication))
}

/// Cosines and sines, cached in the type of the model.
fn tables(rank: &Rank, torch: &mut Torch, sizes: &Latent) {
    let shape = Shape::from([2, rank.sequence, sizes.rotary_dim]);
    rank.table(torch, "rotary embedding", Category::Buffers, shape, DType::F32);
}
