//! Master weights: fp32 copies of narrow weights that the optimizer steps in their place.

use super::Trained;
use crate::dtype::DType;
use crate::memory::log::Category;
use crate::memory::torch::Torch;

/// `parameter.detach().clone().float()` of each.
pub(super) fn make(torch: &mut Torch, parameters: &[Trained]) -> Vec<Trained> {
    let master = |parameter: &Trained| {
        let copy = torch.fresh_like("clone", &parameter.tensor, parameter.tensor.dtype);
        let wide = torch.in_category(Category::OptimizerState, |torch| torch.fresh_like("master", &copy, DType::F32));
        drop(copy);
        let (tensor, leaf) = torch.leaf(wide);
        Trained { tensor, leaf, apart: parameter.apart }
    };
    parameters.iter().map(master).collect()
}

/// Each gradient is widened, then the narrow one goes; what is wide already changes hands.
pub(super) fn take_gradients(torch: &mut Torch, parameters: &[Trained], masters: &[Trained]) {
    for (parameter, master) in parameters.iter().zip(masters) {
        let Some(gradient) = parameter.leaf.grad.take() else { continue };
        let wide = if gradient.dtype == DType::F32 {
            gradient
        } else {
            torch.in_category(Category::Gradients, |torch| torch.fresh_like("_to_copy", &gradient, DType::F32))
        };
        master.leaf.grad.replace(Some(wide));
    }
}
