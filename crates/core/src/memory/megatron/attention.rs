//! Self-attention with grouped queries, and the fused kernel with and without context parallel.
//!
//! Sources: megatron/core/transformer/attention.py; transformer_engine/pytorch/attention (FusedAttnFunc,
//! AttnFuncWithCPAndQKVOA2A, get_qkv_layout, SplitAlongDim).

use smallvec::smallvec;
use std::rc::Rc;

use super::architecture::Grouped;
use super::kernels::fresh_back;
use super::rank::Rank;
use super::{recompute, ring};
use crate::dtype::DType;
use crate::memory::autograd::Saved;
use crate::memory::log::{Category, Stream};
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;
use crate::plan::parallel::megatron::{ContextExchange, RecomputeModule};

/// Sizes of the attention kernel on one tensor-parallel rank.
#[derive(Debug, Clone, Copy)]
pub(super) struct Kernel {
    /// Query heads.
    pub heads: u64,
    /// Key and value heads.
    pub kv_heads: u64,
    /// Width of queries and keys.
    pub key_dim: u64,
    /// Width of values.
    pub value_dim: u64,
}

impl Kernel {
    fn new(rank: &Rank, sizes: &Grouped) -> Self {
        let tp = rank.mesh.tp.max(1);
        Self {
            heads: sizes.heads / tp,
            kv_heads: (sizes.kv_heads / tp).max(1),
            key_dim: sizes.head_dim,
            value_dim: sizes.head_dim,
        }
    }
}

/// Queries, keys and values out of what their linears made.
pub(super) fn heads(rank: &Rank, torch: &mut Torch, mixed: Tensor, sizes: &Grouped) -> [Tensor; 3] {
    let kernel = Kernel::new(rank, sizes);
    let (queries, keys) = (kernel.heads * kernel.key_dim, kernel.kv_heads * kernel.key_dim);
    let [query, key, value] = split(rank, torch, &mixed, [queries, keys, keys]);
    // Queries of several groups do not lie side by side: `reshape` copies them.
    let query = if kernel.kv_heads > 1 { copied(torch, "reshape", &query) } else { query };
    [query, key, value]
}

/// Queries and keys rotated.
pub(super) fn rotary(rank: &Rank, torch: &mut Torch, [query, key]: [&Tensor; 2], width: u64) -> [Tensor; 2] {
    rotary_table(rank, torch, width);
    [query, key].map(|x| rotated(torch, x))
}

/// The kernel, run again in backward where that is asked for. Transformer Engine wants keys and values of one layout: what is
/// a view of the projection is copied out of it.
pub(super) fn attend(rank: &Rc<Rank>, torch: &mut Torch, heads: &[Tensor; 3], sizes: &Grouped) -> Tensor {
    let (shared, kernel) = (Rc::clone(rank), Kernel::new(rank, sizes));
    let part = move |torch: &mut Torch, inputs: &[Tensor]| {
        let dense = [0, 1, 2].map(|index| match &inputs[index] {
            x if x.viewed => copied(torch, "contiguous", x),
            x => x.clone(),
        });
        core(&shared, torch, [&dense[0], &dense[1], &dense[2]], kernel)
    };
    match rank.recomputes(RecomputeModule::CoreAttn) {
        true => recompute::checkpoint(torch, heads, part),
        false => part(torch, heads),
    }
}

/// The table of rotary angles, fp32, made once; the parts of a context-parallel rank are picked out of it.
fn rotary_table(rank: &Rank, torch: &mut Torch, dim: u64) {
    let shape = Shape::from([rank.sequence / rank.mesh.cp.max(1), dim]);
    rank.table(torch, "rotary embedding", Category::Buffers, shape, DType::F32);
}

/// A dense copy whose gradient goes back as it is.
pub(super) fn copied(torch: &mut Torch, name: &'static str, x: &Tensor) -> Tensor {
    let output = torch.fresh(name, x.shape, x.dtype);
    if !torch.records(&[x]) {
        return output;
    }
    torch.attach(output, &[x], |_, gradient| smallvec![Some(gradient)])
}

/// Transformer Engine's rotary kernel: a fresh tensor each way, and only the angles are kept.
fn rotated(torch: &mut Torch, x: &Tensor) -> Tensor {
    let output = torch.fresh("fused rope", x.shape, x.dtype);
    fresh_back(torch, output, x, "fused rope backward", None)
}

/// Views of one tensor, whose gradients are joined.
pub(super) fn split<const N: usize>(rank: &Rank, torch: &mut Torch, x: &Tensor, widths: [u64; N]) -> [Tensor; N] {
    let rows = x.shape.size(0);
    let mut parts = widths.map(|width| Tensor { viewed: true, ..x.detached().with_shape(Shape::from([rows, width])) });
    if torch.records(&[x]) {
        let (total, dtype) = (x.shape.last(), rank.dtype);
        torch.attach_many(&mut parts, &[x], move |torch, gradients| {
            let joined = torch.fresh("cat", Shape::from([rows, total]), dtype);
            drop(gradients);
            smallvec![Some(joined)]
        });
    }
    parts
}

/// The attention kernel: cuDNN's on Hopper and later. It keeps queries, keys, values, output and the softmax's sums.
pub(super) fn core(rank: &Rc<Rank>, torch: &mut Torch, [q, k, v]: [&Tensor; 3], kernel: Kernel) -> Tensor {
    let cp = rank.mesh.cp.max(1);
    let count = 2 * rank.samples * kernel.heads;
    torch.multiply(q.dtype, count, [rank.sequence / cp, kernel.key_dim, rank.sequence]);
    if cp == 1 {
        let output = torch.fresh("scaled_dot_product_attention", output_shape(q, kernel), q.dtype);
        let sums = sums(rank, torch, kernel.heads);
        if !torch.records(&[q, k, v]) {
            return output;
        }
        let saved = [q, k, v, &output, &sums].map(|tensor| Saved::new(torch, tensor));
        let rank = Rc::clone(rank);
        return torch.attach(output, &[q, k, v], move |torch, gradient| {
            let held = saved.map(|saved| saved.get(torch));
            let results = core_backward(&rank, torch, [&held[0], &held[1], &held[2]], kernel.heads);
            drop((held, gradient));
            results.map(Some).into_iter().collect()
        });
    }
    if rank.options.cp_comm == ContextExchange::P2p {
        return ring::core(rank, torch, [q, k, v], kernel);
    }
    let [full_q, full_k, full_v] = before_kernel(torch, [q, k, v]);
    let heads = (kernel.heads / cp).max(1);
    let inner = torch.fresh("scaled_dot_product_attention", output_shape(q, kernel), q.dtype);
    let sums = sums(rank, torch, heads);
    let [output] = after_kernel(torch, [&inner]);
    if !torch.records(&[q, k, v]) {
        return output;
    }
    let saved = [&full_q, &full_k, &full_v, &inner, &sums].map(|tensor| Saved::new(torch, tensor));
    drop((full_q, full_k, full_v, inner, sums));
    let rank = Rc::clone(rank);
    torch.attach(output, &[q, k, v], move |torch, gradient| {
        let held = saved.map(|saved| saved.get(torch));
        let [full] = before_kernel(torch, [&gradient]);
        let [dq, dk, dv] = core_backward(&rank, torch, [&held[0], &held[1], &held[2]], heads);
        let results = after_kernel(torch, [&dq, &dk, &dv]);
        drop((held, full, gradient, dq, dk, dv));
        results.map(|result| Some(Tensor { viewed: true, ..result })).into_iter().collect()
    })
}

fn output_shape(q: &Tensor, kernel: Kernel) -> Shape {
    Shape::from([q.shape.size(0), kernel.heads * kernel.value_dim])
}

/// The softmax's log-sums, fp32, one for each query and head: with context parallel for all tokens of fewer heads.
fn sums(rank: &Rank, torch: &mut Torch, heads: u64) -> Tensor {
    torch.fresh("softmax sums", Shape::from([rank.samples, heads, rank.sequence, 1]), DType::F32)
}

/// Gradients of queries, keys and values, with the workspace in which cuDNN sums those of the queries in fp32.
fn core_backward(rank: &Rank, torch: &mut Torch, [q, k, v]: [&Tensor; 3], heads: u64) -> [Tensor; 3] {
    let results = [q, k, v].map(|x| torch.fresh("attention backward", x.shape, x.dtype));
    let width = q.shape.last() / heads.max(1);
    torch.multiply(q.dtype, 5 * rank.samples * heads, [rank.sequence, width, rank.sequence]);
    let rows = 4 * rank.samples * heads * rank.sequence;
    let workspace = torch.scratch("attention workspace", 4 * q.elements() + rows);
    drop(workspace);
    results
}

/// The all-to-all before the kernel, from parts of the sequence to parts of the heads: a dense copy, what is received,
/// and the copy in order (`flash_attn_a2a_communicate`). The next tensor is under way while one is put in order.
fn before_kernel<const N: usize>(torch: &mut Torch, inputs: [&Tensor; N]) -> [Tensor; N] {
    let mut sent: Vec<Tensor> = Vec::new();
    let mut received: Vec<Option<Tensor>> = Vec::new();
    let mut ordered: Vec<Tensor> = Vec::new();
    for index in 0..N + 2 {
        if (1..=N).contains(&index) {
            received.push(Some(like(torch, "all_to_all", inputs[index - 1])));
        }
        if index > 1 {
            ordered.push(beside(torch, "index_select", inputs[index - 2]));
            received[index - 2] = None;
        }
        if index < N {
            sent.push(like(torch, "contiguous", inputs[index]));
        }
    }
    drop(sent);
    take(ordered, inputs)
}

/// The way back.
fn after_kernel<const N: usize>(torch: &mut Torch, inputs: [&Tensor; N]) -> [Tensor; N] {
    let mut sent: Vec<Tensor> = Vec::new();
    let mut received: Vec<Option<Tensor>> = Vec::new();
    let mut dense: Vec<Tensor> = Vec::new();
    for index in 0..N + 2 {
        if (1..=N).contains(&index) {
            received.push(Some(like(torch, "all_to_all", inputs[index - 1])));
        }
        if index < N {
            sent.push(like(torch, "index_select", inputs[index]));
        }
        if index > 1 {
            dense.push(beside(torch, "contiguous", inputs[index - 2]));
            received[index - 2] = None;
        }
    }
    drop(sent);
    take(dense, inputs)
}

fn like(torch: &mut Torch, name: &'static str, x: &Tensor) -> Tensor {
    torch.in_category(Category::Communication, |torch| torch.fresh(name, x.shape, x.dtype))
}

/// The same on the stream of the exchange, whose free blocks the allocator keeps apart.
fn beside(torch: &mut Torch, name: &'static str, x: &Tensor) -> Tensor {
    torch.on_stream(Stream::Gather, |torch| like(torch, name, x))
}

fn take<const N: usize>(made: Vec<Tensor>, inputs: [&Tensor; N]) -> [Tensor; N] {
    let mut made = made.into_iter();
    inputs.map(|input| made.next().unwrap_or_else(|| input.detached()))
}
