//! The router of a mixture: scores, the choice of experts, capacity, and the loss that balances it.
//!
//! Source: megatron/core/transformer/moe/{router,moe_utils}.py.

use smallvec::smallvec;
use std::rc::Rc;

use super::architecture::Mixture;
use super::rank::Rank;
use crate::dtype::DType;
use crate::memory::autograd::Saved;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;

/// What a router decides.
pub(super) struct Routing {
    /// The probability of every expert for every token.
    pub probabilities: Tensor,
    /// Which experts every token goes to.
    pub chosen: Tensor,
    /// Where every token goes, as the permutation wants it.
    pub map: Tensor,
}

/// Scores every token, and chooses its experts.
pub(super) fn route(rank: &Rc<Rank>, torch: &mut Torch, x: &Tensor, sizes: &Mixture) -> Routing {
    let tokens = x.shape.size(0);
    let grid = Shape::from([tokens, sizes.experts]);
    let logits = gating(rank, torch, x, sizes.experts);
    let dtype = logits.dtype;
    // Scores in fp32 are kept by the softmax, once for the choice and once for the balancing loss; masks by what they
    // multiply; indices by the gathers and scatters.
    let scores = torch.fresh("softmax", grid, DType::F32);
    let narrow = torch.fresh("type_as", grid, dtype);
    let indices = torch.fresh("topk", Shape::from([tokens, sizes.top_k]), DType::I64);
    let scattered = torch.fresh("scatter", grid, dtype);
    let chosen = torch.fresh("routing map", grid, DType::Bool);
    drop(narrow);
    // Capacity makes a mask of its own, which is the choice from then on.
    let capped = rank.options.moe.capacity_percent.is_some();
    let chosen = if capped { torch.fresh("capacity mask", grid, DType::Bool) } else { chosen };
    let balance = torch.fresh("softmax", grid, DType::F32);
    let output = torch.fresh("routing probabilities", grid, dtype);
    drop(scattered);
    let map = torch.fresh("row id map", Shape::from([tokens, 2 * sizes.experts + 1]), DType::I32);
    if !torch.records(&[&logits]) {
        return Routing { probabilities: output, chosen, map };
    }
    let kept: Vec<Tensor> = [scores, indices, balance].into_iter().chain(capped.then(|| chosen.clone())).collect();
    let saved: Vec<Saved> = kept.iter().map(|tensor| Saved::new(torch, tensor)).collect();
    drop(kept);
    let probabilities = torch.attach(output, &[&logits], move |torch, gradient| {
        let held: Vec<Tensor> = saved.into_iter().map(|saved| saved.get(torch)).collect();
        let wide = torch.fresh("softmax backward", grid, DType::F32);
        let result = torch.fresh("softmax backward", grid, dtype);
        drop((held, wide, gradient));
        smallvec![Some(result)]
    });
    Routing { probabilities, chosen, map }
}

/// The product with the router's weight; its input is kept as it is.
fn gating(rank: &Rc<Rank>, torch: &mut Torch, x: &Tensor, experts: u64) -> Tensor {
    let wide = rank.options.moe.router_fp32;
    let dtype = if wide { DType::F32 } else { rank.dtype };
    rank.use_workspace(torch, false);
    let output = torch.fresh("router", Shape::from([x.shape.size(0), experts]), dtype);
    if !torch.records(&[x]) {
        return output;
    }
    let saved = Saved::new(torch, x);
    let own = rank.dtype;
    torch.attach(output, &[x], move |torch, gradient| {
        let held = saved.get(torch);
        let mut result = torch.fresh("router backward", held.shape, dtype);
        let input = (dtype != own).then(|| torch.fresh("to", held.shape, dtype));
        let weight = torch.fresh("router backward", Shape::from([experts, held.shape.last()]), dtype);
        drop(input);
        if dtype != own {
            result = torch.fresh("to", held.shape, own);
        }
        drop((weight, held, gradient));
        smallvec![Some(Tensor { viewed: true, ..result })]
    })
}
