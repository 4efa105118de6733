//! Context parallel by a ring: keys and values go round, and every step attends to one part of the sequence.
//!
//! Source: transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py (`AttnFuncWithCPAndKVP2P`) of
//! version 2.20. Of the ranks of a ring the last holds most: its queries are whole in every step.

use std::rc::Rc;

use super::attention::Kernel;
use super::rank::Rank;
use crate::dtype::DType;
use crate::memory::autograd::Saved;
use crate::memory::log::Category;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;

/// The kernel on a ring. Queries, the keys and values that arrived last, output and sums are kept.
pub(super) fn core(rank: &Rc<Rank>, torch: &mut Torch, [q, k, v]: [&Tensor; 3], kernel: Kernel) -> Tensor {
    let steps = rank.mesh.cp;
    let tokens = q.shape.size(0);
    let both = k.elements() + v.elements();
    let sums_shape = Shape::from([rank.samples, kernel.heads, rank.sequence / steps.max(1)]);
    let width = kernel.heads * kernel.value_dim;
    let shape = Shape::from([tokens, width]);
    let mut arrived = vec![exchanged(torch, "cat", both, q.dtype)];
    let mut parts: Vec<Tensor> = Vec::new();
    let mut sums: Option<Tensor> = None;
    let mut output: Option<Tensor> = None;
    for step in 0..steps {
        if step + 1 < steps {
            arrived.push(exchanged(torch, "recv", both, q.dtype));
        }
        // The first halves of what arrived, dense.
        let half = (step > 0).then(|| torch.fresh("contiguous", Shape::from([both / 2]), q.dtype));
        parts.push(torch.fresh("scaled_dot_product_attention", shape, q.dtype));
        parts.push(torch.fresh("softmax sums", sums_shape, DType::F32));
        if step == 1 {
            sums = Some(torch.fresh("softmax sums", sums_shape, DType::F32));
            output = Some(torch.fresh("ring attention", shape, q.dtype));
        }
        drop(half);
    }
    let sums = sums.unwrap_or_else(|| torch.fresh("softmax sums", sums_shape, DType::F32));
    let output = output.unwrap_or_else(|| torch.fresh("ring attention", shape, q.dtype));
    let last = arrived.pop();
    drop((arrived, parts));
    if !torch.records(&[q, k, v]) {
        return output;
    }
    let kept = [Some(q.detached()), last, Some(output.clone()), Some(sums)];
    let saved: Vec<Saved> = kept.iter().flatten().map(|tensor| Saved::new(torch, tensor)).collect();
    drop(kept);
    let (shapes, dtype) = ([q.shape, k.shape, v.shape], q.dtype);
    let rank = Rc::clone(rank);
    torch.attach(output, &[q, k, v], move |torch, gradient| {
        let held: Vec<Tensor> = saved.into_iter().map(|saved| saved.get(torch)).collect();
        let query = torch.fresh("attention backward", shapes[0], dtype);
        // Keys and values with their gradients, what is sent and what is received.
        let going = [0, 1].map(|_| exchanged(torch, "ring", 2 * both, dtype));
        let step = shapes.map(|shape| torch.fresh("attention backward", shape, dtype));
        let rows = 4 * rank.samples * kernel.heads * rank.sequence / rank.mesh.cp.max(1);
        drop(torch.scratch("attention workspace", 4 * shapes[0].elements() + rows));
        let joined = torch.fresh("cat", Shape::from([both]), dtype);
        drop((step, joined, held, gradient));
        let [_, arrived] = going;
        let views = [shapes[1], shapes[2]].map(|shape| Tensor { viewed: true, ..arrived.clone().with_shape(shape) });
        std::iter::once(query).chain(views).map(Some).collect()
    })
}

fn exchanged(torch: &mut Torch, name: &'static str, elements: u64, dtype: DType) -> Tensor {
    torch.in_category(Category::Communication, |torch| torch.fresh(name, Shape::from([elements]), dtype))
}
