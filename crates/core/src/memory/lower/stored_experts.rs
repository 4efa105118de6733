//! Routed experts over stored matrices: fused kernels that read fp8 or MXFP4 (transformers 5.17:
//! integrations/finegrained_fp8.py `fp8_grouped_mm_experts_forward`, integrations/mxfp4.py `Mxfp4GptOssExperts`).

use crate::dtype::DType;
use crate::memory::tensor::Tensor;
use crate::memory::torch::Torch;
use crate::memory::torch::stored::StoredKernel;
use crate::model::Shape;
use crate::model::op::Experts;

/// One pass; nothing is kept for backward, these kernels have none.
pub(super) fn run(torch: &mut Torch, spec: &Experts, kernel: StoredKernel, hidden: &Tensor) -> Tensor {
    let (tokens, size) = (hidden.shape.size(0), hidden.shape.last());
    let pairs = tokens.saturating_mul(spec.top_k);
    let wide = if spec.gated { 2 * spec.width } else { spec.width };
    let make = |torch: &mut Torch, name, width| torch.fresh(name, Shape::from([pairs, width]), hidden.dtype);
    let routing = [(); 3].map(|()| torch.fresh("routing", Shape::from([pairs]), DType::I64));
    if kernel == StoredKernel::Mxfp4 {
        // The gate is applied in the first product's epilogue, the sum over experts in the second's.
        let inner = make(torch, "matmul_ogs", spec.width);
        let scattered = make(torch, "matmul_ogs", size);
        let output = torch.fresh("matmul_ogs", hidden.shape, hidden.dtype);
        drop((inner, scattered, routing));
        return output;
    }
    let selected = make(torch, "index", size);
    let up = make(torch, "fp8 grouped_mm", wide);
    let inner = if spec.gated {
        let gate = make(torch, "activation", spec.width);
        let inner = make(torch, "mul", spec.width);
        drop(gate);
        inner
    } else {
        make(torch, "activation", spec.width)
    };
    drop((up, selected));
    let down = make(torch, "fp8 grouped_mm", size);
    drop(inner);
    let weighted = make(torch, "mul", size);
    let restored = make(torch, "index", size);
    drop((down, weighted));
    let output = torch.fresh("sum", hidden.shape, hidden.dtype);
    drop((restored, routing));
    output
}
