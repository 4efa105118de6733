//! Matrices that a checkpoint holds in few bits, and the linears over them: what each library's layer allocates.
//!
//! | kernel | where it was read |
//! |---|---|
//! | GPTQ in training | gptqmodel 7.3: nn_modules/qlinear/torch.py (its Triton layer hands over to it), `dequantize_weight` |
//! | GPTQ, AWQ in inference | gptqmodel 7.3: nn_modules/qlinear/marlin.py, utils/marlin.py |
//! | AWQ in training | gptqmodel 7.3: nn_modules/qlinear/gemm_awq_triton.py |
//! | HQQ | hqq 0.2.8: core/quantize.py (`HQQMatmulNoCacheMul`), core/bitpack.py |
//! | fp8 | transformers 5.17: integrations/finegrained_fp8.py, integrations/deepgemm.py |

use super::Torch;
use crate::dtype::DType;
use crate::memory::autograd::Saved;
use crate::memory::tensor::Tensor;
use crate::model::Shape;
use smallvec::smallvec;

/// A matrix `[out, in]` as a checkpoint holds it.
#[derive(Debug, Clone)]
pub struct StoredWeight {
    /// Its packed elements, scales and zeros.
    pub parts: Vec<Tensor>,
    /// Sizes of the matrix.
    pub shape: Shape,
    /// Whose code multiplies with it.
    pub kernel: StoredKernel,
}

/// Whose code multiplies with a stored matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoredKernel {
    /// gptqmodel's torch layer: the dense matrix is made from integers step by step, and autograd keeps it.
    GptqTorch,
    /// A fused kernel over packed integers, with a buffer for its sums.
    Marlin,
    /// gptqmodel's AWQ layer: dense in fp16, again in backward.
    AwqDense,
    /// HQQ: dense in the compute type, again in backward.
    Hqq {
        /// Bits of an element.
        bits: u64,
    },
    /// Activations in fp8 by groups of 128, a fused kernel.
    Fp8,
    /// Experts in MXFP4: a fused kernel.
    Mxfp4,
}

impl Torch {
    /// A linear over a stored matrix.
    pub fn stored_linear(&mut self, x: &Tensor, weight: &StoredWeight, bias: Option<&Tensor>) -> Tensor {
        match weight.kernel {
            StoredKernel::GptqTorch => self.gptq_linear(x, weight, bias),
            StoredKernel::AwqDense => self.awq_linear(x, weight, bias),
            StoredKernel::Hqq { bits } => self.hqq_linear(x, weight, bits, bias),
            StoredKernel::Marlin => {
                let output = self.fresh("marlin_gemm", x.shape.with(-1, weight.shape.size(0)), x.dtype);
                drop(self.scratch("marlin_gemm", self.marlin_scratch(x)));
                output
            }
            StoredKernel::Fp8 | StoredKernel::Mxfp4 => {
                let output = self.fresh("fp8_gemm", x.shape.with(-1, weight.shape.size(0)), x.dtype);
                let (rows, inputs) = (x.elements() / x.shape.last().max(1), x.shape.last());
                let narrow = self.fresh("fp8", Shape::from([rows, inputs]), DType::F8E4M3);
                let scales = self.fresh("fp8 scales", Shape::from([rows, inputs.div_ceil(128)]), DType::F32);
                drop((narrow, scales));
                self.with_bias(output, bias)
            }
        }
    }

    /// The fp32 sums of Marlin's blocks: up to 64 rows by 256 columns for each multiprocessor.
    fn marlin_scratch(&self, x: &Tensor) -> u64 {
        let rows = (x.elements() / x.shape.last().max(1)).next_multiple_of(16).min(64);
        self.device.multiprocessors * rows * 256 * 4
    }

    /// `out.add_(bias)` of a frozen bias: in place.
    fn with_bias(&mut self, output: Tensor, bias: Option<&Tensor>) -> Tensor {
        match bias.filter(|bias| bias.needs_grad()) {
            Some(bias) => self.in_place(crate::model::op::Binary::Add, &output, bias),
            None => output,
        }
    }

    /// `TorchLinear.forward` in training: shifts, masks and differences in integers, then the scaled matrix `[in, out]`,
    /// which `matmul` keeps for backward.
    fn gptq_linear(&mut self, x: &Tensor, weight: &StoredWeight, bias: Option<&Tensor>) -> Tensor {
        let (outputs, inputs) = (weight.shape.size(0), weight.shape.size(1));
        let shape = Shape::from([inputs, outputs]);
        let dense = {
            let codes = {
                let shifted = self.fresh("bitwise_right_shift", shape, DType::I32);
                let narrow = self.fresh("_to_copy", shape, DType::I8);
                drop(shifted);
                let codes = self.fresh("bitwise_and", shape, DType::I8);
                drop(narrow);
                codes
            };
            let scales = self.fresh("index", shape, DType::F16);
            let zeros = self.fresh("index", shape, DType::I8);
            let difference = self.fresh("sub", shape, DType::I8);
            drop(zeros);
            let dense = self.fresh("mul", shape, DType::F16);
            drop((codes, scales, difference));
            dense
        };
        let dense = self.cast(&dense, x.dtype);
        let rows = x.elements() / inputs.max(1);
        let flat = self.reshape(x, Shape::from([rows, inputs]));
        let product = self.matmul(&flat, &dense);
        drop((dense, flat));
        let output = self.reshape(&product, x.shape.with(-1, outputs));
        drop(product);
        self.with_bias(output, bias)
    }

    /// `AwqGemmTritonFn`: keeps its input; both ways it makes the dense matrix, backward once more for every sample.
    fn awq_linear(&mut self, x: &Tensor, weight: &StoredWeight, bias: Option<&Tensor>) -> Tensor {
        let (outputs, inputs) = (weight.shape.size(0), weight.shape.size(1));
        let shape = Shape::from([inputs, outputs]);
        let half = self.cast(&x.detached(), DType::F16);
        let dense = self.fresh("awq_dequantize", shape, DType::F16);
        self.use_blas();
        let product = self.fresh("matmul", x.shape.with(-1, outputs), DType::F16);
        drop((dense, half));
        let product = match self.records(&[x]) {
            false => product,
            true => {
                let saved = Saved::new(self, x);
                let (own, batch) = (x.shape, if x.shape.rank() > 2 { x.shape.size(0) } else { 1 });
                self.attach(product, &[x], move |torch, gradient| {
                    let kept = saved.get(torch);
                    let dense = torch.fresh("awq_dequantize", shape, DType::F16);
                    let dense = torch.cast(&dense, gradient.dtype);
                    let repeated = torch.fresh("repeat", Shape::from([batch, outputs, inputs]), gradient.dtype);
                    torch.use_blas();
                    let result = torch.fresh("bmm", own, gradient.dtype);
                    drop((dense, repeated, kept));
                    smallvec![Some(result)]
                })
            }
        };
        let output = self.with_bias(product, bias);
        self.cast(&output, x.dtype)
    }

    /// `HQQMatmulNoCacheMul`: keeps its input; both ways it makes the dense matrix.
    fn hqq_linear(&mut self, x: &Tensor, weight: &StoredWeight, bits: u64, bias: Option<&Tensor>) -> Tensor {
        let outputs = weight.shape.size(0);
        let dense = self.hqq_dequantised(weight.shape, bits, x.dtype);
        self.use_blas();
        let output = self.fresh("matmul", x.shape.with(-1, outputs), x.dtype);
        drop(dense);
        if !self.records(&[x]) {
            return self.with_bias(output, bias);
        }
        let saved = Saved::new(self, x);
        let (own, shape) = (x.shape, weight.shape);
        let output = self.attach(output, &[x], move |torch, gradient| {
            let kept = saved.get(torch);
            let dense = torch.hqq_dequantised(shape, bits, gradient.dtype);
            torch.use_blas();
            let result = torch.fresh("matmul", own, gradient.dtype);
            drop((dense, kept));
            smallvec![Some(result)]
        });
        self.with_bias(output, bias)
    }

    /// `Quantizer.dequantize`: unpacked, less the zeros, times the scales; three matrices at once.
    fn hqq_dequantised(&mut self, shape: Shape, bits: u64, dtype: DType) -> Tensor {
        let unpacked = self.fresh("unpack", shape, dtype);
        if bits < 8 {
            let packed = Shape::from([shape.elements().saturating_mul(bits).div_ceil(8)]);
            let masked = self.fresh("bitwise_and", packed, DType::U8);
            let shifted = self.fresh("bitwise_right_shift", packed, DType::U8);
            drop((masked, shifted));
        }
        let centred = self.fresh("sub", shape, dtype);
        let scaled = self.fresh("mul", shape, dtype);
        // The name of the first is bound anew only now.
        drop((centred, unpacked));
        scaled
    }
}
