//! Optimizers of bitsandbytes (bitsandbytes/optim/optimizer.py): their state; a step is one kernel per parameter.

use crate::dtype::DType;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::model::Shape;
use crate::plan::OptimizerKind;

/// Tensors with fewer elements keep fp32 states even in the 8-bit optimizers (`min_8bit_size`).
const SMALL: u64 = 4096;
/// Elements that share a scale.
const BLOCK: u64 = 256;
/// Smaller states are not paged.
const PAGED_FROM: u64 = 100_000;

/// The state of one parameter; none for the optimizers of others.
pub(super) fn states(torch: &mut Torch, kind: OptimizerKind, parameter: &Tensor) -> Vec<Tensor> {
    use OptimizerKind as K;
    // AdEMAMix keeps its fast and slow moments in one buffer of twice the size.
    let (moments, narrow): (&[u64], bool) = match kind {
        K::AdamWBnb32 | K::PagedAdamW32 | K::PagedAdam32 | K::Lamb => (&[1, 1], false),
        K::AdamW8bit | K::PagedAdamW8bit | K::Adam8bit | K::PagedAdam8bit | K::Lamb8bit => (&[1, 1], true),
        K::Lion | K::PagedLion32 => (&[1], false),
        K::Lion8bit | K::PagedLion8bit => (&[1], true),
        K::AdEMAMix | K::PagedAdEMAMix32 => (&[2, 1], false),
        K::AdEMAMix8bit | K::PagedAdEMAMix8bit => (&[2, 1], true),
        _ => return Vec::new(),
    };
    let elements = parameter.elements();
    let narrow = narrow && elements >= SMALL;
    // Paged state is managed memory, which the caching allocator never sees.
    let on_device = !kind.is_paged() || elements < PAGED_FROM;
    let mut states = Vec::new();
    // Both moments, then the scales of both.
    if on_device {
        for &copies in moments {
            let shape = if copies == 1 { parameter.shape } else { parameter.shape.inserted(0, copies) };
            let dtype = if narrow { DType::U8 } else { DType::F32 };
            states.push(torch.fresh("optimizer state", shape, dtype));
        }
    }
    if narrow {
        for &copies in moments {
            let scales = Shape::from([copies, elements.div_ceil(BLOCK)]);
            states.push(torch.fresh("absmax", scales, DType::F32));
        }
    }
    if matches!(kind, K::Lamb | K::Lamb8bit) {
        // The norm of the update that bounds it (`max_unorm`).
        states.push(torch.fresh("unorm_vec", Shape::from([1]), DType::F32));
    }
    states
}
