//! A mixture: router, permutation, all-to-all, grouped experts, and the way back.
//!
//! Sources: megatron/core/transformer/moe/{moe_layer,router,moe_utils,token_dispatcher,experts,shared_experts}.py;
//! transformer_engine/pytorch/permutation.py.

use std::rc::Rc;

use super::architecture::Mixture;
use super::mlp;
use super::rank::Rank;
use super::recompute;
use super::router::{self, Routing};
use crate::memory::log::Category;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;
use crate::model::op::Binary;
use crate::plan::parallel::megatron::RecomputeModule;

/// The mixture on a normed input.
pub(super) fn mixture(rank: &Rc<Rank>, torch: &mut Torch, x: &Tensor, sizes: &Mixture) -> Tensor {
    let routing = router::route(rank, torch, x, sizes);
    let (permuted, probabilities) = permute(rank, torch, x, &routing, sizes);
    let received = all_to_all(rank, torch, permuted);
    let probabilities = all_to_all(rank, torch, probabilities);
    let shared = (sizes.shared > 0).then(|| shared_experts(rank, torch, x, sizes));
    let received = gather(rank, torch, received);
    let probabilities = gather(rank, torch, probabilities);
    // Tokens come sorted by rank; several local experts want them sorted by expert.
    let several = sizes.experts / rank.mesh.ep.max(1) > 1;
    let sorted = if several { sort(torch, received) } else { received };
    let probabilities = if several { sort(torch, probabilities) } else { probabilities };
    let output = experts(rank, torch, sorted, probabilities, sizes);
    let output = if several { sort(torch, output) } else { output };
    let output = scatter(rank, torch, output);
    let output = all_to_all(rank, torch, output);
    let output = unpermute(rank, torch, output, x.shape, &routing);
    match shared {
        Some(shared) => torch.binary(Binary::Add, &output, &shared),
        None => output,
    }
}

/// Routed tokens that a rank sends: padded to the capacity of every expert, or as many as are chosen.
pub(super) fn sent_tokens(rank: &Rank, tokens: u64, sizes: &Mixture) -> u64 {
    let chosen = tokens.saturating_mul(sizes.top_k);
    match rank.options.moe.capacity_percent {
        Some(percent) => chosen.saturating_mul(percent).div_ceil(100 * sizes.experts.max(1)).saturating_mul(sizes.experts),
        None => chosen,
    }
}

/// Tokens into the order of experts, with their probabilities; only the map is kept.
fn permute(rank: &Rc<Rank>, torch: &mut Torch, x: &Tensor, routing: &Routing, sizes: &Mixture) -> (Tensor, Tensor) {
    let (tokens, width) = (x.shape.size(0), x.shape.last());
    let count = sent_tokens(rank, tokens, sizes);
    let mut outputs = [
        rank.matrix(torch, "permute", count, width),
        torch.fresh("permute", Shape::from([count]), routing.probabilities.dtype),
    ];
    let inputs = [x, &routing.probabilities];
    if torch.records(&inputs) {
        let map = routing.map.clone();
        let shapes = inputs.map(|tensor| (tensor.shape, tensor.dtype));
        torch.attach_many(&mut outputs, &inputs, move |torch, gradients| {
            let results = shapes.map(|(shape, dtype)| Some(torch.fresh("permute backward", shape, dtype)));
            drop((gradients, map));
            results.into()
        });
    }
    let [tokens, probabilities] = outputs;
    (tokens, probabilities)
}

/// Back into the order of tokens, summed over the experts of each.
fn unpermute(rank: &Rc<Rank>, torch: &mut Torch, x: Tensor, shape: Shape, routing: &Routing) -> Tensor {
    let output = rank.matrix(torch, "unpermute", shape.size(0), shape.last());
    if !torch.records(&[&x]) {
        return output;
    }
    let (map, shape, dtype) = (routing.map.clone(), x.shape, x.dtype);
    torch.attach(output, &[&x], move |torch, gradient| {
        let result = torch.fresh("unpermute backward", shape, dtype);
        drop((gradient, map));
        vec![Some(result)]
    })
}

/// A fresh tensor of another number of rows each way.
fn moved(torch: &mut Torch, name: &'static str, x: Tensor, rows: u64, category: Category) -> Tensor {
    let make = move |torch: &mut Torch, shape: Shape, dtype| {
        torch.in_category(category, |torch| torch.fresh(name, shape, dtype))
    };
    let output = make(torch, x.shape.with(0, rows), x.dtype);
    if !torch.records(&[&x]) {
        return output;
    }
    let (shape, dtype) = (x.shape, x.dtype);
    torch.attach(output, &[&x], move |torch, gradient| {
        let result = make(torch, shape, dtype);
        drop(gradient);
        vec![Some(result)]
    })
}

/// Between the expert-parallel ranks; routing is taken as even.
fn all_to_all(rank: &Rank, torch: &mut Torch, x: Tensor) -> Tensor {
    if rank.mesh.ep == 1 {
        return x;
    }
    let rows = x.shape.size(0);
    moved(torch, "all_to_all", x, rows, Category::Communication)
}

/// Tokens of the expert-tensor-parallel ranks together.
fn gather(rank: &Rank, torch: &mut Torch, x: Tensor) -> Tensor {
    let parts = rank.mesh.expert_tp();
    if parts == 1 {
        return x;
    }
    let rows = x.shape.size(0) * parts;
    moved(torch, "all_gather", x, rows, Category::Communication)
}

/// Summed over the expert-tensor-parallel ranks and apart again.
fn scatter(rank: &Rank, torch: &mut Torch, x: Tensor) -> Tensor {
    let parts = rank.mesh.expert_tp();
    if parts == 1 {
        return x;
    }
    let rows = x.shape.size(0) / parts;
    moved(torch, "reduce_scatter", x, rows, Category::Communication)
}

/// Chunks of tokens in another order.
fn sort(torch: &mut Torch, x: Tensor) -> Tensor {
    let rows = x.shape.size(0);
    moved(torch, "sort chunks", x, rows, Category::Activations)
}

/// `TEGroupedMLP`.
fn experts(rank: &Rc<Rank>, torch: &mut Torch, x: Tensor, probabilities: Tensor, sizes: &Mixture) -> Tensor {
    let hidden = x.shape.last();
    let wide = rank.grouped_linear(torch, &x, 2 * sizes.width / rank.mesh.expert_tp());
    drop(x);
    if rank.recomputes(RecomputeModule::MoeAct) {
        let shared = Rc::clone(rank);
        let (activated, discarded) = recompute::without_output(torch, &[wide, probabilities], move |torch, inputs| {
            shared.swiglu(torch, &inputs[0], Some(&inputs[1]))
        });
        let output = rank.grouped_linear(torch, &activated, hidden);
        if let Some(discarded) = discarded {
            discarded.discard_until(&output);
        }
        return output;
    }
    let activated = rank.swiglu(torch, &wide, Some(&probabilities));
    drop((wide, probabilities));
    rank.grouped_linear(torch, &activated, hidden)
}

fn shared_experts(rank: &Rc<Rank>, torch: &mut Torch, x: &Tensor, sizes: &Mixture) -> Tensor {
    let sizes = *sizes;
    let shared = Rc::clone(rank);
    let part = move |torch: &mut Torch, inputs: &[Tensor]| {
        let output = mlp::gated(&shared, torch, &inputs[0], sizes.shared);
        match sizes.shared_gate {
            true => mlp::gate(&shared, torch, &inputs[0], &output),
            false => output,
        }
    };
    match rank.recomputes(RecomputeModule::SharedExperts) {
        true => recompute::checkpoint(torch, std::slice::from_ref(x), part),
        false => part(torch, std::slice::from_ref(x)),
    }
}
