//! What layers keep for backward, on the host: `cpu_offloading` of Transformer Engine.
//!
//! Source: transformer_engine/pytorch/cpu_offload.py. A layer's tensors are under way while the next layer runs, in both
//! directions: they are on the card for that long, too.

use std::rc::Rc;

use super::rank::Rank;
use crate::dtype::DType;
use crate::memory::log::Category;
use crate::memory::saved::ToHost;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;

/// Runs a layer whose saved tensors go to the host.
pub(super) fn layer(rank: &Rc<Rank>, torch: &mut Torch, body: impl FnOnce(&mut Torch) -> Tensor) -> Tensor {
    let before = torch.log.borrow().host.now();
    torch.saves_on_host = Some(ToHost::All);
    let output = body(torch);
    torch.saves_on_host = None;
    let bytes = torch.log.borrow().host.now().saturating_sub(before);
    rank.under_way(Some(under_way(torch, bytes)));
    let Some(edge) = &output.edge else { return output };
    // The layer before comes back while this one goes backward.
    let earlier = rank.offloaded(bytes);
    let shared = Rc::clone(rank);
    edge.node.run_before(Rc::new(move |torch: &mut Torch| {
        let coming = (earlier > 0).then(|| under_way(torch, earlier));
        shared.under_way(coming);
    }));
    output
}

fn under_way(torch: &mut Torch, bytes: u64) -> Tensor {
    let make = |torch: &mut Torch| torch.fresh("under way to the host", Shape::from([bytes]), DType::U8);
    torch.in_category(Category::Activations, make)
}
