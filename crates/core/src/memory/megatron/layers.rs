//! A layer, a chunk of layers, and what of them is computed again.
//!
//! Sources: megatron/core/transformer/{transformer_layer,transformer_block}.py.

use std::ops::Range;
use std::rc::Rc;

use super::architecture::{Architecture, Branch, Layer, Makes, Norm, Op};
use super::rank::{Rank, Split};
use super::recompute::Discarded;
use super::{attention, latent, lora, moe, offload, recompute};
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;
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
    let mut x = x.clone();
    for branch in &layer.branches {
        let output = self::branch(rank, torch, &x, branch);
        let sum = torch.binary(Binary::Add, &x, &output);
        drop(output);
        x = sum;
    }
    x
}

/// What is added to the residual stream; dense feed-forwards can be run again as a whole.
fn branch(rank: &Rc<Rank>, torch: &mut Torch, x: &Tensor, branch: &Branch) -> Tensor {
    let dense = branch.0.iter().any(|op| matches!(op, Op::Activation { .. }));
    if !dense || !rank.recomputes(RecomputeModule::Mlp) {
        return walk(rank, torch, x, &branch.0);
    }
    let (shared, own) = (Rc::clone(rank), branch.0.clone());
    let part = move |torch: &mut Torch, inputs: &[Tensor]| walk(&shared, torch, &inputs[0], &own);
    recompute::checkpoint(torch, std::slice::from_ref(x), part)
}

/// What Python's frames name while a branch runs.
struct Frame {
    /// What the last operation made.
    x: Tensor,
    /// Queries, keys and values, until the output projection returns.
    heads: Option<[Tensor; 3]>,
    /// Queries and keys before they were rotated, as long.
    named: Option<[Tensor; 2]>,
    /// The output of the norm at the start, where it is made again.
    discarded: Option<Discarded>,
}

fn walk(rank: &Rc<Rank>, torch: &mut Torch, x: &Tensor, operations: &[Op]) -> Tensor {
    let hidden = x.shape.last();
    let mut frame = Frame { x: x.clone(), heads: None, named: None, discarded: None };
    for (place, op) in operations.iter().enumerate() {
        lower(rank, torch, &mut frame, (op, place == 0), hidden);
    }
    if let Some(discarded) = frame.discarded {
        discarded.discard_until(&frame.x);
    }
    frame.x
}

/// The kernels that Megatron and Transformer Engine run for an operation.
fn lower(rank: &Rc<Rank>, torch: &mut Torch, frame: &mut Frame, (op, first): (&Op, bool), hidden: u64) {
    let tp = rank.mesh.tp.max(1);
    let made = match op {
        Op::Norm(norm) if first && rank.recomputes(RecomputeModule::Layernorm) => {
            let (shared, norm) = (Rc::clone(rank), *norm);
            let part = move |torch: &mut Torch, inputs: &[Tensor]| shared.norm(torch, &inputs[0], norm);
            let (normed, discarded) = recompute::without_output(torch, std::slice::from_ref(&frame.x), part);
            frame.discarded = discarded;
            normed
        }
        Op::Norm(norm) => rank.norm(torch, &frame.x, *norm),
        Op::Column(own) => {
            let outputs = own.makes.outputs(tp) / tp;
            let wide = match (own.norm, &rank.options.lora) {
                (Some(norm), Some(lora)) => lora::norm_linear(rank, torch, &frame.x, (own, norm, outputs), lora),
                (Some(norm), None) => rank.norm_linear(torch, &frame.x, norm, outputs),
                (None, _) => rank.linear(torch, &frame.x, outputs, Split::Column),
            };
            if let Makes::Heads(sizes) = &own.makes {
                frame.heads = Some(attention::heads(rank, torch, wide.clone(), sizes));
            }
            wide
        }
        Op::HeadNorms(_) | Op::Rotary(_) | Op::Attention(_) => return attend(rank, torch, frame, op),
        Op::Activation { gated } => rank.activation(torch, &frame.x, *gated, None),
        Op::Row(own) => {
            let output = match &rank.options.lora {
                Some(lora) => lora::row_linear(rank, torch, &frame.x, (own, hidden), lora),
                None if own.of_attention => rank.linear_of_kept(torch, &frame.x, hidden, Split::Row),
                None => rank.linear(torch, &frame.x, hidden, Split::Row),
            };
            (frame.heads, frame.named) = (None, None);
            output
        }
        Op::Latent(sizes) => latent::latent(rank, torch, &frame.x, sizes),
        Op::Mixture(sizes) => {
            let (shared, sizes) = (Rc::clone(rank), *sizes);
            let part = move |torch: &mut Torch, inputs: &[Tensor]| moe::mixture(&shared, torch, &inputs[0], &sizes);
            match rank.recomputes(RecomputeModule::Moe) {
                true => recompute::checkpoint(torch, std::slice::from_ref(&frame.x), part),
                false => part(torch, std::slice::from_ref(&frame.x)),
            }
        }
        Op::Scale => torch.scalar(Binary::Mul, &frame.x),
        Op::Dropout => torch.dropout(&frame.x),
    };
    frame.x = made;
}

/// The same for what runs on heads: norms, rotation, the kernel.
fn attend(rank: &Rc<Rank>, torch: &mut Torch, frame: &mut Frame, op: &Op) {
    let Some([mut query, mut key, value]) = frame.heads.take() else { return };
    frame.heads = Some(match op {
        Op::HeadNorms(widths) => {
            // Every head is a row of its own.
            let norm = |torch: &mut Torch, x: &Tensor, width: u64| {
                let width = width.clamp(1, x.shape.last().max(1));
                let rows = x.clone().with_shape(Shape::from([x.elements() / width, width]));
                rank.norm(torch, &rows, Norm::Rms).with_shape(x.shape)
            };
            query = norm(torch, &query, widths[0]);
            // The keys are still a view of what the linears made.
            let dense = attention::copied(torch, "contiguous", &key);
            key = norm(torch, &dense, widths[1]);
            [query, key, value]
        }
        Op::Rotary(width) => {
            let turned = attention::rotary(rank, torch, [&query, &key], *width);
            // `qkv_output` of `Attention.forward` still names what came before.
            frame.named = Some([query, key]);
            let [query, key] = turned;
            [query, key, value]
        }
        Op::Attention(sizes) => {
            let heads = [query, key, value];
            frame.x = attention::attend(rank, torch, &heads, sizes);
            heads
        }
        _ => [query, key, value],
    });
}
