//! A layer of Megatron-DeepSpeed: Apex's RMS norm, linears whose gathered input lies in a shared buffer, rotary embedding and
//! SwiGLU in torch's own kernels, flash-attention, and checkpoints whose input tensor-parallel ranks may share.
//!
//! Sources: megatron/model/{transformer,rotary_pos_embedding}.py, megatron/core/tensor_parallel/{layers,cross_entropy}.py;
//! deepspeed/runtime/activation_checkpointing/checkpointing.py.

use smallvec::smallvec;
use std::rc::Rc;

use crate::dtype::DType;
use crate::memory::autograd::{self, Saved};
use crate::memory::log::Category;
use crate::memory::megatron::architecture::{Grouped, Layer, Makes, Norm, Op};
use crate::memory::megatron::attention::{Kernel, copied, core, split};
use crate::memory::megatron::kernels::fresh_back;
use crate::memory::megatron::rank::{Rank, Rows, Split};
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;
use crate::model::op::Binary;

/// One layer with its parameters, in the order in which its operations use them.
pub(super) fn run(rank: &Rc<Rank>, torch: &mut Torch, x: &Tensor, (own, weights): (&Layer, &[Tensor])) -> Tensor {
    let mut weights = weights.iter();
    let mut x = x.clone();
    for branch in &own.branches {
        let mut frame = Frame { x: x.clone(), heads: None };
        for op in &branch.0 {
            lower(rank, torch, &mut frame, op, &mut weights);
        }
        let sum = torch.binary(Binary::Add, &x, &frame.x);
        drop(frame);
        x = sum;
    }
    x
}

/// What Python's frames name while a branch runs.
struct Frame {
    x: Tensor,
    heads: Option<[Tensor; 3]>,
}

/// The kernels that Megatron-DeepSpeed runs for an operation; what it has none for was refused before.
fn lower<'a>(
    rank: &Rc<Rank>,
    torch: &mut Torch,
    frame: &mut Frame,
    op: &Op,
    weights: &mut impl Iterator<Item = &'a Tensor>,
) {
    match op {
        Op::Column(own) => {
            let [Some(scale), Some(matrix)] = [weights.next(), weights.next()] else { return };
            frame.x = norm(rank, torch, &frame.x, scale);
            frame.x = column(rank, torch, &frame.x, matrix);
            if let Makes::Heads(sizes) = &own.makes {
                frame.heads = Some(heads(rank, torch, &frame.x, sizes));
            }
        }
        Op::Rotary(_) => {
            frame.heads = frame.heads.take().map(|[mut query, mut key, value]| {
                query = rotated(torch, &query);
                key = rotated(torch, &key);
                [query, key, value]
            });
        }
        Op::Attention(sizes) => {
            if let Some(heads) = frame.heads.take() {
                frame.x = attention(rank, torch, heads, sizes);
            }
        }
        Op::Activation { .. } => {
            let width = frame.x.shape.last() / 2;
            let [gate, up] = split(rank, torch, &frame.x, [width, width]);
            let gate = silu(torch, &gate);
            frame.x = torch.binary(Binary::Mul, &gate, &up);
        }
        Op::Row(_) => {
            if let Some(matrix) = weights.next() {
                frame.x = linear(rank, torch, &frame.x, matrix, Split::Row);
            }
        }
        Op::Norm(_) | Op::HeadNorms(_) | Op::Latent(_) | Op::Mixture(_) | Op::Scale | Op::Dropout => {}
    }
}

/// Queries, keys and values; keys and values of a group are repeated for its queries.
fn heads(rank: &Rank, torch: &mut Torch, mixed: &Tensor, sizes: &Grouped) -> [Tensor; 3] {
    let tp = rank.mesh.tp.max(1);
    let (heads, groups) = (sizes.heads / tp, (sizes.kv_heads / tp).max(1));
    let widths = [heads, groups, groups].map(|count| count * sizes.head_dim);
    let [query, key, value] = split(rank, torch, mixed, widths);
    let repeated = |torch: &mut Torch, x: Tensor| if groups == heads { x } else { repeat(torch, &x, widths[0]) };
    let key = repeated(torch, key);
    [query, key, repeated(torch, value)]
}

/// Flash-attention on what is dense, with samples outermost.
fn attention(rank: &Rc<Rank>, torch: &mut Torch, [query, key, value]: [Tensor; 3], sizes: &Grouped) -> Tensor {
    let heads = sizes.heads / rank.mesh.tp.max(1);
    let kernel = Kernel { heads, kv_heads: heads, key_dim: sizes.head_dim, value_dim: sizes.head_dim };
    let dense =
        |torch: &mut Torch, x: &Tensor| if rank.samples > 1 { copied(torch, "contiguous", x) } else { x.clone() };
    let inputs = [dense(torch, &query), dense(torch, &key)];
    let value = if value.viewed || rank.samples > 1 { copied(torch, "contiguous", &value) } else { value };
    drop((query, key));
    let context = core(rank, torch, [&inputs[0], &inputs[1], &value], kernel);
    drop((inputs, value));
    if rank.samples > 1 { copied(torch, "contiguous", &context) } else { context }
}

/// Apex's fused norm: it keeps its input and the inverse deviation.
pub(super) fn norm(rank: &Rc<Rank>, torch: &mut Torch, x: &Tensor, weight: &Tensor) -> Tensor {
    let rows = x.elements() / x.shape.last().max(1);
    let output = rank.matrix(torch, Norm::Rms.name(), rows, x.shape.last());
    let scale = torch.fresh("rsigma", Shape::from([rows]), DType::F32);
    if !torch.records(&[x]) {
        return output;
    }
    let saved = [Saved::new(torch, x), Saved::new(torch, &scale)];
    let (shape, dtype) = (weight.shape, weight.dtype);
    torch.attach(output, &[x, weight], move |torch, gradient| {
        let held = saved.map(|saved| saved.get(torch));
        let result = Norm::Rms.backward(torch, &held[0]);
        let own = torch.fresh("rmsnorm backward", shape, dtype);
        drop((held, gradient));
        smallvec![Some(result), Some(own)]
    })
}

/// A linear that is split by its outputs.
pub(super) fn column(rank: &Rc<Rank>, torch: &mut Torch, x: &Tensor, weight: &Tensor) -> Tensor {
    linear(rank, torch, x, weight, Split::Column)
}

/// `LinearWithGradAccumulationAndAsyncCommunication`: the gathered input lies in the global buffer, and is gathered again in
/// backward; the weight's gradient is a tensor of its own.
fn linear(rank: &Rc<Rank>, torch: &mut Torch, x: &Tensor, weight: &Tensor, split: Split) -> Tensor {
    let (rows, inputs, outputs) = (x.shape.size(0), x.shape.size(1), weight.shape.size(0));
    let Rows { gathers, scatters, total, output: out_rows } = rank.rows(split, rows);
    let buffer = move |rank: &Rank, torch: &mut Torch| {
        if gathers {
            let shape = Shape::from([total, inputs]);
            rank.table(torch, "gather buffer", Category::Communication, shape, rank.dtype);
        }
    };
    buffer(rank, torch);
    let mut output = rank.matrix(torch, "linear", total, outputs);
    rank.use_torch_workspace(torch, false);
    if scatters {
        output = rank.exchanged(torch, "reduce_scatter", out_rows, outputs);
    }
    if !torch.records(&[x, weight]) {
        return output;
    }
    let saved = Saved::new(torch, x);
    let (shared, shape) = (Rc::clone(rank), weight.shape);
    torch.attach(output, &[x, weight], move |torch, gradient| {
        let held = saved.get(torch);
        let whole = scatters.then(|| shared.exchanged(torch, "all_gather", total, outputs));
        buffer(&shared, torch);
        let product = shared.matrix(torch, "linear backward", total, inputs);
        shared.use_torch_workspace(torch, true);
        let scattered = gathers.then(|| shared.exchanged(torch, "reduce_scatter", rows, inputs));
        let own = torch.in_category(Category::Gradients, |torch| torch.fresh("linear backward", shape, shared.dtype));
        drop((held, whole, gradient));
        smallvec![Some(scattered.unwrap_or(product)), Some(own)]
    })
}

/// Each group's heads, as often as there are queries for them.
fn repeat(torch: &mut Torch, x: &Tensor, width: u64) -> Tensor {
    let output = torch.fresh("repeat_kv", Shape::from([x.shape.size(0), width]), x.dtype);
    fresh_back(torch, output, x, "sum", None)
}

/// `apply_rotary_pos_emb` in plain operations: only the tables are kept, the rest are temporaries.
fn rotated(torch: &mut Torch, x: &Tensor) -> Tensor {
    let half = torch.fresh("cat", x.shape, x.dtype);
    let first = torch.fresh("mul", x.shape, x.dtype);
    let second = torch.fresh("mul", x.shape, x.dtype);
    drop(half);
    let output = torch.fresh("add", x.shape, x.dtype);
    drop((first, second));
    if !torch.records(&[x]) {
        return output;
    }
    torch.attach(output, &[x], |torch, gradient| {
        let (shape, dtype) = (gradient.shape, gradient.dtype);
        let parts = [0, 1].map(|_| torch.fresh("mul backward", shape, dtype));
        let result = torch.fresh("rotate backward", shape, dtype);
        drop((parts, gradient));
        smallvec![Some(result)]
    })
}

/// `F.silu`: it keeps its input.
fn silu(torch: &mut Torch, x: &Tensor) -> Tensor {
    let output = torch.fresh("silu", x.shape, x.dtype);
    if !torch.records(&[x]) {
        return output;
    }
    let saved = Saved::new(torch, x);
    torch.attach(output, &[x], move |torch, gradient| {
        let held = saved.get(torch);
        let result = torch.fresh("silu backward", held.shape, held.dtype);
        drop((held, gradient));
        smallvec![Some(result)]
    })
}

/// The vocabulary-parallel loss on logits in fp32, which are returned too: an fp32 copy of theirs becomes the softmax.
pub(super) fn cross_entropy(rank: &Rc<Rank>, torch: &mut Torch, logits: Tensor, labels: &Tensor) -> (Tensor, Tensor) {
    torch.in_category(Category::Logits, |torch| {
        let tokens = rank.tokens();
        let wide = torch.fresh("float", logits.shape, DType::F32);
        let softmax = torch.fresh("sub", logits.shape, DType::F32);
        let output = torch.fresh("cross entropy", Shape::from([tokens]), DType::F32);
        if !torch.records(&[&logits]) {
            return (output, wide);
        }
        let (saved, labels) = (Saved::new(torch, &softmax), labels.clone());
        let (shape, dtype) = (logits.shape, logits.dtype);
        let output = torch.attach(output, &[&logits], move |torch, gradient| {
            // The softmax becomes the gradient in place, and is cast to the type of the logits.
            let held = saved.get(torch);
            let result = torch.fresh("to", shape, dtype);
            drop((held, labels, gradient));
            smallvec![Some(result)]
        });
        (output, wide)
    })
}

/// DeepSpeed's checkpoint: the input is kept, or with `partition_activations` the rank's part of it, which is gathered again.
pub(super) fn checkpoint(
    rank: &Rc<Rank>,
    torch: &mut Torch,
    x: Tensor,
    part: impl Fn(&mut Torch, &[Tensor]) -> Tensor + 'static,
) -> Tensor {
    let records = torch.records(&[&x]);
    let before = std::mem::replace(&mut torch.grad_enabled, false);
    let output = part(torch, std::slice::from_ref(&x));
    torch.grad_enabled = before;
    if !records {
        return output;
    }
    let parts = if rank.options.partition_activations { rank.mesh.tp.max(1) } else { 1 };
    let (shape, dtype) = (x.shape, x.dtype);
    let held = match parts {
        1 => x.detached(),
        _ => torch.fresh("partition", Shape::from([shape.elements().div_ceil(parts)]), dtype),
    };
    torch.attach(output, &[&x], move |torch, gradient| {
        let whole = match parts {
            1 => held,
            _ => torch.in_category(Category::Communication, |torch| torch.fresh("all_gather", shape, dtype)),
        };
        let before = std::mem::replace(&mut torch.grad_enabled, true);
        let (x, leaf) = torch.leaf(whole);
        let again = part(torch, &[x]);
        torch.grad_enabled = before;
        autograd::backward_nested(torch, &[(again, gradient)]);
        let result = leaf.grad.borrow_mut().take();
        smallvec![result]
    })
}
