//! A mixture: router, permutation, all-to-all, grouped experts, and the way back.
//!
//! Sources: megatron/core/transformer/moe/{moe_layer,router,moe_utils,token_dispatcher,experts,shared_experts}.py;
//! transformer_engine/pytorch/permutation.py.

use smallvec::smallvec;
use std::rc::Rc;

use super::architecture::Mixture;
use super::kernels::fresh_back;
use super::mlp;
use super::rank::Rank;
use super::recompute;
use super::router::{self, Routing};
use crate::memory::autograd::Gradients;
use crate::memory::autograd::Saved;
use crate::memory::log::Category;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;
use crate::model::op::Binary;
use crate::plan::Package;
use crate::plan::parallel::megatron::{Dispatcher, Fp8Recipe, RecomputeModule};

/// The mixture on a normed input.
///
/// What Python's frames name stays until they return: the permuted tokens, the received ones and the experts' output are
/// all alive while tokens go back (`custom_forward` of `MoELayer.forward`).
pub(super) fn mixture(rank: &Rc<Rank>, torch: &mut Torch, x: &Tensor, sizes: &Mixture) -> Tensor {
    let routing = router::route(rank, torch, x, sizes);
    if rank.options.moe.dispatcher == Dispatcher::Hybridep {
        return fused(rank, torch, x, routing, sizes);
    }
    // Before 0.13 probabilities are applied when tokens come back.
    let early = !rank.stack.before(Package::MegatronCore, 0, 13, 0);
    let (permuted, probabilities) = permute(rank, torch, x, &routing, sizes);
    let received = all_to_all(rank, torch, &permuted);
    let probabilities = all_to_all(rank, torch, &probabilities);
    let shared = (sizes.shared > 0).then(|| shared_experts(rank, torch, x, sizes));
    let output = {
        let gathered = gather(rank, torch, &received);
        let probabilities = gather(rank, torch, &probabilities);
        // Tokens come sorted by rank; several local experts want them sorted by expert.
        let several = sizes.experts / rank.mesh.ep.max(1) > 1;
        let sorted = if several { sort(torch, &gathered) } else { gathered.clone() };
        drop(gathered);
        let probabilities = if several { sort(torch, &probabilities) } else { probabilities };
        let output = experts(rank, torch, sorted, early.then_some(probabilities), sizes);
        let sorted = if several { sort(torch, &output) } else { output.clone() };
        scatter(rank, torch, &sorted)
    };
    let returned = all_to_all(rank, torch, &output);
    let combined = unpermute(rank, torch, &returned, x.shape, &routing, early);
    drop(returned);
    let result = match &shared {
        Some(shared) => torch.binary(Binary::Add, &combined, shared),
        None => combined,
    };
    rank.remember(torch.module(), vec![routing.probabilities.detached(), routing.chosen, routing.map]);
    drop((permuted, received, output, shared));
    result
}

/// HybridEP: one kernel brings tokens to their experts in order, one brings them back and sums them (`fused_a2a.py`). The
/// frame that names the received tokens holds them until the layer returns.
fn fused(rank: &Rc<Rank>, torch: &mut Torch, x: &Tensor, routing: Routing, sizes: &Mixture) -> Tensor {
    let (received, probabilities) = permute(rank, torch, x, &routing, sizes);
    let shared = (sizes.shared > 0).then(|| shared_experts(rank, torch, x, sizes));
    let output = experts(rank, torch, received.clone(), Some(probabilities), sizes);
    let combined = moved(torch, "combine", &output, x.shape.size(0), Category::Activations);
    drop(output);
    let result = match &shared {
        Some(shared) => torch.binary(Binary::Add, &combined, shared),
        None => combined,
    };
    rank.remember(torch.module(), vec![routing.probabilities.detached(), routing.chosen, routing.map]);
    drop((received, shared));
    result
}

/// Routed tokens that a rank sends: padded to the capacity of every expert, or as many as are chosen.
pub(super) fn sent_tokens(rank: &Rank, tokens: u64, sizes: &Mixture) -> u64 {
    let chosen = tokens.saturating_mul(sizes.top_k);
    match rank.options.moe.capacity_percent {
        Some(percent) => {
            chosen.saturating_mul(percent).div_ceil(100 * sizes.experts.max(1)).saturating_mul(sizes.experts)
        }
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
///
/// Where probabilities are applied only here (`applied` is false), the tokens are kept for their gradient.
fn unpermute(rank: &Rc<Rank>, torch: &mut Torch, x: &Tensor, shape: Shape, routing: &Routing, applied: bool) -> Tensor {
    let output = rank.matrix(torch, "unpermute", shape.size(0), shape.last());
    let probabilities = &routing.probabilities;
    if !torch.records(&[x, probabilities]) {
        return output;
    }
    let (map, own) = (routing.map.clone(), (x.shape, x.dtype));
    let kept = (!applied).then(|| [Saved::new(torch, x), Saved::new(torch, probabilities)]);
    let grid = (probabilities.shape, probabilities.dtype);
    let inputs: Vec<&Tensor> = if applied { vec![x] } else { vec![x, probabilities] };
    torch.attach(output, &inputs, move |torch, gradient| {
        let held = kept.map(|kept| kept.map(|saved| saved.get(torch)));
        let mut results: Gradients = smallvec![Some(torch.fresh("unpermute backward", own.0, own.1))];
        if held.is_some() {
            results.push(Some(torch.fresh("unpermute backward", grid.0, grid.1)));
        }
        drop((gradient, map, held));
        results
    })
}

/// A fresh tensor of another number of rows each way.
fn moved(torch: &mut Torch, name: &'static str, x: &Tensor, rows: u64, category: Category) -> Tensor {
    let output = torch.in_category(category, |torch| torch.fresh(name, x.shape.with(0, rows), x.dtype));
    fresh_back(torch, output, x, name, Some(category))
}

/// Between the expert-parallel ranks; routing is taken as even.
fn all_to_all(rank: &Rank, torch: &mut Torch, x: &Tensor) -> Tensor {
    if rank.mesh.ep == 1 {
        return x.clone();
    }
    let rows = x.shape.size(0);
    moved(torch, "all_to_all", x, rows, Category::Communication)
}

/// Tokens of the expert-tensor-parallel ranks together.
fn gather(rank: &Rank, torch: &mut Torch, x: &Tensor) -> Tensor {
    let parts = rank.mesh.expert_tp();
    if parts == 1 {
        return x.clone();
    }
    let rows = x.shape.size(0) * parts;
    moved(torch, "all_gather", x, rows, Category::Communication)
}

/// Summed over the expert-tensor-parallel ranks and apart again.
fn scatter(rank: &Rank, torch: &mut Torch, x: &Tensor) -> Tensor {
    let parts = rank.mesh.expert_tp();
    if parts == 1 {
        return x.clone();
    }
    let rows = x.shape.size(0) / parts;
    moved(torch, "reduce_scatter", x, rows, Category::Communication)
}

/// Chunks of tokens in another order.
fn sort(torch: &mut Torch, x: &Tensor) -> Tensor {
    let rows = x.shape.size(0);
    moved(torch, "sort chunks", x, rows, Category::Activations)
}

/// `TEGroupedMLP`.
fn experts(rank: &Rc<Rank>, torch: &mut Torch, x: Tensor, probabilities: Option<Tensor>, sizes: &Mixture) -> Tensor {
    let (hidden, received) = (x.shape.last(), x.shape.size(0));
    let (x, probabilities) = padded(rank, torch, x, probabilities, sizes);
    let output = products(rank, torch, x, probabilities, sizes, hidden);
    match output.shape.size(0) == received {
        true => output,
        false => moved(torch, "unpad", &output, received, Category::Activations),
    }
}

/// Before products in fp8 every expert's tokens are padded to a multiple that the kernels take (`Fp8Padding`).
fn padded(
    rank: &Rc<Rank>,
    torch: &mut Torch,
    x: Tensor,
    probabilities: Option<Tensor>,
    sizes: &Mixture,
) -> (Tensor, Option<Tensor>) {
    let Some(fp8) = rank.fp8_here(torch) else { return (x, probabilities) };
    let multiple = if fp8.recipe == Fp8Recipe::Mxfp8 { 32 } else { 16 };
    let local = (sizes.experts / rank.mesh.ep.max(1)).max(1);
    let rows = (x.shape.size(0).div_ceil(local)).next_multiple_of(multiple) * local;
    if rows == x.shape.size(0) {
        return (x, probabilities);
    }
    let probabilities = probabilities.map(|own| moved(torch, "pad", &own, rows, Category::Activations));
    (moved(torch, "pad", &x, rows, Category::Activations), probabilities)
}

fn products(
    rank: &Rc<Rank>,
    torch: &mut Torch,
    x: Tensor,
    probabilities: Option<Tensor>,
    sizes: &Mixture,
    hidden: u64,
) -> Tensor {
    let wide = rank.grouped_linear(torch, &x, 2 * sizes.width / rank.mesh.expert_tp(), false);
    drop(x);
    if rank.recomputes(RecomputeModule::MoeAct) {
        let shared = Rc::clone(rank);
        let inputs: Vec<Tensor> = std::iter::once(wide).chain(probabilities).collect();
        let (activated, discarded) = recompute::without_output(torch, &inputs, move |torch, inputs| {
            shared.activation(torch, &inputs[0], true, inputs.get(1))
        });
        drop(inputs);
        let output = rank.grouped_linear(torch, &activated, hidden, true);
        if let Some(discarded) = discarded {
            discarded.discard_until(&output);
        }
        return output;
    }
    let activated = rank.activation(torch, &wide, true, probabilities.as_ref());
    drop((wide, probabilities));
    rank.grouped_linear(torch, &activated, hidden, false)
}

fn shared_experts(rank: &Rc<Rank>, torch: &mut Torch, x: &Tensor, sizes: &Mixture) -> Tensor {
    let sizes = *sizes;
    let shared = Rc::clone(rank);
    let part = move |torch: &mut Torch, inputs: &[Tensor]| {
        // Beside the dispatch the input is gathered by hand, and the gathered one is kept.
        let by_hand = shared.options.moe.shared_expert_overlap && shared.scattered();
        let output = match by_hand {
            true => {
                let rows = inputs[0].shape.size(0) * shared.mesh.tp;
                let gathered = moved(torch, "all_gather", &inputs[0], rows, Category::Communication);
                let output = mlp::local(&shared, torch, &gathered, sizes.shared);
                moved(torch, "reduce_scatter", &output, rows / shared.mesh.tp, Category::Communication)
            }
            false => mlp::gated(&shared, torch, &inputs[0], sizes.shared),
        };
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
