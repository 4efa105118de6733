//! A layer, a chunk of layers, and what of them is computed again.
//!
//! Sources: megatron/core/transformer/{transformer_layer,transformer_block}.py.

use std::ops::Range;
use std::rc::Rc;

use super::architecture::{Architecture, Attention, FeedForward, Layer};
use super::rank::Rank;
use super::{attention, latent, mlp, moe, offload, recompute};
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::op::Binary;
use crate::plan::parallel::megatron::{Recompute, RecomputeModule};

/// The layers of a chunk.
pub(super) fn run(
    rank: &Rc<Rank>,
    architecture: &Rc<Architecture>,
    torch: &mut Torch,
    x: Tensor,
    layers: Range<usize>,
) -> Tensor {
    let mut x = x;
    let mut at = layers.start;
    while at < layers.end {
        let group = match rank.options.recompute {
            Recompute::Uniform(length) => (length.max(1) as usize).min(layers.end - at),
            Recompute::Block(count) if ((at - layers.start) as u64) < count => 1,
            _ => 0,
        };
        if group == 0 {
            let own = (at, &architecture.layers[at]);
            x = match (at as u64) < rank.options.cpu_offloading_layers {
                true => offload::layer(rank, torch, |torch| gathered(rank, torch, &x, own)),
                false => {
                    let output = gathered(rank, torch, &x, own);
                    rank.under_way(None);
                    output
                }
            };
            at += 1;
            continue;
        }
        let (shared, architecture) = (Rc::clone(rank), Rc::clone(architecture));
        let part = move |torch: &mut Torch, inputs: &[Tensor]| {
            let mut x = inputs[0].clone();
            for (index, layer) in architecture.layers[at..at + group].iter().enumerate() {
                x = gathered(&shared, torch, &x, (at + index, layer));
            }
            x
        };
        x = recompute::checkpoint(torch, &[x], part);
        at += group;
    }
    x
}

/// A layer, whose parameters are gathered for it where they are in shards.
fn gathered(rank: &Rc<Rank>, torch: &mut Torch, x: &Tensor, (index, own): (usize, &Layer)) -> Tensor {
    let Some(fsdp) = &rank.fsdp else { return layer(rank, torch, x, own) };
    let x = fsdp.enter(torch, index + 1, x);
    let output = layer(rank, torch, &x, own);
    drop(x);
    fsdp.leave(index + 1, &output);
    output
}

/// One layer.
pub(super) fn layer(rank: &Rc<Rank>, torch: &mut Torch, x: &Tensor, layer: &Layer) -> Tensor {
    torch.set_module(layer.module);
    rank.cache_fp8_weights(torch, layer, x.shape.last());
    let attended = match &layer.attention {
        Attention::Grouped(sizes) => attention::grouped(rank, torch, x, sizes),
        Attention::Latent(sizes) => {
            let sizes = *sizes;
            let shared = Rc::clone(rank);
            after_norm(rank, torch, x, move |torch, normed| latent::latent(&shared, torch, normed, &sizes))
        }
    };
    let x = torch.binary(Binary::Add, x, &attended);
    drop(attended);
    let output = match layer.feed_forward {
        FeedForward::Dense { width } => {
            let shared = Rc::clone(rank);
            let part = move |torch: &mut Torch, inputs: &[Tensor]| mlp::normed(&shared, torch, &inputs[0], width);
            match rank.recomputes(RecomputeModule::Mlp) {
                true => recompute::checkpoint(torch, std::slice::from_ref(&x), part),
                false => part(torch, std::slice::from_ref(&x)),
            }
        }
        FeedForward::Mixture(sizes) => {
            let shared = Rc::clone(rank);
            after_norm(rank, torch, &x, move |torch, normed| {
                let inner = Rc::clone(&shared);
                let part = move |torch: &mut Torch, inputs: &[Tensor]| moe::mixture(&inner, torch, &inputs[0], &sizes);
                match shared.recomputes(RecomputeModule::Moe) {
                    true => recompute::checkpoint(torch, std::slice::from_ref(normed), part),
                    false => part(torch, std::slice::from_ref(normed)),
                }
            })
        }
    };
    torch.binary(Binary::Add, &x, &output)
}

/// A part behind a norm that stands alone; the norm's output can be made again instead of kept.
fn after_norm(
    rank: &Rc<Rank>,
    torch: &mut Torch,
    x: &Tensor,
    part: impl FnOnce(&mut Torch, &Tensor) -> Tensor,
) -> Tensor {
    if !rank.recomputes(RecomputeModule::Layernorm) {
        let normed = rank.norm(torch, x);
        return part(torch, &normed);
    }
    let shared = Rc::clone(rank);
    let norm = move |torch: &mut Torch, inputs: &[Tensor]| shared.norm(torch, &inputs[0]);
    let (normed, discarded) = recompute::without_output(torch, std::slice::from_ref(x), norm);
    let output = part(torch, &normed);
    if let Some(discarded) = discarded {
        discarded.discard_until(&output);
    }
    output
}
