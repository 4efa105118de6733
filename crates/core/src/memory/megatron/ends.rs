//! The ends of the model: the embedding, the output layer and the vocabulary-parallel loss.
//!
//! Sources: megatron/core/tensor_parallel/{layers,cross_entropy}.py, models/common/embeddings,
//! models/gpt/gpt_model.py; transformer_engine/pytorch/triton/cross_entropy.py.

use smallvec::smallvec;
use std::rc::Rc;

use super::rank::Rank;
use crate::dtype::DType;
use crate::memory::autograd::Saved;
use crate::memory::log::Category;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;
use crate::plan::Package;
use crate::plan::parallel::megatron::CrossEntropy;

/// The embedding's rows; `weight` collects a gradient, which is added to the main gradients and freed at once.
pub(super) fn embedding(rank: &Rc<Rank>, torch: &mut Torch, ids: &Tensor, weight: &Tensor) -> Tensor {
    let (tokens, hidden) = (rank.tokens(), weight.shape.last());
    let parallel = rank.mesh.tp > 1;
    let masked = parallel.then(|| {
        let mask = torch.fresh("input mask", ids.shape, DType::Bool);
        (mask, torch.fresh("masked input", ids.shape, DType::I64))
    });
    let mut output = rank.matrix(torch, "embedding", tokens, hidden);
    if rank.scattered() {
        let scattered = rank.exchanged(torch, "reduce_scatter", rank.own_tokens(), hidden);
        // `clone_scatter_output_in_embedding`.
        output = rank.matrix(torch, "clone", scattered.shape.size(0), hidden);
    } else if rank.samples > 1 {
        output = rank.matrix(torch, "contiguous", tokens, hidden);
    }
    let shared = Rc::clone(rank);
    let (shape, ids) = (weight.shape, ids.clone());
    torch.attach(output, &[weight], move |torch, gradient| {
        let mut gradient = gradient;
        if shared.scattered() {
            gradient = shared.exchanged(torch, "all_gather", tokens, hidden);
        }
        if parallel {
            // Rows of other ranks' words are set to zero in a copy.
            gradient = shared.matrix(torch, "index_put", tokens, hidden);
        }
        let result = torch.fresh("embedding backward", shape, shared.dtype);
        torch.sort_scratch(tokens);
        drop((masked, ids, gradient));
        smallvec![Some(result)]
    })
}

/// `ColumnParallelLinear` on the vocabulary: the gathered input lies in a buffer that all uses share.
pub(super) fn output_layer(rank: &Rc<Rank>, torch: &mut Torch, x: &Tensor, vocabulary: u64) -> Tensor {
    let (tokens, hidden) = (rank.tokens(), x.shape.last());
    gather_buffer(rank, torch, hidden);
    let output = torch.in_category(Category::Logits, |torch| rank.matrix(torch, "logits", tokens, vocabulary));
    rank.use_torch_workspace(torch, false);
    if !torch.records(&[x]) {
        return output;
    }
    // A frozen head keeps nothing of its input.
    let saved = rank.options.lora.is_none().then(|| Saved::new(torch, x));
    let shared = Rc::clone(rank);
    torch.attach(output, &[x], move |torch, gradient| {
        let held = saved.map(|saved| saved.get(torch));
        gather_buffer(&shared, torch, hidden);
        let product = shared.matrix(torch, "dgrad", tokens, hidden);
        shared.use_torch_workspace(torch, true);
        let rows = shared.own_tokens();
        let scattered = shared.scattered().then(|| shared.exchanged(torch, "reduce_scatter", rows, hidden));
        match &held {
            None => {}
            // Made for autograd, and thrown away.
            Some(_) if shared.stack.before(Package::MegatronCore, 0, 14, 0) => {
                drop(shared.matrix(torch, "dummy weight gradient", vocabulary, hidden));
            }
            Some(held) => {
                shared.weight_gradient(torch, vocabulary, hidden, vec![held.clone(), gradient.clone()]);
            }
        }
        drop((held, gradient));
        smallvec![Some(scattered.unwrap_or(product))]
    })
}

/// Megatron's global memory buffer, where the sequence is split.
fn gather_buffer(rank: &Rank, torch: &mut Torch, hidden: u64) {
    if rank.scattered() {
        let shape = Shape::from([rank.tokens(), hidden]);
        rank.table(torch, "gather buffer", Category::Communication, shape, rank.dtype);
    }
}

/// The loss of every token.
pub(super) fn cross_entropy(rank: &Rc<Rank>, torch: &mut Torch, logits: Tensor, labels: &Tensor) -> Tensor {
    torch.in_category(Category::Logits, |torch| match rank.options.cross_entropy {
        CrossEntropy::Te => fused(rank, torch, &logits, labels),
        CrossEntropy::Unfused => parallel(rank, torch, logits, labels),
    })
}

/// Transformer Engine's kernel writes the gradient over the logits.
fn fused(rank: &Rc<Rank>, torch: &mut Torch, logits: &Tensor, labels: &Tensor) -> Tensor {
    let tokens = rank.tokens();
    let output = torch.fresh("cross entropy", Shape::from([tokens]), DType::F32);
    let own = torch.fresh("cross entropy", Shape::from([3 * tokens]), DType::F32);
    let all =
        (rank.mesh.tp > 1).then(|| torch.fresh("cross entropy", Shape::from([3 * tokens * rank.mesh.tp]), DType::F32));
    drop((own, all));
    if !torch.records(&[logits]) {
        return output;
    }
    let (saved, labels) = (Saved::new(torch, logits), labels.clone());
    torch.attach(output, &[logits], move |torch, gradient| {
        let result = saved.get(torch);
        drop((labels, gradient));
        smallvec![Some(result)]
    })
}

/// Megatron's own: the logits in fp32, turned in place into the softmax and then the gradient.
fn parallel(rank: &Rc<Rank>, torch: &mut Torch, logits: Tensor, labels: &Tensor) -> Tensor {
    let tokens = rank.tokens();
    let wide = torch.fresh("float", logits.shape, DType::F32);
    let largest = torch.fresh("max", Shape::from([tokens]), DType::F32);
    let mask = torch.fresh("target mask", Shape::from([tokens]), DType::Bool);
    let target = torch.fresh("masked target", Shape::from([tokens]), DType::I64);
    let output = torch.fresh("cross entropy", Shape::from([tokens]), DType::F32);
    drop(largest);
    if !torch.records(&[&logits]) {
        return output;
    }
    let saved = [&wide, &mask, &target].map(|tensor| Saved::new(torch, tensor));
    let (labels, shape, dtype) = (labels.clone(), logits.shape, logits.dtype);
    torch.attach(output, &[&logits], move |torch, gradient| {
        let held = saved.map(|saved| saved.get(torch));
        // The engine casts the gradient to the type of the logits.
        let result = torch.fresh("to", shape, dtype);
        drop((held, labels, gradient));
        smallvec![Some(result)]
    })
}
